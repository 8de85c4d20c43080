"""The tensors of one microbatch, from a `TrainBatch` and a packing plan.

1. Samples are laid out as a tree (`agentrl.train.tree`), so that a shared prefix is computed once. Position j predicts
   token j + 1. Nodes are padded to the plan's alignment.
2. `rows` are the positions with an output on this rank, `targets` the tokens that follow, `response_index` their index
   among the batch's response tokens [R]. The last token of a shared prefix has one output for each continuation.
3. Under context parallelism, rank r of n has chunks r and 2n-1-r of each node's 2n chunks (zigzag)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.train.batch import Ints, TrainBatch
from agentrl.train.kernels import AttentionBlocks
from agentrl.train.packing import PackingPlan, padded
from agentrl.train.ranks import Ranks
from agentrl.train.tree import Node, SharedPrefixes, Tree

OutputPositions = Literal["trained", "response"]  # which response tokens have an output: trained or all


@dataclass(frozen=True, slots=True)
class MicrobatchTensors:
    """One microbatch of one rank with t tokens and n outputs."""

    tokens: Tensor  # int64 [1, t]
    positions: Tensor  # int64 [1, t]
    parts: tuple[AttentionBlocks, ...]  # this rank's queries, and keys of all ranks in the tree's order; see `kernels`
    order: Tensor | None  # int64 [T], indices of these keys among those gathered over context parallelism, or None
    rows: Tensor  # int64 [n], indices of the outputs among the t tokens
    targets: Tensor  # int64 [n], the next token id of each output
    response_index: Tensor  # int64 [n], their indices in flat response arrays [R]
    computed: int  # tokens that go through the layers on all context-parallel ranks, padding not counted
    samples: tuple[int, ...]  # indices of the microbatch's samples in the batch
    routing: Tensor | None  # int16 [t, layers x experts per token], -1 if unknown; None if the batch has none
    seen: SeenImages | None = None  # image inputs; None if no rank's microbatch has an image


@dataclass(frozen=True, slots=True)
class SeenImages:
    """The images of a microbatch, each once."""

    pixels: Mapping[str, Tensor]  # arguments of the model's `get_image_features`
    rows: Tensor  # int64 [t], the token's row in the features of all images; -1 for other tokens
    positions: Tensor  # int64 [3, 1, t], the model's positions in time, height and width


def inputs_of(batch: TrainBatch) -> list[NDArray[np.int32]]:
    """Return the model's input for each sample: `keys` of all tokens but the last, which predicts nothing."""
    keys = batch.keys
    return [keys[start : max(start + 1, end - 1)] for start, end in itertools.pairwise(batch.offsets)]


@dataclass(frozen=True, slots=True)
class Packer:
    """Builder of one rank's microbatches, on its device. The number of tokens of each is a multiple of `multiple`.
    `routed`: the model replays the engine's routing. `see`: makes the `SeenImages` of a microbatch from the indices of
    its samples; None if the model sees no images."""

    ranks: Ranks
    device: torch.device
    multiple: int = 1
    routed: bool = False
    see: Callable[[TrainBatch, Sequence[int], PackedLayout, torch.device], SeenImages] | None = None

    def microbatches(self, batch: TrainBatch, plan: PackingPlan, rows: OutputPositions) -> Iterator[MicrobatchTensors]:
        """Yield microbatches in the plan's order. A microbatch without samples has only padding and no outputs."""
        inputs = inputs_of(batch)
        for place, samples in enumerate(plan.ranks[self.ranks.dp_rank]):
            # A sharded model must run its vision tower on all ranks or on none.
            sees = any(len(batch.sample_images(i)) for own in plan.ranks for i in own[place])
            sequences = [inputs[i] for i in samples]
            prefixes = SharedPrefixes.of(sequences) if plan.shares else SharedPrefixes.none(len(sequences))
            tree = Tree.of([len(ids) for ids in sequences], prefixes)
            laid = PackedLayout(tree, plan.alignment, self.ranks.cp, self.ranks.cp_rank, self.multiple)
            outputs = [np.zeros((3, 0), np.int64)]
            outputs += [laid.outputs(number, _outputs(batch, i, rows)) for number, i in enumerate(samples)]
            places, targets, response_index = self._on_device(np.concatenate(outputs, axis=1))
            ids = [batch.sample_tokens(i)[: len(inputs[i])] for i in samples]
            tokens, positions = map(self._on_device, laid.local(ids))
            routed = self.routed and batch.routed_experts is not None and bool(samples)
            yield MicrobatchTensors(
                tokens=tokens[None],
                positions=positions[None],
                parts=laid.parts(),
                order=self._on_device(laid.order()) if laid.cp > 1 else None,
                rows=places,
                targets=targets,
                response_index=response_index,
                computed=laid.tree.tokens,
                samples=tuple(samples),
                routing=self._on_device(laid.routing([batch.sample_routing(i) for i in samples])) if routed else None,
                seen=self.see(batch, samples, laid, self.device) if self.see and sees else None,
            )

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _outputs(batch: TrainBatch, sample: int, rows: OutputPositions) -> Ints:
    """Return [3, n]: the positions of a sample's outputs, the next token ids, and the next tokens' indices in [R]."""
    ids, response = batch.sample_tokens(sample).astype(np.int64), batch.response_slice(sample)
    first = len(ids) - (response.stop - response.start)
    if first < 1:
        raise TrainError(f"sample {sample} of the batch has no prompt token, so nothing predicts its first token")
    keep = np.ones(len(ids) - first, bool) if rows == "response" else batch.sample_loss_mask(sample) == 1
    offsets = np.flatnonzero(keep)
    return np.stack([offsets + first - 1, ids[first:][offsets], offsets + response.start])


