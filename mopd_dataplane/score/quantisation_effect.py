"""The effect of quantising a teacher's weights: both versions read the same answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mopd_kernels import divergence, token_logprob
from torch import Tensor

from mopd_dataplane.job import sections
from mopd_dataplane.score.model_input import ModelInput, Scorable
from mopd_dataplane.score.readers import Reader
from mopd_dataplane.score.scorer import PromptRenderer, batches, model_input
from mopd_dataplane.score.teacher_pool import TeacherPool


@dataclass(frozen=True, kw_only=True)
class QuantisationEffect:
    """A teacher with quantised weights against the same one as stored. Means are over trained tokens; natural logs."""

    tokens: int
    kl: float
    """KL(as stored | quantised), over the whole vocabulary, in nat per token."""
    logprob_gap: float
    """Mean |log-prob as stored - log-prob quantised| of the sampled tokens."""
    top1_agreement: float
    """How often both have the same likeliest token."""


def quantisation_effect(
    pool: TeacherPool,
    teacher: str,
    samples: Sequence[Scorable],
    settings: sections.Score,
    *,
    render_prompt: PromptRenderer | None = None,
) -> QuantisationEffect:
    """Let a teacher of the pool read samples with its stored weights, then with its quantised ones; never both in
    memory.

    samples: at least one with a trained token. Log-probs at temperature 1. Raises what TeacherPool.reader raises.
    """
    inputs = [model_input(sample, render_prompt) for sample in samples]
    parts = [batch for _, batch in batches(inputs, settings.batch_tokens)]
    exact = list(_states(pool.as_stored(teacher), parts))
    rounded = pool.reader(teacher)
    head = rounded.head
    kl, gap, agreed = 0.0, 0.0, 0.0
    with torch.no_grad():
        for batch, stored, states in zip(parts, exact, _states(rounded, parts), strict=True):
            targets = torch.from_numpy(np.concatenate([item.tokens[item.masked] for item in batch])).to(states.device)
            stats = divergence(stored, head, states, head, return_stats=True)[1]
            kl += float(stats.reverse_kl.double().sum())  # of the first argument to the second
            agreed += float(stats.top1_agreement.double().sum())
            said = [token_logprob(each, head, targets) for each in (stored, states)]
            gap += float((said[0] - said[1]).double().abs().sum())  # type: ignore[operator]
    tokens = sum(len(item.masked) for item in inputs)
    return QuantisationEffect(tokens=tokens, kl=kl / tokens, logprob_gap=gap / tokens, top1_agreement=agreed / tokens)


def _states(reader: Reader, parts: Sequence[Sequence[ModelInput]]) -> Iterator[Tensor]:
    """[sum of M, D] states of each part."""
    for batch in parts:
        yield reader.predicting_states([item.tokens for item in batch], [item.masked for item in batch])
