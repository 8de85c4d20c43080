"""`python -m agentrl` is the `agentrl` command."""

from agentrl.cli.main import main

if __name__ == "__main__":
    main()
