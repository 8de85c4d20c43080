"""What people bring along from slime and retrain: their flags, module names, function forms and configuration files.

Nothing else needs this room: the rooms ask for it by `plugins.optional`, and go on without it where the folder is not there.
Tables of names are data files beside the code that reads them.
"""
