"""Prompts and their sources."""
