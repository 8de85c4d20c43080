"""Weights for engines that serve a folder with float8 blocks. Tensors that have scales in the folder are sent in
float8, with one scale per block of 128 x 128."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from agentrl.engine.weights import TensorSpec
from agentrl.errors import CheckpointError
from agentrl.train.hf import SCALE, HFFolder

_BLOCK, _LARGEST = 128, torch.finfo(torch.float8_e4m3fn).max


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in float8 (e4m3), and one float32 scale per block of 128 x 128. A scale is the largest absolute
    value / 448, or 1 for a block of zeros. A value is about its float8 value times its block's scale."""
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight.float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = whole.view(-(-rows // _BLOCK), _BLOCK, -(-columns // _BLOCK), _BLOCK)
    scales = blocks.abs().amax((1, 3)) / _LARGEST
    scales[scales == 0] = 1
    small = (blocks / scales[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return small.view(whole.shape)[:rows, :columns].contiguous(), scales


class EngineForm:
    """The form in which engines take a folder's weights. Raises CheckpointError: the scales are not float32."""

    def __init__(self, folder: HFFolder) -> None:
        self.folder, self.scaled = folder, folder.scaled
        if self.scaled and (kind := (folder.quantization or {}).get("scale_fmt")):
            said = f"{folder.path / 'config.json'}: scale_fmt {kind!r}: engines of a run take float32 scales"
            raise CheckpointError(f"{said}; convert the model (agentrl convert), and train the result")

    def specs(self, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """Return the specs of the tensors that `tensors` yields."""
        found = []
        for spec in specs:
            if spec.name in self.scaled:
                found.append(spec._replace(dtype="float8_e4m3fn"))
                spec = TensorSpec(spec.name + SCALE, "float32", [-(-size // _BLOCK) for size in spec.shape])
            found.append(spec)
        return found

    def tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the folder's form: in float8 and with scales, or unchanged."""
        for name, tensor in tensors:
            if name in self.scaled:
                small, tensor = quantise(tensor)
                yield name, small
                name += SCALE
            yield name, tensor
