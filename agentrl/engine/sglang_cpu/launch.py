"""Start a real SGLang server on CPU torch: `python launch.py <options of sglang.launch_server>`.

Three gaps of the public wheels are filled before SGLang is imported:

1. torchvision's wheel is linked to CUDA torch. With CPU torch its operators are missing, and its import fails.
   Declaring the two operators that the import needs is enough.
2. There is no CPU build of `sgl_kernel`. On a CPU without AMX, SGLang imports names from it but calls none of them:
   `stubs/sgl_kernel` has the names.
3. Capturing routed experts pins host memory through CUDA's runtime even on CPU: this pinning becomes a no-op.

SGLang's child processes import this file again as their main module, so they get the same changes."""

import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent / "stubs"))

import torch

# The schemas of torchvision's operators, which its CUDA-linked library cannot register here.
for name in ("nms", "qnms"):
    with suppress(RuntimeError):  # a matching torchvision has declared it already
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

# The part of `torch.cuda.cudart()` that pins host memory, as a no-op.
PINNING = SimpleNamespace(cudaError=SimpleNamespace(success=0), cudaGetErrorString=str)
PINNING.cudaHostRegister = PINNING.cudaHostUnregister = lambda *_: 0
if not torch.cuda.is_available():
    torch.cuda.cudart = lambda: PINNING

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
