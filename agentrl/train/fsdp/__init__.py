"""The FSDP2 train backend, for causal language models of transformers. Only `train.backends` imports it."""
