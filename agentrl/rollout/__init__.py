"""Rollouts: prompts in, finished and graded groups of samples out. Imports neither `train` nor `cluster`."""
