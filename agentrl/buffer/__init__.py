"""The store between rollout and training. It imports `data`, never the other way round."""
