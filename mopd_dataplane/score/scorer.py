"""Samples and a teacher in, signals out: one forward pass a batch serves every kind asked for.

Axes: P teacher-prompt tokens, R response tokens, M loss-masked response tokens, D hidden width, V vocabulary, K top-k.
No [N, V] logits exist at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from mopd_kernels import Head, chosen_logprobs, encode, token_logprob, topk_logprobs
from numpy.typing import NDArray
from torch import Tensor

from mopd_dataplane.base.stats_choice import keeps_stats
from mopd_dataplane.errors import EngineError, MismatchError, nearest
from mopd_dataplane.job import sections
from mopd_dataplane.records import SIGNAL_KINDS, Signal
from mopd_dataplane.score.teacher_pool import TeacherPool
from mopd_dataplane.score.topk_source import StudentTopk
from mopd_dataplane.score.vllm_logprobs import LogprobReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorable:
    """What a teacher needs to know of a sample."""

    uid: str
    sample_row: int
    prompt_id: str
    prompt_len: int
    tokens: NDArray[np.int32]
    """[P + R] the student's prompt, then the response."""
    loss_mask: NDArray[np.uint8]
    """[R]"""
    logprobs: NDArray[np.float32] | None = None
    """[R] as sampled; None when the text was not sampled."""
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R] policy version of each response token; read for the student's top-k only."""
    temperature: float = 1.0
    """Temperature of the sampler. Teacher log-probs are taken at it too, so that equal models agree; 0 (greedy) counts
    as 1."""


PromptRenderer = Callable[[Scorable], Sequence[int]]
"""Token ids of the prompt as the teacher reads it (privileged context); the response tokens follow unchanged."""


def score_samples(
    pool: TeacherPool,
    teacher: str,
    kinds: Sequence[str],
    samples: Sequence[Scorable],
    settings: sections.Score,
    *,
    render_prompt: PromptRenderer | None = None,
    student: StudentTopk | None = None,
) -> Iterator[Signal]:
    """One Signal per sample and kind, in an order chosen for little padding; `uid` says which sample it speaks of.

    kinds: of SIGNAL_KINDS. render_prompt: the teacher's prompt; default the student's own. student: whose top-k the
    teacher is asked about, for `topk_source = "student"`.
    Raises EngineError naming teacher and sample when the teacher answers with NaN or infinity; MismatchError when a
    sample has tokens the teacher does not know.
    """
    for kind in kinds:
        if kind not in SIGNAL_KINDS:
            raise MismatchError(f"unknown signal kind {kind!r}: {nearest(kind, SIGNAL_KINDS)}")
    inputs = [model_input(sample, render_prompt) for sample in samples]
    if settings.engine == "vllm" and settings.reads == "prompt_logprobs":
        yield from _said_of_text(pool.logprob_reader(teacher), teacher, kinds, inputs, settings)
        return
    judge = pool.judge(teacher)
    head = judge.head
    for temperature, batch in batches(inputs, settings.batch_tokens):
        _check_vocabulary(teacher, batch, len(head.weight))
        states = judge.states([item.tokens for item in batch], [item.masked for item in batch])
        _check_finite(teacher, batch, states)
        for kind in kinds:
            yield from _signals(kind, teacher, batch, states, head, temperature, settings, student)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A sample behind the prompt as a model reads it."""

    sample: Scorable
    tokens: NDArray[np.int64]
    """[P + R]"""
    masked: NDArray[np.int64]
    """[M] positions of loss-masked tokens in `tokens`."""


def model_input(sample: Scorable, render_prompt: PromptRenderer | None) -> ModelInput:
    """A sample behind the prompt as the teacher reads it; default the student's own."""
    prompt = sample.tokens[: sample.prompt_len] if render_prompt is None else np.asarray(render_prompt(sample))
    tokens = np.concatenate([prompt, sample.tokens[sample.prompt_len :]]).astype(np.int64)
    return ModelInput(sample, tokens, np.flatnonzero(sample.loss_mask) + len(prompt))


def batches(inputs: list[ModelInput], batch_tokens: int) -> Iterator[tuple[float, list[ModelInput]]]:
    """Rectangles of at most `batch_tokens` tokens (padding counted; at least one sample), longest first."""
    ordered = sorted(inputs, key=lambda item: (item.sample.temperature, -len(item.tokens), item.sample.uid))
    for temperature, group in groupby(ordered, key=lambda item: item.sample.temperature):
        batch: list[ModelInput] = []
        for item in group:
            if batch and (len(batch) + 1) * len(batch[0].tokens) > batch_tokens:
                yield temperature or 1.0, batch
                batch = []
            batch.append(item)
        yield temperature or 1.0, batch


