"""The continuous-batching state machine: admit, plan one packed forward pass, sample, finish.

1. One thread owns an `Engine` and calls `step()` until it returns False; there is no I/O.
2. The slots of finished sequences are the prefix cache. A continued conversation extends its slot. A request copies a
   shared prefix, after waiting for its prefill. A model with states reuses whole slots only.
3. A weight update starts a new epoch. Prefixes of older epochs are never reused; running sequences keep their KV, and
   each token carries the weight version that sampled it.
4. Exclusive actions run between steps if nothing runs or generation is paused; nothing is admitted before them."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from agentrl.engine.embedded.attention import AttentionPlan, Chunk, KVCache
from agentrl.engine.embedded.cpu_model import forward_of
from agentrl.engine.embedded.images import Ids, ImageEncoder, Piece
from agentrl.engine.embedded.model import Routing
from agentrl.engine.embedded.sampling import adjust, choose
from agentrl.engine.embedded.sequence import SequenceState, TopEntry, Wanted
from agentrl.engine.embedded.stopping import ABORTED, aborted
from agentrl.numerics.batch_invariant import batch_invariant

PauseMode = Literal["abort", "in_place", "retract"]
WORTH_WAITING = 32  # a request waits for another request's prefill if that saves more than this many tokens
LEAST_PREFILL = 32  # minimum prefill budget of a step in tokens, even if single-token sequences fill the step
WORTH_EXTENDING = 0.5  # a prompt that reuses at least this share of a slot extends it instead of copying
MASK_LIMIT = 4096  # maximum number of ids in a requested kept set, like SGLang's `--sampling-mask-max-tokens`
NOT_A_NUMBER = aborted("the model's logits are NaN: the weights are broken", 500, "InternalServerError")
_TOO_MANY = f"return_sampling_mask: a token was sampled from more than {MASK_LIMIT}; set top_k"
TOO_MANY_KEPT = aborted(_TOO_MANY, 400, "BadRequest")


@dataclass
class _Slot:
    tokens: Ids
    count: int = 0
    epoch: int = -1
    used: int = 0
    job: SequenceState | None = None
    root: int = -1  # the slot whose first `shared` keys and values are bit-identical to this slot's
    shared: int = 0


class Engine:
    """The engine that runs jobs on a transformers causal language model with attention `attention.ATTENTION`."""

    def __init__(
        self, model: Any, *, slots: int, context_length: int, chunk: int = 1024, batch_invariant: bool = False
    ) -> None:
        self.model, self.batch_invariant, self.chunk = model, batch_invariant, chunk
        self.device: torch.device = model.device
        self._by_kernel = not batch_invariant and self.device.type == "cpu" and model.dtype == torch.float32
        self.forward = forward_of(model, by_kernel=self._by_kernel)
        self.cache = KVCache(model, slots, context_length)
        self.routing = Routing(model, slots, context_length)
        self.encoder = ImageEncoder(model)
        self.slots = [_Slot(np.empty(context_length, dtype=np.int64)) for _ in range(slots)]
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.version, self.epoch, self.generated = "default", 0, 0
        self.paused, self.released = False, set[str]()
        self._exclusive: deque[tuple[Callable[[], None], Callable[[], bool]]] = deque()
        self._clock = itertools.count(1)

    def add(self, job: SequenceState) -> None:
        if job.stop.limit <= 0 and job.want.logprob_start_len < 0:
            self._finish(job, {"type": "length", "length": 0})
        else:
            self.waiting.append(job)

    def abort(self, match: Callable[[SequenceState], bool], reason: Mapping[str, Any] = ABORTED) -> None:
        """End all matching jobs with finish reason `reason`; the jobs keep their output."""
        gone = [job for job in (*self.running, *self.waiting) if match(job)]
        self.waiting = deque(job for job in self.waiting if not match(job))
        for job in gone:
            self._finish(job, dict(reason))

    def pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract":
            for job in reversed(self.running[:]):
                self._release(job)
                job.restart()
                self.waiting.appendleft(job)

    def resume(self) -> None:
        self.paused = False

    def exclusive(self, action: Callable[[], None], gone: Callable[[], bool] = lambda: False) -> None:
        """Run `action` as soon as no job runs or generation is paused. Nothing waits for it if its caller is `gone`."""
        self._exclusive.append((action, gone))

    def weights_changed(self) -> None:
        """Start a new epoch: prefixes and image features cached so far are not used again."""
        self.epoch += 1
        self.encoder.clear()

    def flush(self) -> bool:
        """Drop all cached prefixes. Return False and drop nothing if jobs run, or if jobs wait without a pause."""
        if self.running or (self.waiting and not self.paused):
            return False
        for slot in self.slots:
            slot.count = 0
        return True

    def step(self) -> bool:
        """Do one unit of work. Return False if there is no work until the next request or control call."""
        if self._exclusive and (self.paused or not self.running or self._exclusive[0][1]()):
            self._exclusive.popleft()[0]()
            return True
        if self.paused or self.released:
            return False
        if not self._exclusive:
            self._admit()
        if not self.running:
            return False
        self._forward()
        return True

    def _admit(self) -> None:
        for job in list(self.waiting):
            if all(slot.job is not None for slot in self.slots):
                return
            if job.waits_for is not None:
                if job.waits_for.slot >= 0 and job.waits_for.filled < job.waits_until and job.waits_for.finish is None:
                    continue
                job.waits_for = None
            if self._place(job):
                self.waiting.remove(job)
                self.running.append(job)

    def _place(self, job: SequenceState) -> bool:
        """Give the job a slot. Return False if the job should wait for another job's prefill."""
        wanted = job.known[: self._reusable(job)]
        best, hit = self._best_prefix(wanted)
        for other in self.running:
            if other.filled < len(other.known) and not self.cache.stateful:
                shared = _common(other.known, wanted)
                if shared > hit + WORTH_WAITING and other.filled < shared:
                    job.waits_for, job.waits_until = other, shared
                    return False
        target = best
        if hit == 0 or self.slots[best].job is not None or hit < WORTH_EXTENDING * self.slots[best].count:
            target = min((i for i, slot in enumerate(self.slots) if slot.job is None), key=self._worth)
        slot, source = self.slots[target], self.slots[best]
        self._overwritten(target, hit if target == best else 0)
        if hit and target != best:
            self.cache.copy_prefix(best, target, hit)
            self.routing.copy_prefix(best, target, hit)
            slot.root, slot.shared = (source.root if hit <= source.shared else best), hit
        elif not hit:
            self.cache.begin(target)
        slot.tokens[:hit] = wanted[:hit]
        slot.count, slot.epoch, slot.job = hit, self.epoch, job
        job.slot, job.filled = target, hit
        if not job.retractions:
            job.cached_tokens = hit
        return True

    def _overwritten(self, index: int, start: int) -> None:
        """Record that slot `index` no longer shares its positions from `start` on with other slots."""
        for slot in self.slots:
            if slot.root == index or slot is self.slots[index]:
                slot.shared = min(slot.shared, start)

    def _reusable(self, job: SequenceState) -> int:
        """Return the number of leading tokens whose logits are not needed."""
        last = len(job.known) - 1
        return last if job.want.logprob_start_len < 0 or job.output else min(last, job.want.logprob_start_len)

    def _usable(self, slot: _Slot) -> int:
        return slot.count if slot.epoch == self.epoch else 0

    def _worth(self, index: int) -> tuple[bool, int]:
        """Return a free slot's sort key: empty slots by index (new memory is slow to allocate), then by last use."""
        held = self._usable(self.slots[index]) > 0
        return held, self.slots[index].used if held else index

    def _best_prefix(self, wanted: Ids) -> tuple[int, int]:
        best, hit = 0, 0
        for i, slot in enumerate(self.slots):
            if (count := self._usable(slot)) > hit and len(wanted) > hit and slot.tokens[hit] == wanted[hit]:
                shared = _common(slot.tokens[:count], wanted)
                if shared > hit and (shared == count or not self.cache.stateful):
                    best, hit = i, shared
        return best, hit

    def _forward(self) -> None:
        singles = sorted((j for j in self.running if j.length - j.filled == 1), key=lambda j: j.slot)
        budget = max(self.chunk - len(singles), LEAST_PREFILL)
        work = [(job, 1) for job in singles]
        for job in self.running:
            if (pending := job.length - job.filled) > 1 and budget > 0:
                count = min(pending, budget)
                budget -= count
                work.append((job, count))
        rows = _rows(work)
        logits = self._logits(work, len(singles), [place for place, _, _ in rows])
        self.routing.keep((job.slot, job.filled, count) for job, count in work)
        for job, count in work:
            slot = self.slots[job.slot]
            slot.tokens[job.filled : job.filled + count] = job.compared(job.filled, job.filled + count)
            job.filled += count
            slot.count = job.filled
        with batch_invariant(self.batch_invariant):
            if scored := [(row, job, at) for row, (_, job, at) in enumerate(rows) if at is not None]:
                self._prompt_log_probs(logits, scored)
            self._sample(logits, [(row, job) for row, (_, job, at) in enumerate(rows) if at is None])

    def _logits(self, work: list[tuple[SequenceState, int]], single_count: int, keep: list[int]) -> Tensor:
        ids, where, chunks, pieces = list[int](), list[tuple[int, int, int, int]](), list[Chunk](), list[Piece]()
        for index, (job, count) in enumerate(work):
            pieces.append((job.images, job.filled, job.filled + count, len(ids)))
            if index >= single_count:
                chunks.append(Chunk(job.slot, job.filled, count, len(ids)))
            slot = self.slots[job.slot]
            root = slot.root if slot.shared else job.slot
            ids += job.tokens(job.filled, job.filled + count)
            where += [(job.slot, place, root, slot.shared) for place in range(job.filled, job.filled + count)]
        places = np.array(where).T.copy()
        positions = torch.from_numpy(_positions(places[1], pieces)).to(self.device)
        singles = [(job.slot, job.filled + 1) for job, _ in work[:single_count]]
        plan = AttentionPlan(self.cache, singles, chunks, places, self._by_kernel)
        with torch.inference_mode(), batch_invariant(self.batch_invariant):
            kept = torch.tensor(keep, dtype=torch.long, device=self.device)
            packed = torch.tensor([ids], device=self.device)
            return self.forward(packed, positions, kept, plan, self.encoder.rows(pieces))

    def _prompt_log_probs(self, logits: Tensor, scored: Sequence[tuple[int, SequenceState, int]]) -> None:
        """Append prompt log-probs. `scored`: (row of `logits`, its job, prompt position that the row predicts)."""
        log_probs = torch.log_softmax(logits[[row for row, _, _ in scored]].float(), dim=-1)
        tokens = torch.tensor([job.prompt[at] for _, job, at in scored], device=self.device)
        values = log_probs.gather(1, tokens[:, None])[:, 0].tolist()
        for i, (_, job, _) in enumerate(scored):
            job.input_log_probs.append(values[i])
            _keep_others(job.want, log_probs[i], job.input_top, job.input_ids_log_probs)

    def _sample(self, logits: Tensor, ready: Sequence[tuple[int, SequenceState]]) -> None:
        for _, job in ready:
            if job.stop.limit <= 0:
                self._finish(job, {"type": "length", "length": 0})
            elif job.grammar is not None and (reason := job.grammar.advance(job.output)) is not None:
                self._finish(job, reason)
        if not (ready := [(row, job) for row, job in ready if job.finish is None]):
            return
        jobs, rows = [job for _, job in ready], logits[[row for row, _ in ready]].float()
        for i, job in enumerate(jobs):
            adjust(rows[i], job.params, job.output)
            if len(job.output) < job.params.min_new_tokens and job.stop.forbidden_early:
                rows[i, sorted(job.stop.forbidden_early)] = float("-inf")
            if job.grammar is not None:
                job.grammar.mask(rows[i])
        keep = [i for i, job in enumerate(jobs) if job.want.return_sampling_mask]
        choice = choose(rows, [job.params for job in jobs], [job.randomness.random() for job in jobs], keep)
        values = choice.log_probs.gather(1, torch.tensor(choice.tokens, device=self.device)[:, None])[:, 0].tolist()
        for i, job in enumerate(jobs):
            _keep_others(job.want, choice.log_probs[i], job.output_top, job.output_ids_log_probs)
            if job.want.return_sampling_mask:
                job.kept.append(choice.kept[i])
            self._append(job, choice.tokens[i], values[i])

    def _append(self, job: SequenceState, token: int, log_prob: float) -> None:
        count = len(job.output)
        job.output.append(token)
        job.log_probs.append(log_prob)
        if job.versions and job.versions[-1][0] == self.version:
            job.versions[-1] = (self.version, job.versions[-1][1], count + 1)
        else:
            job.versions.append((self.version, count, count + 1))
        self.generated += 1
        reason = job.stop.check(job.output)
        if math.isnan(log_prob):
            slot = job.slot
            self._finish(job, NOT_A_NUMBER)
            self.cache.scrub(slot)
            self._overwritten(slot, 0)
            self.slots[slot].count = 0
        elif job.kept and len(job.kept[-1][0]) > MASK_LIMIT:
            self._finish(job, TOO_MANY_KEPT)
        elif reason is not None:
            self._finish(job, reason)
        elif job.on_token is not None:
            job.on_token(job)

    def _finish(self, job: SequenceState, reason: dict[str, Any]) -> None:
        if job.slot >= 0:
            if job.want.return_routed_experts and job.filled >= job.length - 1:  # else the slot has rows of others
                job.routed = self.routing.of(job.slot, job.want.routed_experts_start_len, job.length - 1)
            self._release(job)
        job.finish, job.finished = reason, time.monotonic()
        if job.on_finish is not None:
            job.on_finish(job)

    def _release(self, job: SequenceState) -> None:
        slot = self.slots[job.slot]
        slot.job, slot.used = None, next(self._clock)
        self.running.remove(job)


