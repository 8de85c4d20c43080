"""Updates, adapters and offload of the model's weights while the server runs.

1. Names and shapes are checked before the first write, so a bad update leaves the old weights.
2. Weights are read outside the engine's thread. Writing is an exclusive action of the engine.
3. Updates over a process group run between `begin` and `end`. Per-expert tensors are written into fused tensors.
4. Requests wait while weights or cache are offloaded. Cached prefixes are lost; weights are restored exactly."""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import anyio.to_thread
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.model import load_model
from agentrl.engine.weights import WHOLE
from agentrl.errors import AgentRLError, CheckpointError
from agentrl.lora import LoraShape, attach, pairs, read_adapter
from agentrl.modelfolder import VISION_MODEL_TYPES
from agentrl.numerics.offload import OffloadedTensors, release_freed_memory
from agentrl.numerics.weight_group import WeightReceiver, views
from agentrl.serving.http import refused, update_refused

_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>(gate|up|down)_proj|w[123])\.weight")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OTHER_NAMES = {"model.language_model.": "model.", ".block_sparse_moe.": ".mlp."}  # folder -> transformers
JOIN_TIMEOUT = timedelta(seconds=60)
Tag = Literal["weights", "kv_cache", "cuda_graph"]  # kinds of memory that can be freed; this engine has no CUDA graphs
TAGS: tuple[Tag, ...] = get_args(Tag)
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
Named = list[tuple[str, Tensor]]  # tensors by name


