"""Additions with which a real SGLang server runs on a CPU from public wheels; `launch.py` is run by file path."""
