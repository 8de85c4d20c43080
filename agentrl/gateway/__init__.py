"""An HTTP address for agents without agentrl code. Their requests become token-exact trajectories."""