class WeightUpdater:
    """Weight updates of a model. A bad update is a `RequestError`. Methods with an `Engine` run in its thread."""

    def __init__(self, model: Any) -> None:
        self._model, self.session_open = model, False
        self._groups: dict[str, WeightReceiver | None] = {}
        self._attached: list[Any] = []
        self._offloaded: OffloadedTensors | None = None
        # A separate limiter: joins that wait for missing members must not delay other calls.
        self._joining = anyio.CapacityLimiter(64)

    def begin(self) -> None:
        if self.session_open:
            raise update_refused("a weight-update session is already open; call end_weight_update() first")
        self.session_open = True

    def end(self) -> None:
        if not self.session_open:
            raise update_refused("no weight-update session is open; call begin_weight_update() first")
        self.session_open = False
        for group in filter(None, self._groups.values()):
            group.end()

    def require_session(self, caller: str) -> None:
        if not self.session_open:
            raise update_refused(f"{caller} must run between begin_weight_update() and end_weight_update()")

    def read_folder(self, path: str) -> Named:
        """Return the tensors of a Hugging Face folder under names that the model knows; memory-mapped if possible."""
        if not (files := sorted(Path(path).glob("*.safetensors"))):
            raise update_refused(f"Failed to get weights iterator: no *.safetensors files in '{path}'.")
        named: Named = []
        for file in files:
            try:
                named += load_file(file).items()
            except (OSError, SafetensorError) as error:
                raise update_refused(f"Failed to get weights iterator: {file.name}: {error}.") from error
        own, names = self._model.state_dict().keys(), {name for name, _ in named}
        if not names <= own:
            dtype = str(self._model.dtype).removeprefix("torch.")
            try:
                other = load_model(path, dtype=dtype, device="cpu", trust_remote_code=False)
            except AgentRLError as error:
                raise update_refused(f"Failed to get weights iterator: {error}.") from error
            named = list(other.state_dict().items())
        elif missing := own - names - self._model.all_tied_weights_keys.keys():
            raise update_refused(f"the checkpoint lacks {len(missing)} of the model's tensors, one is {min(missing)}.")
        self._targets(named)
        return named

    def read_adapter(self, path: str) -> tuple[LoraShape, list[tuple[torch.nn.Linear, Tensor, Tensor]]]:
        """Return the shape of the PEFT adapter at `path`, and the layers that it adapts, each with its A and B."""
        try:
            shape, tensors = read_adapter(Path(path))
            layers = shape.layers(self._model)
        except CheckpointError as error:
            raise update_refused(str(error)) from error
        like = {"device": self._model.device, "dtype": self._model.dtype}
        found = [(layers.get(name), a.to(**like), b.to(**like)) for name, a, b in pairs(tensors)]
        fitting = [(m, a, b) for m, a, b in found if m is not None and m.weight.shape == (len(b), a.shape[1])]
        if len(fitting) != len(found) or not found:
            raise update_refused(f"{path}: an adapter of another model: {len(fitting)} of its {len(found)} pairs fit.")
        return shape, fitting

    def attach(self, engine: Engine, scale: float, layers: Sequence[tuple[torch.nn.Linear, Tensor, Tensor]]) -> None:
        """Attach this adapter to the model in place of the former adapter."""
        _check_present(engine)
        while self._attached:
            self._attached.pop().remove()
        for layer, *pair in layers:
            a, b = (partial(torch.nn.functional.linear, weight=weight) for weight in pair)
            self._attached.append(attach(layer, a, b, scale, lambda: True))
        engine.weights_changed()

    async def join(self, *, address: str, rank: int, world_size: int, name: str, backend: str) -> None:
        if name in self._groups:
            raise update_refused(f"The group {name!r} exists already; destroy it first.")
        if not re.fullmatch(r"\w+", name):
            raise update_refused(f"group_name must have letters, digits and _ only; got {name!r}.")
        if not 1 <= rank < world_size:
            raise update_refused(f"rank_offset must be in [1, world_size), as rank 0 is the trainer's; got {rank}.")
        join = partial(WeightReceiver, backend=backend, address=address, world_size=world_size, rank=rank, name=name)
        join = partial(join, timeout=JOIN_TIMEOUT)
        self._groups[name] = None  # reserves the name while the members join
        try:
            self._groups[name] = await anyio.to_thread.run_sync(join, limiter=self._joining)
        except (RuntimeError, ValueError, OSError) as error:
            raise update_refused(f"Failed to initialize custom process group: {error}.") from error
        finally:
            if self._groups[name] is None:
                del self._groups[name]

    async def destroy(self, name: str) -> None:
        if (group := self._groups.get(name)) is None:
            raise update_refused("The group to be destroyed does not exist.")
        del self._groups[name]
        await anyio.to_thread.run_sync(group.close)

    def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[list[int]], group_name: str, *, flat: bool
    ) -> Named:
        """Check names and shapes; then receive tensors that rank 0 broadcasts, one by one or as one flat buffer."""
        if (group := self._groups.get(group_name)) is None:
            known = list(self._groups)
            raise update_refused(f"Group {group_name} not in {known}. Please call `init_weights_update_group` first.")
        dtypes = [dtype.removeprefix("torch.") for dtype in dtypes]
        if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
            raise update_refused(f"dtypes must be among {', '.join(DTYPES)}, got {unknown[0]!r}.")
        try:
            specs = list(zip(names, dtypes, shapes, strict=True))
            planned = [(name, torch.empty(shape, dtype=DTYPES[dtype], device="meta")) for name, dtype, shape in specs]
            self._targets(planned)
            if flat:
                return list(views(group.receive(sum(t.nbytes for _, t in planned), self._model.device), specs))
            sizes = zip(specs, (tensor.nbytes for _, tensor in planned), strict=True)
            single = (views(group.receive(size, self._model.device), [spec]) for spec, size in sizes)
            return [(name, tensor.clone()) for named in single for name, tensor in named]
        except (ValueError, RuntimeError) as error:
            said = f"Failed to receive the weights, by their names, dtypes and shapes: {error}."
            raise update_refused(said) from error

    def write(self, engine: Engine, named: Sequence[tuple[str, Tensor]], version: str | None) -> None:
        """Copy the tensors into the model, drop cached prefixes, and set the version label (None keeps the label)."""
        _check_present(engine)
        targets = self._targets(named)
        with torch.no_grad():
            for target, (_, tensor) in zip(targets, named, strict=True):
                target.copy_(tensor)
        engine.weights_changed()
        if version is not None:
            engine.version = version

    def _targets(self, named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
        own = self._model.state_dict()
        targets = []
        for name, tensor in named:
            inner = name if name in own else self._own_name(name)
            if (target := own[inner] if inner in own else _expert_view(own, inner)) is None:
                raise update_refused(f"the model has no tensor named {name!r}.")
            if target.shape != tensor.shape:
                raise update_refused(f"{name}: expected shape {list(target.shape)}, got {list(tensor.shape)}.")
            targets.append(target)
        return targets

    def _own_name(self, name: str) -> str:
        """Return transformers' name of a tensor that has another name in a folder."""
        if self._model.config.model_type in VISION_MODEL_TYPES:
            inner = name.removeprefix("model.")
            return f"model.{inner}" if inner.startswith("visual.") else f"model.language_model.{inner}"
        for part, ours in _OTHER_NAMES.items():
            name = name.replace(part, ours)
        return name

    def checksums(self, engine: Engine) -> dict[str, str]:
        """Return a 64-bit BLAKE2b of every tensor's bytes, as hex, by the model's names."""
        _check_present(engine)
        raw = ((name, t.cpu().contiguous().view(torch.uint8).numpy()) for name, t in self._model.state_dict().items())
        return {name: hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest() for name, data in raw}

    def release(self, engine: Engine, tags: Collection[Tag]) -> None:
        """Free memory; memory that is free already is skipped. Raises RequestError: sequences are being generated, or
        the folder for temporary files has no room for the weights."""
        if engine.running:
            raise refused("release_memory_occupation: requests are running; abort them, or wait for their end.")
        if "kv_cache" in tags and "kv_cache" not in engine.released:
            engine.weights_changed()  # so that no lost prefix is reused
            engine.cache.release()
            release_freed_memory()
        if "weights" in tags and "weights" not in engine.released:
            try:
                self._offloaded = OffloadedTensors(self._model.state_dict().values())
            except OSError as error:
                raise refused(f"release_memory_occupation: the weights could not be offloaded: {error}.") from error
        engine.released |= {tag for tag in tags if tag in WHOLE}

    def resume(self, engine: Engine, tags: Collection[Tag]) -> None:
        """Allocate the memory again; memory that was not released does not change."""
        if "weights" in tags and self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        if "kv_cache" in tags and "kv_cache" in engine.released:
            engine.cache.restore()
        engine.released -= set(tags)


def _check_present(engine: Engine) -> None:
    if "weights" in engine.released:
        raise update_refused("the weights' memory was released: POST /resume_memory_occupation first.")


def _expert_view(own: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return the view of a fused tensor that `name` stands for; None if there is none. Checkpoints and trainers
    name `...mlp.experts.3.gate_proj.weight` (or `w1`); transformers 5 holds all experts of a layer in
    `...mlp.experts.gate_up_proj` [experts, 2 * intermediate, hidden] and `...mlp.experts.down_proj`
    [experts, hidden, intermediate]."""
    if (found := _EXPERT.fullmatch(name)) is None:
        return None
    part = _PARTS.get(found["part"], found["part"]).removesuffix("_proj")
    fused = own.get(f"{found['layer']}.{'down' if part == 'down' else 'gate_up'}_proj")
    expert = int(found["expert"])
    if fused is None or expert >= fused.shape[0]:
        return None
    if part == "down":
        return fused[expert]
    half = fused.shape[1] // 2
    return fused[expert, :half] if part == "gate" else fused[expert, half:]
