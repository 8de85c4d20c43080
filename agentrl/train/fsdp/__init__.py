"""The train backend on FSDP2 over any causal language model of transformers; only `train.backends` imports it."""