def _rows(work: Sequence[tuple[SequenceState, int]]) -> list[tuple[int, SequenceState, int | None]]:
    """Return (index, job, prompt position to score or None to sample) of packed tokens whose logits are needed."""
    rows, offset = list[tuple[int, SequenceState, int | None]](), 0
    for job, count in work:
        end, first = job.filled + count, job.want.logprob_start_len
        if first >= 0 and not job.output:
            scored = range(max(job.filled, first), min(end, len(job.prompt) - 1))
            rows += [(offset + at - job.filled, job, at + 1) for at in scored]
        if end == job.length:
            rows.append((offset + count - 1, job, None))
        offset += count
    return rows


def _positions(places: Ids, pieces: Sequence[Piece]) -> Ids:
    """Return the tokens' positions [1, T]; [3, 1, T] if a sequence has images."""
    if all(images is None for images, *_ in pieces):
        return places[None]
    whole = np.broadcast_to(places, (3, len(places))).copy()
    for images, start, end, offset in pieces:
        if images is not None:
            whole[:, offset : offset + end - start] = images.rope(start, end)
    return whole[:, None]


def _common(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def _keep_others(want: Wanted, row: Tensor, tops: list[TopEntry], watched: list[TopEntry]) -> None:
    """Append the requested log-probs of other tokens at one position: the top ones, and those of given ids."""
    if want.top_logprobs_num:
        values, ids = row.topk(min(want.top_logprobs_num, row.shape[-1]))
        tops.append([pair for pair in zip(values.tolist(), ids.tolist(), strict=True) if pair[0] > -math.inf])
    if ids_wanted := want.token_ids_logprob:
        watched.append(list(zip(row[ids_wanted].tolist(), ids_wanted, strict=True)))
