"""A probe of a teacher before it is trained toward: reference answers, and its own greedy text, scored as samples are.

The texts go through score_samples, the path of every signal, so that a fault of that path shows in the probe too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from mopd_kernels import topk_logprobs
from numpy.typing import NDArray

from mopd_dataplane.job import sections
from mopd_dataplane.score.engines import LOGPROB_READS
from mopd_dataplane.score.health_checks import Probe
from mopd_dataplane.score.readers import Scorable, TeacherForward
from mopd_dataplane.score.scorer import PromptRenderer, model_input, score_samples
from mopd_dataplane.score.teacher_pool import TeacherPool

OWN_PROMPTS = 4
"""Prompts that a teacher continues: its certainty about its own text needs no more."""
OWN_TOKENS = 16
"""Longest continuation; each of its tokens is one more pass."""


def probe(
    pool: TeacherPool,
    teacher: str,
    references: Sequence[Scorable],
    settings: sections.Score,
    *,
    prompts: Sequence[Scorable] = (),
    render_prompt: PromptRenderer | None = None,
    end: int | None = None,
) -> Probe:
    """Read one domain's reference answers, and continue prompts greedily, with one teacher.

    references: prompts with their answers as trained tokens; those that the teacher cannot read are left out. prompts:
    to continue, of which the first OWN_PROMPTS are; none by a teacher that gives log-probs of text only. end: token
    that ends a continuation. Raises what score_samples raises.
    """
    limit, unknown = pool.context_length(teacher), pool.unknown_tokens(teacher)
    readable = [
        sample
        for sample in references
        if len(model_input(sample, render_prompt).tokens) <= limit and not unknown.keys() & set(sample.tokens.tolist())
    ]
    logprobs, entropies = _read(pool, teacher, readable, settings, render_prompt)
    own = None
    if settings.reads not in LOGPROB_READS and pool.own_tokenizer(teacher) is None:
        chosen = [p for p in prompts if len(model_input(p, render_prompt).tokens) + OWN_TOKENS < limit][:OWN_PROMPTS]
        continued = continue_greedily(pool.teacher(teacher), chosen, render_prompt=render_prompt, end=end)
        own = _mean(_read(pool, teacher, continued, settings, render_prompt)[0])
    return Probe(tokens=len(logprobs), reference=_mean(logprobs), entropy=_mean(entropies), own=own)


def continue_greedily(
    teacher: TeacherForward,
    prompts: Sequence[Scorable],
    *,
    render_prompt: PromptRenderer | None = None,
    end: int | None = None,
    most: int = OWN_TOKENS,
) -> list[Scorable]:
    """Append the teacher's likeliest tokens to prompts, as trained tokens, until `end` and at most `most`."""
    heard = [model_input(sample, render_prompt).tokens for sample in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(most):
        open_rows = [row for row, answer in enumerate(answers) if end is None or answer[-1:] != [end]]
        if not open_rows:
            break
        # A token follows each text, since every reader gives states before a token.
        texts = [np.concatenate([heard[row], np.array([*answers[row], 0], np.int64)]) for row in open_rows]
        states = teacher.states(texts, [np.array([len(text) - 1]) for text in texts])
        first = topk_logprobs(states, teacher.head, 1)[0][:, 0].tolist()
        for row, token in zip(open_rows, first, strict=True):
            answers[row].append(token)
    return [
        replace(
            sample,
            tokens=np.concatenate([sample.tokens[: sample.prompt_len], np.array(answer, np.int32)]),
            loss_mask=np.ones(len(answer), np.uint8),
        )
        for sample, answer in zip(prompts, answers, strict=True)
    ]


def _read(
    pool: TeacherPool,
    teacher: str,
    samples: Sequence[Scorable],
    settings: sections.Score,
    render_prompt: PromptRenderer | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log-probs and entropies of all trained tokens; the latter are empty where the teacher gives log-probs only."""
    logprobs, entropies = [np.empty(0)], [np.empty(0)]
    if samples:
        for signal in score_samples(pool, teacher, ["logprob"], samples, settings, render_prompt=render_prompt):
            assert signal.logprob is not None
            logprobs.append(signal.logprob.astype(np.float64))  # every token of these texts is trained
            if signal.teacher_entropy is not None:
                entropies.append(signal.teacher_entropy.astype(np.float64))
    return np.concatenate(logprobs), np.concatenate(entropies)


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None
