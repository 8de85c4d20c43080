"""Shared code of the graders: reads an answer from a model's text and compares it with a label."""
