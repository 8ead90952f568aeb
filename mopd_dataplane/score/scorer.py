"""Samples and a teacher in, signals out: one forward pass per batch gives every requested kind.

signal_kinds.py computes each kind from the teacher's hidden states: no [N, V] logits exist at any time.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.records import Signal
from mopd_dataplane.score.own_tokens import OwnTokenizer, credit
from mopd_dataplane.score.readers import ModelInput, Scorable
from mopd_dataplane.score.signal_kinds import (
    Logprob,
    SignalKind,
    StudentTopk,
    TeacherOutput,
    check_finite,
    signal_kind,
)
from mopd_dataplane.score.teacher_pool import TeacherPool
from mopd_dataplane.score.vllm_logprobs import LogprobReader, SequenceLogprobs

PromptRenderer = Callable[[Scorable], Sequence[int]]
"""Returns the token ids of the prompt that the teacher reads (privileged context); the response follows unchanged."""


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
    """Yield one Signal per sample and kind, in an order that needs little padding; `uid` is the sample's.

    kinds: of SIGNAL_KINDS, or the names of `settings.signals` and entry points. render_prompt: returns the teacher's
    prompt; default the student's own. student: the policy whose top-k the teacher scores, for `topk_source =
    "student"`.
    Raises EngineError naming teacher and sample when the teacher computes NaN or infinity; MismatchError when a sample
    has tokens that the teacher does not know, or is longer than it can read.
    """
    kind_classes = [signal_kind(kind, settings.signals) for kind in kinds]
    if (own := pool.own_tokenizer(teacher)) is not None:
        yield from _scored_in_own_tokens(pool, teacher, own, kind_classes, samples, settings, render_prompt)
        return
    inputs = [model_input(sample, render_prompt) for sample in samples]
    _check_known(pool, teacher, inputs)
    yield from _scored(pool, teacher, kind_classes, inputs, settings, student)


def _scored(
    pool: TeacherPool,
    teacher: str,
    kind_classes: Sequence[SignalKind],
    inputs: list[ModelInput],
    settings: sections.Score,
    student: StudentTopk | None = None,
) -> Iterator[Signal]:
    """Yield the signals of texts in the tokens that the teacher reads."""
    _check_length(pool, teacher, inputs)
    if settings.reads == "prompt_logprobs":
        yield from _said_of_text(pool.logprob_reader(teacher), teacher, kind_classes, inputs, settings)
        return
    forward = pool.teacher(teacher)
    head = forward.head
    for temperature, batch in batches(inputs, settings.batch_tokens):
        _check_vocabulary(teacher, batch, len(head.weight))
        states = forward.states([item.tokens for item in batch], [item.masked for item in batch])
        check_finite(teacher, batch, states)
        output = TeacherOutput(batch, teacher, states, head, temperature, settings, student)
        for kind in kind_classes:
            yield from kind.signals(output)


def _scored_in_own_tokens(
    pool: TeacherPool,
    teacher: str,
    own: OwnTokenizer,
    kinds: Sequence[SignalKind],
    samples: Sequence[Scorable],
    settings: sections.Score,
    render_prompt: PromptRenderer | None,
) -> Iterator[Signal]:
    """Yield the log-probs of a teacher of another tokenizer, at the student's tokens (own_tokens.py)."""
    if render_prompt is None or any(not kind.follows_from_logprobs or kind.ranked for kind in kinds):
        raise MismatchError(
            f"teacher {teacher!r} reads its own tokens, so it has log-probs of the text alone, and a prompt of its own"
        )
    texts = {sample.uid: own.read(sample, render_prompt(sample)) for sample in samples}
    inputs = [model_input(text.read, None) for text in texts.values()]
    for signal in _scored(pool, teacher, [Logprob("logprob")], inputs, settings):
        text = texts[signal.uid]
        assert signal.logprob is not None
        values = credit(text.alignment, signal.logprob, text.sample.logprobs)
        none = np.empty((len(values), 0))
        unranked = SequenceLogprobs(values, none.astype(np.int32), none.astype(np.float32))
        for kind in kinds:
            yield kind.from_logprobs(model_input(text.sample, None), unranked)


def model_input(sample: Scorable, render_prompt: PromptRenderer | None) -> ModelInput:
    """Return a sample's response after the prompt for the teacher; default the student's own."""
    prompt = sample.tokens[: sample.prompt_len] if render_prompt is None else np.asarray(render_prompt(sample))
    tokens = np.concatenate([prompt, sample.tokens[sample.prompt_len :]]).astype(np.int64)
    return ModelInput(sample, tokens, np.flatnonzero(sample.loss_mask) + len(prompt))


def batches(inputs: list[ModelInput], batch_tokens: int) -> Iterator[tuple[float, list[ModelInput]]]:
    """Yield rectangles of at most `batch_tokens` tokens (with padding; at least one sample), longest first."""
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
    reader: LogprobReader, teacher: str, kinds: Sequence[SignalKind], inputs: list[ModelInput], settings: sections.Score
) -> Iterator[Signal]:
    """Yield the signals of a teacher that gives log-probs only. Raises MismatchError for kinds that need more."""
    for kind in kinds:
        if not kind.follows_from_logprobs or (kind.ranked and settings.topk_source == "student"):
            raise MismatchError(
                f'score.reads = "prompt_logprobs" gives no {kind.name} signals: it has log-probs of the text and the '
                'teacher\'s own top-k only; set score.reads = "states"'
            )
    k = min(settings.topk, reader.vocab_size) if any(kind.ranked for kind in kinds) else 0
    for temperature, batch in batches(inputs, settings.batch_tokens):
        if temperature != 1:
            raise MismatchError(
                f"samples of temperature {temperature:g}: vLLM's prompt_logprobs are those of temperature 1, so equal "
                'models would not agree; set score.reads = "states"'
            )
        _check_vocabulary(teacher, batch, reader.vocab_size)
        for item, said in zip(batch, reader.read([item.tokens for item in batch], k), strict=True):
            rows = item.masked - 1
            trained = SequenceLogprobs(said.own[rows], said.ids[rows], said.logprobs[rows])
            check_finite(teacher, [item], torch.from_numpy(trained.own))
            for kind in kinds:
                yield kind.from_logprobs(item, trained)


def _check_length(pool: TeacherPool, teacher: str, inputs: list[ModelInput]) -> None:
    """Check that the teacher can read the length of every sample. Raises MismatchError."""
    limit = pool.context_length(teacher)
    for item in inputs:
        if len(item.tokens) > limit:
            raise MismatchError(
                f"sample {item.sample.uid} has {len(item.tokens)} tokens as teacher {teacher!r} reads it, whose "
                f"context is {limit}; lower rollout.max_new_tokens or rollout.max_prompt_tokens, use a teacher with a "
                f"longer context, or set teachers.{teacher}.beyond_context = true"
            )


def _check_known(pool: TeacherPool, teacher: str, inputs: list[ModelInput]) -> None:
    """Check that the teacher knows the tokens of every sample. Raises MismatchError."""
    unknown = pool.unknown_tokens(teacher)
    for item in inputs if unknown else []:
        if strange := sorted(unknown.keys() & set(item.tokens.tolist())):
            raise MismatchError(
                f"sample {item.sample.uid} has token {unknown[strange[0]]!r} ({strange[0]}), which teacher {teacher!r} "
                "does not know; use a teacher whose tokenizer has it, or leave such samples out with "
                f'teachers.{teacher}.unknown_tokens = "mask"'
            )


def _check_vocabulary(teacher: str, batch: list[ModelInput], rows: int) -> None:
    for item in batch:
        highest = int(item.tokens.max(initial=0))
        if highest >= rows:
            raise MismatchError(
                f"sample {item.sample.uid} has token {highest}, teacher {teacher!r} knows {rows} tokens; "
                "its tokenizer is not the student's"
            )
