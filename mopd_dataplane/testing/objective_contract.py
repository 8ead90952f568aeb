"""Contract of an objective (job/objectives.py) with the trainer, checked on random packs."""

import numpy as np
import torch
from mopd_kernels.heads import Head
from torch import Tensor

from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.fields import PACK_KINDS, RECORDS, plugin_field
from mopd_dataplane.job.objectives import Objective, Term
from mopd_dataplane.records import Pack
from mopd_dataplane.train.microbatch import MicroBatch, build
from mopd_dataplane.train.objective import ObjectiveLoss, TermSums, Totals

VOCABULARY, WIDTH, K = 31, 8, 4
TOLERANCE = 1e-5
"""Largest difference between one micro-batch and two: sums over a vocabulary of 31 in float32."""


def check_objective(objective: Objective) -> None:
    """Compute an objective on random packs, and raise AssertionError for what the trainer could not use.

    Example: check_objective(Objective(terms={"my_package.losses:EntropyBonus": {"weight": 0.1}})).
    """
    strange = set(objective.recorded) - set(RECORDS)
    assert not strange, f"recorded {sorted(strange)}; known: {', '.join(RECORDS)}"
    plugin_kinds = [kind for kind in objective.signals if kind not in PACK_KINDS]
    for kind in plugin_kinds:
        try:
            plugin_field(kind)
        except UnknownNameError as error:
            raise AssertionError(str(error)) from None
    packs = [_pack(seed, plugin_kinds) for seed in (1, 2)]
    head = Head(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(3)))
    whole = build(packs)
    hidden = torch.randn(len(whole.targets), WIDTH, generator=torch.Generator().manual_seed(4), requires_grad=True)
    loss = ObjectiveLoss(objective)
    totals = Totals(len(whole.targets), len(whole.sequence_lengths))
    for term in objective.plugins:
        _check_rows(term, hidden, head, whole)
    value, sums = _computed(loss, hidden, head, whole, totals)
    assert value.shape == (), f"the loss has shape {list(value.shape)}, expected one number"
    assert torch.isfinite(value), f"the loss is {float(value)}"
    assert set(sums.values) == set(loss.metric_names), f"metrics {sorted(sums.values)}, announced {loss.metric_names}"
    [gradient] = torch.autograd.grad(value, [hidden], allow_unused=True)
    assert gradient is not None, "the loss does not depend on the student's hidden states"
    assert torch.isfinite(gradient).all(), "the gradient is not finite"
    assert gradient.abs().sum() > 0, "the gradient is zero everywhere"
    cut = len(build(packs[:1]).targets)
    parts = zip(packs, (slice(None, cut), slice(cut, None)), strict=True)
    with torch.no_grad():
        apart = sum(float(_computed(loss, hidden[part], head, build([pack]), totals)[0]) for pack, part in parts)
    together = float(value.detach())
    gap = abs(apart - together)
    assert gap <= TOLERANCE, f"two micro-batches lose {apart:g}, one with both of them {together:g}"


def _check_rows(term: Term, hidden: Tensor, head: Head, batch: MicroBatch) -> None:
    """Another package's term says a loss and its metrics for every trained token."""
    rows, metrics = term.token_loss(
        hidden, head, batch, temperature=1.0, teacher_head=_teacher_head() if term.needs_head else None
    )
    assert rows.shape == (len(batch.targets),), f"token_loss has shape {list(rows.shape)}, expected one value a token"
    missing = set(term.metrics) - set(metrics)
    assert not missing, f"metrics {sorted(missing)} are announced and not returned"
    for name in term.metrics:
        assert metrics[name].shape == rows.shape, f"metric {name!r} has shape {list(metrics[name].shape)}"


def _computed(
    loss: ObjectiveLoss, hidden: Tensor, head: Head, batch: MicroBatch, totals: Totals
) -> tuple[Tensor, TermSums]:
    proximal = batch.sampler_logprobs if loss.needs_proximal else None
    teacher = _teacher_head() if loss.needs_head else None
    return loss(hidden, head, batch, totals, teacher_head=teacher, proximal_logprobs=proximal)


def _teacher_head() -> Head:
    return Head(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(5)))


def _pack(seed: int, plugin_kinds: list[str]) -> Pack:
    """Two sequences with a hole in each loss mask, and every signal; plugin_kinds: other packages' kinds."""
    draw = np.random.default_rng(seed)
    lengths = [9, 6]
    total = sum(lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    mask = ((positions >= 2) & (positions != 4)).astype(np.uint8)
    trained = int(mask.sum())
    ids = np.stack([draw.permutation(VOCABULARY)[:K] for _ in range(trained)]).astype(np.int32)
    likelier = np.sort(-draw.gamma(2.0, 1.0, (trained, K)) - np.log(K))[:, ::-1]
    return Pack(
        index=0, teacher="teacher", tokens=draw.integers(0, VOCABULARY, total).astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32), loss_mask=mask,
        sampler_logprobs=np.where(mask, -draw.gamma(2.0, 0.5, total), 0).astype(np.float32),
        sample_rows=np.arange(2, dtype=np.int64), version_starts=np.array([0, lengths[0]], np.int32),
        versions=np.zeros(2, np.int32), rewards=draw.random(2).astype(np.float32),
        advantages=draw.normal(size=2).astype(np.float32),
        teacher_logprobs=np.where(mask, -draw.gamma(2.0, 0.5, total), 0).astype(np.float32),
        reference_logprobs=np.where(mask, -draw.gamma(2.0, 0.5, total), 0).astype(np.float32),
        helped_logprobs=np.where(mask, -draw.gamma(2.0, 0.5, total), 0).astype(np.float32),
        misled_logprobs=np.where(mask, -draw.gamma(2.0, 0.5, total), 0).astype(np.float32),
        topk_ids=ids, topk_logprobs=np.ascontiguousarray(likelier, np.float32),
        hidden=draw.normal(size=(trained, WIDTH)).astype(np.float32).view(np.uint8), hidden_codec="fp32",
        extra={kind: np.where(mask, draw.normal(size=total), 0).astype(np.float32) for kind in plugin_kinds},
    )  # fmt: skip