class PackedLayout:
    """A tree laid out over the context-parallel ranks, padding included, for rank `rank`. Global places count all
    tokens of the pack; local places count the tokens of this rank."""

    def __init__(self, tree: Tree, alignment: int, cp: int, rank: int, pad: int) -> None:
        self.tree, self.cp, self.rank = tree, cp, rank
        sizes = [padded(len(node), alignment) for node in tree.nodes]
        tail = next(n for n in range(0, alignment * pad + 1, alignment) if (sum(sizes) + n) // cp % pad == 0)
        if not sizes and not tail:
            tail = alignment * pad
        self.nodes: tuple[Node, ...] = tree.nodes
        if tail:  # a padding node without descendants
            self.nodes += (Node(-1, 0, tail, (), len(sizes)),)
            sizes.append(tail)
        self.sizes = sizes
        self.starts: list[int] = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
        self.total = self.starts[-1]
        self.held = self._held(rank)
        self.inverse = np.full(self.total, -1, np.int64)
        self.inverse[self.held] = np.arange(len(self.held))

    def _chunks(self, number: int, rank: int) -> list[tuple[int, int]]:
        """Return the ranges of global places of a rank's part of a node."""
        start, size = self.starts[number], self.sizes[number]
        if self.cp == 1:
            return [(start, start + size)]
        half = size // (2 * self.cp)
        return [(start + c * half, start + (c + 1) * half) for c in (rank, 2 * self.cp - 1 - rank)]

    def _held(self, rank: int) -> Ints:
        chunks = [chunk for number in range(len(self.nodes)) for chunk in self._chunks(number, rank)]
        return np.concatenate([np.arange(a, b) for a, b in chunks])

    def order(self) -> Ints:
        """Return for each global place its place in the concatenated tokens of all ranks."""
        order = np.empty(self.total, np.int64)
        order[np.concatenate([self._held(rank) for rank in range(self.cp)])] = np.arange(self.total)
        return order

    def local(self, sequences: Sequence[NDArray[np.int32]]) -> tuple[Ints, Ints]:
        """Return the ids and positions of this rank's tokens."""
        positions = [node.start + np.arange(size) for node, size in zip(self.nodes, self.sizes, strict=True)]
        return self.laid_out(sequences, 0), np.concatenate(positions)[self.held]

    def laid_out(self, sequences: Sequence[NDArray[Any]], padding: int) -> Ints:
        """Return this rank's part, int64 [..., t], of the sequences' arrays [..., n] with one entry per token."""
        found = np.full((*(sequences[0].shape[:-1] if sequences else ()), self.total), padding, np.int64)
        for node, start in zip(self.nodes, self.starts, strict=False):
            if node.of >= 0:
                found[..., start : start + len(node)] = sequences[node.of][..., node.start : node.end]
        return found[..., self.held]

    def routing(self, rows: Sequence[NDArray[np.int16]]) -> NDArray[np.int16]:
        """Return the rows of this rank's tokens. A shared token has the first sequence's row that is known."""
        found = np.full((self.total, rows[0].shape[1] if rows else 0), -1, np.int16)
        for own, path in zip(reversed(rows), reversed(self.tree.paths), strict=True):
            for number in path:
                node, start = self.nodes[number], self.starts[number]
                part = own[node.start : node.end]
                known = (part[:, :1] >= 0).all(1)
                found[start : start + len(node)][known] = part[known]
        return found[self.held]

    def outputs(self, sequence: int, found: Ints) -> Ints:
        """Return the part of a sequence's outputs [3, n] that this rank computes, at local places."""
        path = np.array(self.tree.paths[sequence])
        nodes = path[np.searchsorted([self.nodes[n].end for n in path], found[0], side="right")]
        shift = np.array(self.starts[:-1]) - [node.start for node in self.nodes]
        rows = self.inverse[found[0] + shift[nodes]]
        return np.stack([rows, *found[1:]])[:, rows >= 0]

    def parts(self) -> tuple[AttentionBlocks, ...]:
        """Return the blocks of keys for this rank's queries: own chunk, earlier chunks of the node, ancestor nodes."""
        own, past, above = [], [], []
        local = 0
        for number, node in enumerate(self.nodes):
            start = self.starts[number]
            for a, b in self._chunks(number, self.rank):
                own.append((local, local + b - a, a, b))
                if a > start:
                    past.append((local, local + b - a, start, min(a, start + len(node))))
                local += b - a
            if node.last > number:
                end = self.starts[node.last + 1] // self.cp
                above.append((len(node.parents), (local, end, start, start + len(node))))
        parts = [AttentionBlocks(tuple(own), causal=True)] + ([AttentionBlocks(tuple(past))] if past else [])
        above.sort(key=lambda block: block[0])
        for _, blocks in itertools.groupby(above, key=lambda block: block[0]):
            parts.append(AttentionBlocks(tuple(block for _, block in blocks)))
        return tuple(parts)
