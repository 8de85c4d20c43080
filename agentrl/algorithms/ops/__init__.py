"""Tensor code of the algorithms: imports torch, so an algorithm's file imports it where it calls it."""
