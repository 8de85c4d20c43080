"""Prompts and where they come from."""
