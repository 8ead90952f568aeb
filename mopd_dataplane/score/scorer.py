"""Scores samples with a teacher. One forward pass per batch yields the signals of every requested kind.

signal_kinds.py computes each kind from the teacher's hidden states; the full [tokens, vocabulary] logits are never
materialized.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.job import sections
from mopd_dataplane.records import Signal
from mopd_dataplane.score.engines import LOGPROB_READS
from mopd_dataplane.score.own_tokens import OwnTokenizer, credit
from mopd_dataplane.score.readers import ModelInput, Scorable
from mopd_dataplane.score.sglang_logprobs import ChosenTokens, SglangLogprobs
from mopd_dataplane.score.signal_kinds import (
    Logprob,
    SignalKind,
    StudentTopk,
    TeacherOutput,
    check_finite,
    signal_kind,
    students_topk,
)
from mopd_dataplane.score.teacher_pool import TeacherPool
from mopd_dataplane.score.token_projection import ProjectedTopk
from mopd_dataplane.score.vllm_logprobs import LogprobReader, SequenceLogprobs

PromptRenderer = Callable[[Scorable], Sequence[int]]
"""Returns the token ids of the teacher's prompt, which may contain privileged context. The response tokens are appended
unchanged."""


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
    """Yield one Signal per sample and kind, in an order that needs little padding; `uid` identifies the sample.

    kinds: names of signal kinds: built in (SIGNALS), defined in `settings.signals`, or provided by an entry point; for
    a teacher with its own tokenizer also `alignment`. render_prompt: returns the teacher's prompt; default: the
    student's own. student: the policy whose top-k the teacher scores, for `topk_source = "student"`.
    Raises EngineError naming teacher and sample when the teacher computes NaN or infinity; MismatchError when a sample
    has tokens that the teacher does not know, or exceeds the teacher's context length.
    """
    if (teacher_tokenizer := pool.own_tokenizer(teacher)) is not None:  # None if the teacher reads the student's tokens
        yield from _score_with_own_tokenizer(pool, teacher, teacher_tokenizer, kinds, samples, settings, render_prompt)
        return
    signal_kinds = [signal_kind(kind, settings.signals) for kind in kinds]
    inputs = [model_input(sample, render_prompt) for sample in samples]
    _check_no_unknown_tokens(pool, teacher, inputs)
    yield from _score_inputs(pool, teacher, signal_kinds, inputs, settings, student)


def _score_inputs(
    pool: TeacherPool,
    teacher: str,
    signal_kinds: Sequence[SignalKind],
    inputs: list[ModelInput],
    settings: sections.Score,
    student: StudentTopk | None = None,
) -> Iterator[Signal]:
    """Yield the signals of inputs that are in the teacher's tokens."""
    _check_length(pool, teacher, inputs)
    if settings.reads in LOGPROB_READS:
        reader = pool.logprob_reader(teacher)
        yield from _score_from_prompt_logprobs(reader, teacher, signal_kinds, inputs, settings, student)
        return
    model = pool.teacher(teacher)
    head = model.head
    for temperature, batch in batches(inputs, settings.batch_tokens):
        _check_vocabulary(teacher, batch, len(head.weight))
        states = model.states([item.tokens for item in batch], [item.loss_positions for item in batch])
        check_finite(teacher, batch, states)
        output = TeacherOutput(batch, teacher, states, head, temperature, settings, student)
        for kind in signal_kinds:
            yield from kind.signals(output)


