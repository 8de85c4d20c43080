"""`python -m examples.geo3k_vlm.run`: a tiny model that sees, from its warm start to reinforcement learning, on a laptop.

The first run makes the model (`teach.py`), in about 200 seconds of one idle core.
"""

from pathlib import Path

from agentrl.demo.example import Example
from agentrl.train.checkpoints import whole_folder
from examples.geo3k_vlm.scenes import write_data
from examples.geo3k_vlm.teach import teach

HERE, MODEL = Path(__file__).parent, Path("runs/geo3k_vlm/model")

EXAMPLE = Example(
    name="geo3k_vlm",
    config=HERE / "cpu.yaml",
    model=MODEL,
    write_data=write_data,
    goal=0.85,
)

if __name__ == "__main__":
    if not MODEL.is_dir():
        with whole_folder(MODEL) as folder:
            teach(folder)
    EXAMPLE.main()
