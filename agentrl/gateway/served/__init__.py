"""OpenAI's chats and completions in front of the embedded engine, in its process. `agentrl serve` has both."""
