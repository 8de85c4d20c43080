"""Inference engines over SGLang's HTTP protocol: the pool, the launcher, and the built-in CPU server."""