def _score_with_own_tokenizer(
    pool: TeacherPool,
    teacher: str,
    teacher_tokenizer: OwnTokenizer,
    kinds: Sequence[str],
    samples: Sequence[Scorable],
    settings: sections.Score,
    render_prompt: PromptRenderer | None,
) -> Iterator[Signal]:
    """Yield the log-probs of a teacher with another tokenizer, mapped to the student's tokens (own_tokens.py), its
    likeliest tokens of the student (token_projection.py), and how the tokens of the two lie over the text."""
    from_logprobs = [signal_kind(kind, settings.signals) for kind in kinds if kind not in (ALIGNMENT, "topk")]
    is_ranked = "topk" in kinds
    is_other = any(not kind.follows_from_logprobs for kind in from_logprobs)
    if render_prompt is None or is_other or (is_ranked and settings.topk_source == "student"):
        raise MismatchError(
            f"teacher {teacher!r} has its own tokenizer: its only signals are the log-probs of the student's "
            "tokens and the likeliest of them by the teacher itself, and its prompts must be rendered by its own "
            "template"
        )
    retokenized_by_uid = {sample.uid: teacher_tokenizer.retokenize(sample, render_prompt(sample)) for sample in samples}
    if ALIGNMENT in kinds:
        yield from (retokenized.signal() for retokenized in retokenized_by_uid.values())
    computed: list[SignalKind] = [Logprob("logprob")] if from_logprobs else []
    if is_ranked:
        computed.append(ProjectedTopk("topk", retokenized_by_uid, teacher_tokenizer.pieces))
    if not computed:
        return
    inputs = [model_input(retokenized.teacher_sample, None) for retokenized in retokenized_by_uid.values()]
    for signal in _score_inputs(pool, teacher, computed, inputs, settings):
        if signal.kind == "topk":
            yield signal
            continue
        retokenized = retokenized_by_uid[signal.uid]
        assert signal.logprob is not None
        # The teacher's log-probs at the student's tokens.
        values = credit(retokenized.alignment, signal.logprob, retokenized.sample.logprobs)
        empty_topk = np.empty((len(values), 0))
        without_topk = SequenceLogprobs(values, empty_topk.astype(np.int32), empty_topk.astype(np.float32))
        for kind in from_logprobs:
            yield kind.from_logprobs(model_input(retokenized.sample, None), without_topk)


def model_input(sample: Scorable, render_prompt: PromptRenderer | None) -> ModelInput:
    """Return the input of the teacher: its prompt (default: the student's own) and then the sample's response."""
    prompt = sample.tokens[: sample.prompt_len] if render_prompt is None else np.asarray(render_prompt(sample))
    tokens = np.concatenate([prompt, sample.tokens[sample.prompt_len :]]).astype(np.int64)
    return ModelInput(sample, tokens, np.flatnonzero(sample.loss_mask) + len(prompt))


def batches(inputs: list[ModelInput], batch_tokens: int) -> Iterator[tuple[float, list[ModelInput]]]:
    """Yield (temperature, batch), the longest samples of a temperature first.

    A batch has one temperature and at most `batch_tokens` tokens including padding, or a single sample.
    """
    ordered = sorted(inputs, key=lambda item: (item.sample.temperature, -len(item.tokens), item.sample.uid))
    for sampling_temperature, group in groupby(ordered, key=lambda item: item.sample.temperature):
        temperature = sampling_temperature or 1.0  # greedy samples (temperature 0) are scored at temperature 1
        batch: list[ModelInput] = []
        for item in group:
            if batch and (len(batch) + 1) * len(batch[0].tokens) > batch_tokens:
                yield temperature, batch
                batch = []
            batch.append(item)
        yield temperature, batch


def _score_from_prompt_logprobs(
    reader: LogprobReader,
    teacher: str,
    kinds: Sequence[SignalKind],
    inputs: list[ModelInput],
    settings: sections.Score,
    student: StudentTopk | None = None,
) -> Iterator[Signal]:
    """Yield the signals of a teacher that returns log-probs but no hidden states.

    Raises MismatchError for kinds that need more.
    """
    is_ranked = any(kind.ranked for kind in kinds)
    chosen_reader = reader if isinstance(reader, SglangLogprobs) else None
    for kind in kinds:
        needs_chosen = kind.ranked and settings.topk_source == "student"
        if not kind.follows_from_logprobs or (needs_chosen and chosen_reader is None):
            other = ', or "sglang" for teachers behind SGLang servers' if needs_chosen else ""
            raise MismatchError(
                f'score.reads = "{settings.reads}" cannot produce {kind.name} signals'
                f"{' of the student' if needs_chosen else ''}: it returns the log-probs of the text and the teacher's "
                f'own top-k only; set score.reads = "states"{other}'
            )
    for temperature, batch in batches(inputs, settings.batch_tokens):
        if temperature != 1:
            raise MismatchError(
                f"samples of temperature {temperature:g}: {settings.reads} is computed at temperature 1, so the "
                'divergence would not be 0 even between identical models; set score.reads = "states"'
            )
        _check_vocabulary(teacher, batch, reader.vocab_size)
        if is_ranked and settings.topk_source == "student" and chosen_reader is not None:
            results = _read_students_topk(chosen_reader, teacher, batch, settings.topk, student)
        else:
            results = _read_loss_positions(reader, batch, min(settings.topk, reader.vocab_size) if is_ranked else 0)
        for item, result in zip(batch, results, strict=True):
            check_finite(teacher, [item], torch.from_numpy(result.token_logprobs))
            for kind in kinds:
                yield kind.from_logprobs(item, result)


