"""The run itself, on Ray or in one process: see `protocols`, `schedule` and `driver`."""
