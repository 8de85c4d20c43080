"""The rollout room: prompts in, finished and graded groups of samples out. It imports neither `train` nor `cluster`."""
