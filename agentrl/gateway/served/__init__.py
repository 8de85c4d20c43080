"""OpenAI's chat completions and completions over the embedded engine, in its process. `agentrl serve` serves both."""
