"""Prompts and where they come from.

1. `prompts`, `order`: rows of a prompt file, and the order in which they are drawn.
2. `source`, `user_source`: groups of samples from rows, or from a user's own class.
"""
