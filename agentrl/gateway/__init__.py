"""An HTTP address for agents that know nothing of agentrl: their requests become token-exact trajectories."""
