"""Which weights sampled the trained tokens, by the samples that a run's ledger keeps (`--ledger-retention always`)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.buffer.codec import decode_group
from agentrl.config import RunSettings
from agentrl.groups import Group
from agentrl.run.training import RankInfo, free_port, start_backend
from agentrl.sample import Origin, Sample
from tests.support.ledgers import reading

if TYPE_CHECKING:
    from agentrl.numerics.vision import Vision


def trained_groups(path: str | Path) -> Iterator[tuple[int, Group]]:
    """Yield the step and the samples of each trained group. A group without stored samples is an error."""
    with reading(path) as db:
        rows = db.execute(
            "SELECT train_step, group_id, data FROM groups LEFT JOIN payloads USING (group_id) "
            "WHERE state='trained' ORDER BY train_step, group_id"
        ).fetchall()
    for step, group_id, data in rows:
        assert data is not None, f"group {group_id} has no samples: run with --ledger-retention always"
        yield step, decode_group(data)


def staleness(path: str | Path) -> Counter[int]:
    """Count the tokens with mask 1 by their staleness in training.

    Staleness is the number of rollouts trained before the token, minus the version of the weights that sampled it.
    """
    counts: Counter[int] = Counter()
    for step, samples in trained_groups(path):
        for sample in samples:
            mask = sample.loss_mask or ()
            for segment in sample.segments:
                if segment.origin is Origin.MODEL and (tokens := sum(mask[segment.start : segment.end])):
                    assert segment.version is not None, f"group {sample.group_index} has tokens of no version"
                    counts[step - int(segment.version)] += tokens
    return counts


@dataclass(frozen=True, slots=True)
class Errors:
    """The differences between log-probs that engines reported and those of the weights that they named.

    Attributes:
        tokens: tokens with mask 1 that were compared.
        versions: number of weight versions of these tokens.
        wrong: tokens that differ by more than `TOLERANCE`.
        worst: the largest difference.
    """

    tokens: int
    versions: int
    wrong: int
    worst: float


TOLERANCE = 1e-3
"""The same weights in float32 differ by rounding, at most 1e-5; a tiny model's next version by far more."""


def log_prob_errors(run: Path, start: Path) -> Errors:
    """Compare the trained tokens of a finished run with the weights of their versions, which its checkpoints hold.

    The run needs `--save-interval 1` and `--ledger-retention always`, float32, temperature 1 and no `in_place` updates.

    Args:
        run: its folder; the weights are written there, as Hugging Face folders.
        start: the model that it began with.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    from agentrl.numerics.vision import Vision

    logging.disable_progress_bar()
    by_version: dict[int, list[Sample]] = {}
    for _, group in trained_groups(run / "ledger.sqlite"):
        for sample in group:
            for version in {int(s.version or 0) for s in sample.segments if s.origin is Origin.MODEL}:
                by_version.setdefault(version, []).append(sample)
    compared, wrong, worst, vision = 0, 0, 0.0, Vision.load(start)
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    for version, folder in export_versions(run, start, by_version).items():
        model = kind.from_pretrained(folder, dtype=torch.float32)
        for sample in by_version.get(version, ()):
            with torch.no_grad():
                logits = _logits(model, sample, vision)[sample.prompt_length - 1 : -1].double()
            said = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
            chosen = torch.tensor(sample.tokens[sample.prompt_length :])[:, None]
            errors = (logits.log_softmax(-1).gather(1, chosen)[:, 0] - said).abs()
            for segment in sample.segments:
                if segment.origin is Origin.MODEL and segment.version == str(version):
                    mask = torch.tensor((sample.loss_mask or [])[segment.start : segment.end]) == 1
                    part = errors[segment.start : segment.end][mask]
                    compared += len(part)
                    wrong += int((part > TOLERANCE).sum())
                    worst = max([worst, *part.tolist()])
    return Errors(compared, len(by_version), wrong, worst)


def _logits(model: Any, sample: Sample, vision: Vision | None) -> Any:
    """Return transformers' logits at each token. With images, input and output embeddings must not be tied: a sampled
    placeholder is replaced by another id, which has the placeholder's embedding during the call."""
    import torch

    ids = torch.tensor([sample.tokens])
    if vision is None:
        return model(ids).logits[0]
    kinds, embedding = torch.zeros_like(ids), model.get_input_embeddings().weight
    for span in sample.image_spans:
        kinds[0, span.start : span.end] = 1
    free = max(set(range(len(embedding))) - set(sample.tokens))
    ids[(ids == vision.tokens.id) & (kinds == 0)] = free
    own = embedding[free].clone()
    embedding[free] = embedding[vision.tokens.id]
    pixels = vision.pixels([sample.images[span.hash] for span in sample.image_spans])
    found = model(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0]
    embedding[free] = own
    return found


def export_versions(run: Path, start: Path, versions: Iterable[int]) -> dict[int, Path]:
    """Write the weights of each version as a Hugging Face folder, by the trainer that saved them."""
    settings = RunSettings.model_validate_json((run / "settings.json").read_text())
    settings = settings.replace(hf_checkpoint=str(start))
    found = {0: start}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Megatron and torch about each other
        backend = start_backend(settings, RankInfo(master_port=free_port()))
        try:
            for version in sorted(set(versions) - {0}):
                backend.load(run / "checkpoints" / f"rollout_{version - 1:06d}")
                backend.save_hf(found.setdefault(version, run / "versions" / str(version)))
        finally:
            backend.close()
    return found
