"""What a real SGLang server needs to run on a CPU from public wheels; `launch.py` is run by file path."""
