"""Acceptance of the tool-call and reasoning parsers: data and tests that were written before the parsers."""
