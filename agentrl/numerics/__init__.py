"""Numeric building blocks of trainer and engine: batch-invariant sums, offloaded tensors, weight groups."""
