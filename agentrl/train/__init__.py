"""Training: batches, packing, schedules, and the backends behind one protocol. Importing this package or its `settings`
loads neither torch nor megatron."""