def _read_loss_positions(reader: LogprobReader, batch: list[ModelInput], k: int) -> list[SequenceLogprobs]:
    """Read the log-probs of the trained tokens of a batch, with the teacher's k likeliest."""
    results = []
    for item, result in zip(batch, reader.read([item.tokens for item in batch], k), strict=True):
        rows = item.loss_positions - 1  # row p - 1 has the log-probs of position p
        results.append(SequenceLogprobs(result.token_logprobs[rows], result.ids[rows], result.logprobs[rows]))
    return results


def _read_students_topk(
    reader: SglangLogprobs, teacher: str, batch: list[ModelInput], k: int, student: StudentTopk | None
) -> list[SequenceLogprobs]:
    """Read the log-probs of the trained tokens of a batch, and of the student's k likeliest at their positions."""
    ids = students_topk(student, batch, k).cpu().numpy()
    texts, begin = [], 0
    for item in batch:
        end = begin + len(item.loss_positions)
        texts.append(ChosenTokens(item.tokens, item.loss_positions, ids[begin:end]))
        begin = end
        if (highest := int(texts[-1].ids.max(initial=0))) >= reader.vocab_size:
            raise MismatchError(
                f"sample {item.sample.uid}: token id {highest} is among the student's {k} likeliest, but teacher "
                f"{teacher!r} has only {reader.vocab_size} token ids; lower score.topk, or set score.topk_source = "
                '"teacher"'
            )
    return reader.read_chosen(texts)


def _check_length(pool: TeacherPool, teacher: str, inputs: list[ModelInput]) -> None:
    """Check that every sample fits in the teacher's context. Raises MismatchError."""
    limit = pool.context_length(teacher)
    for item in inputs:
        if len(item.tokens) > limit:
            raise MismatchError(
                f"sample {item.sample.uid} has {len(item.tokens)} tokens for teacher {teacher!r} (with its prompt), "
                f"more than its context length {limit}; lower rollout.max_new_tokens or rollout.max_prompt_tokens, use "
                f"a teacher with a longer context, or set teachers.{teacher}.beyond_context = true to score it anyway"
            )


def _check_no_unknown_tokens(pool: TeacherPool, teacher: str, inputs: list[ModelInput]) -> None:
    """Check that the teacher knows the tokens of every sample. Raises MismatchError."""
    unknown_tokens = pool.unknown_tokens(teacher)  # {id: text}
    if not unknown_tokens:
        return
    for item in inputs:
        if unknown_ids := sorted(unknown_tokens.keys() & set(item.tokens.tolist())):
            raise MismatchError(
                f"sample {item.sample.uid} has token {unknown_tokens[unknown_ids[0]]!r} ({unknown_ids[0]}), which "
                f"teacher {teacher!r} does not know; use a teacher whose tokenizer has it, or leave such samples "
                f'out with teachers.{teacher}.unknown_tokens = "mask"'
            )


def _check_vocabulary(teacher: str, batch: list[ModelInput], vocab_size: int) -> None:
    for item in batch:
        highest = int(item.tokens.max(initial=0))
        if highest >= vocab_size:
            raise MismatchError(
                f"sample {item.sample.uid} has token id {highest}, but teacher {teacher!r} has only {vocab_size} token "
                "ids: the teacher and the student use different tokenizers"
            )
