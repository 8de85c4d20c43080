"""What people bring along from slime and retrain: their flags, module names, function forms and configuration files.

Nothing else needs this room: the rooms ask for it by `plugins.optional`, and go on without it where the folder is not there.
Tables of names are data files beside the code that reads them.
"""

import csv
from importlib.resources import files


def rows(table: str) -> list[list[str]]:
    """The lines of a table of this room (`flags.tsv`) below its head."""
    lines = files(__name__).joinpath(table).read_text(encoding="utf-8").splitlines()
    return list(csv.reader(lines[1:], delimiter="\t", quoting=csv.QUOTE_NONE))
