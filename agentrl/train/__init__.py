"""Training: batches, packing, schedules, and the backends behind one protocol. Importing it loads no torch."""
