"""Training: batches, packing, schedules, and the backends behind one protocol. Importing the package loads no torch."""
