"""`python -m examples.geo3k_vlm.run`: a tiny vision model learns to crop the right field, on a laptop."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.demo.example import Example, Say
from examples.geo3k_vlm.scenes import write_data


@contextmanager
def taught(folder: Path, say: Say) -> Iterator[Sequence[str]]:
    """Make the model in the run's folder. It is not a shipped model, and its flag overrides theirs."""
    from examples.geo3k_vlm.make_model import teach

    yield ["--hf-checkpoint", str(teach(folder / "start", say=say))]


EXAMPLE = Example(
    name="geo3k_vlm",
    config=Path(__file__).with_name("cpu.yaml"),
    model="calculator",
    write_data=write_data,
    goal=0.85,
    others=taught,
)

if __name__ == "__main__":
    EXAMPLE.main()
