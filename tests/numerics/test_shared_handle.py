"""Memory handles that an unrelated process opens, as SGLang does."""

import hashlib
import json
import subprocess

import pytest
import torch

from agentrl.numerics.shared_handle import flattened_bucket
from agentrl.numerics.weight_group import views
from tests.support.warm import python

SPECS: list[tuple[str, str, list[int]]] = [
    ("a", "bfloat16", [3, 5]),
    ("b", "float8_e4m3fn", [2]),
    ("c", "float32", [7]),
]
READER = """
import base64, hashlib, io, json, pickle, sys
import torch
from torch.multiprocessing import reductions

ALLOWED = {
    ("torch.multiprocessing.reductions", name)
    for name in ("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename", "rebuild_cuda_tensor")
}
ALLOWED |= {("types", "SimpleNamespace"), ("torch", "Size"), ("torch", "Tensor"), ("torch.storage", "TypedStorage")}
ALLOWED |= {("torch", kind) for kind in ("bfloat16", "float8_e4m3fn", "float32", "uint8")}
ALLOWED |= {("torch.storage", "UntypedStorage"), ("torch", "UntypedStorage")}


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        assert (module, name) in ALLOWED, (module, name)
        return super().find_class(module, name)


own = reductions.rebuild_cuda_tensor
number = lambda uuid: next(i for i in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(i).uuid) == uuid)
reductions.rebuild_cuda_tensor = lambda *given: own(*given[:6], number(given[6]), *given[7:])
found = Unpickler(io.BytesIO(base64.b64decode(sys.stdin.read(), validate=True))).load()
flat, out = found["flattened_tensor"], {}
for part in found["metadata"]:
    tensor = flat[part.start_idx : part.end_idx].view(part.dtype).reshape(part.shape)
    bits = hashlib.sha256(tensor.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    out[part.name] = [str(tensor.dtype), list(tensor.shape), part.numel, bits]
print(json.dumps([str(flat.device.type), out]))
"""
"""SGLang's side, with its rules: the allowed classes, and devices by their UUID."""


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_another_process_reads_the_same_bits(device: str) -> None:
    flat = torch.arange(300, dtype=torch.int32).to(torch.uint8).to(device)
    flat = flat[:60]
    handle = flattened_bucket(flat, SPECS)
    done = subprocess.run([python(), "-c", READER], input=handle, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kind, found = json.loads(done.stdout)
    assert kind == device
    for name, tensor in views(flat, SPECS):
        bits = hashlib.sha256(tensor.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        assert found[name] == [str(tensor.dtype), list(tensor.shape), tensor.nbytes, bits]
