"""`python -m agentrl.demo`: a tiny model learns to use a calculator."""

from agentrl.demo.run import DEMO

if __name__ == "__main__":
    DEMO.main()
