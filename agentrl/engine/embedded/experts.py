"""Where one expert's matrix lives inside the fused expert tensors of transformers' mixture-of-experts models.

Checkpoints and trainers name `...mlp.experts.3.gate_proj.weight`; transformers 5 holds all experts of a layer in
`...mlp.experts.gate_up_proj` [experts, 2 * intermediate, hidden] and `...mlp.experts.down_proj`
[experts, hidden, intermediate].
"""

import re
from collections.abc import Mapping

from torch import Tensor

_NAME = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


def expert_view(own: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The part of a fused tensor that `name` stands for, as a view; None when there is none."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    part = found["part"]
    fused = own.get(f"{found['layer']}.{'down' if part == 'down' else 'gate_up'}_proj")
    expert = int(found["expert"])
    if fused is None or expert >= fused.shape[0]:
        return None
    if part == "down":
        return fused[expert]
    half = fused.shape[1] // 2
    return fused[expert, :half] if part == "gate" else fused[expert, half:]