def _said_of_text(
    reader: LogprobReader, teacher: str, kinds: Sequence[str], inputs: list[ModelInput], settings: sections.Score
) -> Iterator[Signal]:
    """Signals of a teacher that only says log-probs. Raises MismatchError for what does not follow from those."""
    if "hidden" in kinds or ("topk" in kinds and settings.topk_source == "student"):
        raise MismatchError(
            'score.reads = "prompt_logprobs" has no hidden states and only the teacher\'s own top-k; '
            'set score.reads = "states"'
        )
    k = min(settings.topk, reader.vocab_size) if "topk" in kinds else 0
    for temperature, batch in batches(inputs, settings.batch_tokens):
        if temperature != 1:
            raise MismatchError(
                f"samples of temperature {temperature:g}: vLLM's prompt_logprobs are those of temperature 1, so equal "
                'models would not agree; set score.reads = "states"'
            )
        _check_vocabulary(teacher, batch, reader.vocab_size)
        for item, said in zip(batch, reader.read([item.tokens for item in batch], k), strict=True):
            rows = item.masked - 1
            _check_finite(teacher, [item], torch.from_numpy(said.own[rows]))
            if "logprob" in kinds:
                yield _logprob_signal(item, said.own[rows])
            if "topk" in kinds:
                ids, logprobs = said.ids[rows], said.logprobs[rows]
                yield _signal(item, "topk", topk_ids=ids, topk_logprobs=logprobs, topk_source="teacher")


def _signals(
    kind: str,
    teacher: str,
    batch: list[ModelInput],
    states: Tensor,
    head: Head,
    temperature: float,
    settings: sections.Score,
    student: StudentTopk | None,
) -> Iterator[Signal]:
    counts = [len(item.masked) for item in batch]
    if kind == "hidden":
        encoded = torch.split(encode(states, settings.hidden_codec).cpu(), counts)
        for item, rows in zip(batch, encoded, strict=True):
            yield _signal(item, kind, codec=settings.hidden_codec, hidden=rows.numpy().copy())
    elif kind == "topk":
        ids, logprobs = _topk(batch, states, head, settings, student)
        parts = zip(batch, torch.split(ids.cpu(), counts), torch.split(logprobs.cpu(), counts), strict=True)
        for item, item_ids, item_logprobs in parts:
            yield _signal(
                item,
                kind,
                topk_ids=item_ids.to(torch.int32).numpy().copy(),
                topk_logprobs=item_logprobs.numpy().copy(),
                topk_source=settings.topk_source,
            )
    else:
        targets = torch.from_numpy(np.concatenate([item.tokens[item.masked] for item in batch])).to(states.device)
        with torch.no_grad():
            found, entropy = token_logprob(states, head, targets, temperature=temperature, return_entropy=True)
        _check_finite(teacher, batch, found)
        kept = keeps_stats(settings.stats, [item.sample.sample_row for item in batch])
        each = zip(batch, kept, torch.split(found.cpu(), counts), torch.split(entropy.cpu(), counts), strict=True)
        for item, keep, values, entropies in each:
            yield _logprob_signal(item, values.numpy(), teacher_entropy=entropies.numpy() if keep else None)


def _topk(
    batch: list[ModelInput], states: Tensor, head: Head, settings: sections.Score, student: StudentTopk | None
) -> tuple[Tensor, Tensor]:
    """Ids and teacher log-probs [sum of M, K] of the teacher's or the student's likeliest tokens."""
    if settings.topk_source == "teacher":
        return topk_logprobs(states, head, min(settings.topk, len(head.weight)))
    if student is None:
        raise MismatchError('topk_source = "student" needs the policy that wrote the samples; pass `student`')
    ids = student.ids([item.sample for item in batch], settings.topk).to(states.device)
    return ids, chosen_logprobs(states, head, ids)[0]


def _logprob_signal(
    item: ModelInput, values: NDArray[np.float32], teacher_entropy: NDArray[np.float32] | None = None
) -> Signal:
    sample = item.sample
    mask = sample.loss_mask.astype(bool)
    logprob = np.zeros(len(mask), dtype=np.float32)
    logprob[mask] = values
    reverse_kl = None
    if sample.logprobs is not None and mask.any():
        reverse_kl = float(np.mean(sample.logprobs[mask].astype(np.float64) - values))
    return _signal(
        item, "logprob", logprob=logprob, mean_reverse_kl=reverse_kl, teacher_entropy=teacher_entropy,
        logprob_std=float(np.std(values, dtype=np.float64)) if len(values) else None,
    )  # fmt: skip


def _signal(item: ModelInput, kind: str, **payload: object) -> Signal:
    return Signal(uid=item.sample.uid, sample_row=item.sample.sample_row, kind=kind, **payload)  # type: ignore[arg-type]


def _check_finite(teacher: str, batch: list[ModelInput], values: Tensor) -> None:
    """values: [sum of M] or [sum of M, D]."""
    finite = torch.isfinite(values).reshape(len(values), -1).all(1).cpu()
    for item, good in zip(batch, torch.split(finite, [len(item.masked) for item in batch]), strict=True):
        if not bool(good.all()):
            position = int((~good).nonzero()[0])
            raise EngineError(
                f"teacher {teacher!r} answered with NaN or infinity for sample {item.sample.uid} "
                f"(trained token {position} of {len(good)}); nothing of this batch was written: "
                "check the teacher's weights and dtype"
            )


def _check_vocabulary(teacher: str, batch: list[ModelInput], rows: int) -> None:
    for item in batch:
        highest = int(item.tokens.max(initial=0))
        if highest >= rows:
            raise MismatchError(
                f"sample {item.sample.uid} has token {highest}, teacher {teacher!r} knows {rows} tokens; "
                "its tokenizer is not the student's"
            )
