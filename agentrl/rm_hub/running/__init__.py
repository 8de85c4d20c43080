"""Runs graders: worker processes with deadlines, and connections to services."""
