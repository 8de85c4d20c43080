"""Acceptance of the tool-call and reasoning parsers, written before them: data and tests."""
