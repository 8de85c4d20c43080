"""`make example-search`: a tiny model learns to search, on a laptop.

For native tool calls instead of the tags, which are longer, add
`--env examples.search_r1.env:SearchR1ToolEnv --rollout-max-response-len 64`.
"""

from pathlib import Path

from agentrl.demo.example import Example
from examples.search_r1.data import write_train_and_test

HERE = Path(__file__).parent
EXAMPLE = Example("search_r1", HERE / "cpu.yaml", "examples", write_train_and_test)

if __name__ == "__main__":
    EXAMPLE.main()
