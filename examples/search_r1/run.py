"""`make example-search`: a tiny model learns to search, from random weights, on a laptop."""

from pathlib import Path

from agentrl.demo.example import Example
from examples.search_r1.data import write_train_and_test
from examples.search_r1.lessons import SearchLessons

HERE = Path(__file__).parent
EXAMPLE = Example("search_r1", HERE / "cpu.yaml", SearchLessons(), write_train_and_test)

if __name__ == "__main__":
    EXAMPLE.main()
