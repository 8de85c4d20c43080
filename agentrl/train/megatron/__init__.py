"""The Megatron training backend, built from megatron.core alone; importing the package loads none of it."""
