"""The run itself, whatever carries it: see `parts`, `schedule` and `driver`."""
