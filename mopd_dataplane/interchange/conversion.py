"""Rows of any format -> samples of a store, with their prompts."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.errors import EngineError, InputError, MismatchError, MopdError
from mopd_dataplane.fields import IDS, INT32, RECORDED, Field, arguments
from mopd_dataplane.interchange.formats import FORMATS, STATED
from mopd_dataplane.interchange.row_files import Fields
from mopd_dataplane.interchange.rows import Row, conversation_text
from mopd_dataplane.interchange.signal_entries import TeacherSignal
from mopd_dataplane.interchange.vocabulary import Vocabulary
from mopd_dataplane.job.values import NAME
from mopd_dataplane.models.chat_template import THOUGHT_FIELDS, Messages, RewrittenTurnError
from mopd_dataplane.records import Prompt, Sample, Signal, Teacher
from mopd_dataplane.store.format.arrow_rows import check_sample
from mopd_dataplane.store.format.sample_values import log_probs, whole_numbers

IMPORTED = "imported"
"""Weights digest of a teacher that is known only by its log-probs."""
CHECKED = ("uid", "prompt_id", "group_id", "stage", "tokenizer")
"""Fields that a row may state, and that are otherwise derived; stated values are compared."""
SPLIT = "import"
"""Split of imported prompts: neither rollouts nor evaluations use it."""
Converted = tuple[Row, Prompt, Sample]
"""A row with its prompt and its sample."""


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Values for fields that the rows do not have; a value in a plain row takes precedence.

    Example: ImportSettings(format="verl", stage="student", domain="math").
    """

    format: str
    stage: str = ""
    """Stage that will own the samples."""
    domain: str = ""
    policy: str = "imported"
    """Name of the policy that sampled them."""
    temperature: float = 1.0
    teacher: str = "imported"
    """Name of the teacher that gave the rows' log-probs."""
    rewritten: Literal["refuse", "split"] = "refuse"
    """What to do with a conversation whose earlier answers the chat template writes differently once more messages
    follow, for example without their thoughts. `split` makes each answer a sample of its own, with the messages before
    it as the template writes them at that point."""


class RowConversion:
    """Makes samples of rows. Equal rows become samples of their own, by how many came before."""

    def __init__(self, settings: ImportSettings, vocabulary: Vocabulary) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._seen: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._ordinal = 0

    def samples_of(self, row: Row) -> Iterator[Converted]:
        """Yield the samples of a row. Raises InputError naming it."""
        for part in _divided(row, self._settings, self._vocabulary):
            try:
                yield _converted(part, self._settings, self._vocabulary, self._seen, self._groups, self._ordinal)
            except (MismatchError, EngineError) as error:
                raise InputError(f"{row.location}: {error}") from None
            self._ordinal += 1


class Conversion(RowConversion):
    """Makes samples of the rows of one import, which are in the format that the settings name."""

    def __init__(self, settings: ImportSettings, vocabulary: Vocabulary) -> None:
        """Raises UnknownNameError for an unknown format."""
        super().__init__(settings, vocabulary)
        self._reader = find_plugin("mopd.importers", settings.format, FORMATS)

    def samples(self, location: str, fields: Fields) -> Iterator[Converted]:
        """Yield the samples of one row of a file. Raises InputError naming the row."""
        for row in _rows_of(self._reader, self._settings.format, fields, location):
            yield from self.samples_of(row)


def _rows_of(reader: Callable[..., Any], name: str, fields: dict[str, Any], location: str) -> list[Row]:
    """Return the rows that an importer makes of one row of a file. Raises InputError for an invalid row of a
    plug-in."""
    if name in FORMATS:
        return list(reader(fields, location))
    try:
        rows = list(reader(fields, location))
    except MopdError:
        raise
    except Exception as error:
        raise InputError(
            f"{location}: importer {name!r:.80} ended with {type(error).__name__}: {error!s:.200}; it takes a row's "
            "fields and its place, and yields interchange rows: mopd_dataplane.testing.check_importer tries one"
        ) from error
    if strange := next((row for row in rows if not isinstance(row, Row)), None):
        raise InputError(f"{location}: importer {name!r:.80} gave {strange!r:.80}; it must yield interchange rows")
    return rows


def _converted(
    row: Row,
    settings: ImportSettings,
    vocabulary: Vocabulary,
    seen: dict[str, int],
    groups: dict[str, int],
    ordinal: int,
) -> tuple[Row, Prompt, Sample]:
    fields = row.sample
    domain = row.domain or settings.domain
    stage = settings.stage or fields.get("stage", "")
    for name, value in (("domain", domain), ("stage", stage)):
        if not value:
            raise InputError(f"{row.location}: the row names no {name}; give --{name} NAME")
    if not re.fullmatch(NAME, stage):
        raise InputError(f"{row.location}: stage {stage!r:.80}: allowed are up to 64 of a-z, 0-9, '_', '.', '-'")
    if row.iteration < 0:
        raise InputError(f"{row.location}: iteration is {row.iteration}; allowed: 0 and above")
    prompt_ids, response_ids = _checked_ids(row, vocabulary)
    if row.teacher_logprobs is not None:
        if len(row.teacher_logprobs) != len(response_ids):
            raise InputError(
                f"{row.location}: {len(row.teacher_logprobs)} log-probs of a teacher for {len(response_ids)} tokens; "
                "expected one each"
            )
        log_probs(np.array(row.teacher_logprobs, np.float64), "teacher_logprobs")
    if fields.get("tokenizer", vocabulary.digest) != vocabulary.digest:
        raise InputError(
            f"{row.location}: the token ids come from the tokenizer with digest {fields['tokenizer']!r:.40}, and "
            f"--tokenizer names one with digest {vocabulary.digest}; give the tokenizer that made them"
        )
    prompt = _question(row, domain, settings)
    trained = [1] * len(response_ids) if row.loss_mask is None else row.loss_mask
    mask = whole_numbers(trained, 0, 1, "loss_mask").astype(np.uint8)
    logprobs = None
    if row.logprobs is not None:
        given_logprobs = np.array(row.logprobs, np.float64)
        if len(given_logprobs) == len(mask):
            given_logprobs[(mask == 0) & (given_logprobs != 0)] = 0
        logprobs = log_probs(given_logprobs, "logprobs").astype(np.float32)
    tokens = np.array(prompt_ids + response_ids, np.int32)
    group = fields.get("group_id", f"{prompt.prompt_id}#{row.iteration}")
    index = groups[group] = groups.get(group, -1) + 1
    stated: dict[str, Any] = {
        "group_index": index, "writer": f"import-{settings.format}" + ("-text" if row.from_text else ""),
        "writer_seq": ordinal, "policy": settings.policy, "temperature": settings.temperature, "top_p": 1.0, "top_k": 0,
        "finish_reason": "unknown",
    } | {name: fields[name] for name in STATED if name in fields and name not in CHECKED}  # fmt: skip
    sample = Sample(
        uid=fields.get("uid") or _uid(stage, row, tokens, logprobs, mask, seen), prompt_id=prompt.prompt_id,
        group_id=group, iteration=row.iteration, domain=domain, stage=stage, prompt_len=len(prompt_ids), tokens=tokens,
        logprobs=logprobs, loss_mask=mask, turns=row.turns, tokenizer=vocabulary.digest,
        version_starts=whole_numbers(fields.get("version_starts", [0]), *IDS, "version_starts").astype(np.int32),
        versions=whole_numbers(fields.get("versions", [row.iteration]), *INT32, "versions").astype(np.int32),
        **_recorded(row, len(tokens), mask, vocabulary), **stated,
    )  # fmt: skip
    check_sample(sample)
    if row.teacher_logprobs is not None:
        row.signals.append(read_teacher(row.teacher_logprobs, sample, settings.teacher, vocabulary))
    return row, prompt, sample


def read_teacher(values: list[float], sample: Sample, name: str, vocabulary: Vocabulary) -> TeacherSignal:
    """Build a signal from the log-probs of a reference model that is known only by its name."""
    mask = sample.loss_mask.astype(bool)
    logprob = np.where(mask, np.array(values, np.float32), np.float32(0))
    own = logprob[mask].astype(np.float64)
    gap = None if sample.logprobs is None else float(np.mean(sample.logprobs[mask] - own))
    teacher = Teacher(
        name=name, source="import", weights_digest=IMPORTED, tokenizer_digest=vocabulary.digest,
        vocab_size=vocabulary.size, hidden_size=0, dtype="", head_file="", head_digest="",
    )  # fmt: skip
    signal = Signal(
        uid="", sample_row=-1, kind="logprob", logprob=logprob, mean_reverse_kl=gap, logprob_std=float(np.std(own))
    )
    return TeacherSignal(teacher, signal)


def _divided(row: Row, settings: ImportSettings, vocabulary: Vocabulary) -> list[Row]:
    """Return the row with its token ids, or one row per answer if the template rewrites earlier ones and `split` is
    set.

    Raises InputError for text that cannot be tokenised as its template writes it.
    """
    if row.prompt_ids is not None and row.response_ids is not None:
        return [row]
    try:
        return [_tokenised(row, vocabulary)]
    except RewrittenTurnError as error:
        if settings.rewritten == "refuse":
            raise InputError(
                f"{row.location}: {error}; --rewritten split makes each answer a sample of its own, or give token ids"
            ) from None
    except InputError as error:
        raise InputError(f"{row.location}: {error}") from None
    prompt, response = _as_messages(row)
    own = [index for index, message in enumerate(response) if message["role"] == "assistant"]
    parts = [
        replace(row, prompt=[*prompt, *response[:index]], response=response[index : index + 1], turns=1, is_part=True)
        for index in own
    ]
    try:
        return [_tokenised(part, vocabulary) for part in parts]
    except InputError as error:
        raise InputError(f"{row.location}: {error}") from None


def _tokenised(row: Row, vocabulary: Vocabulary) -> Row:
    """Return the row with the token ids of its text or messages.

    A text does not show the token that the policy sampled last, so it is added to the answer unless the source says
    that the answer was cut off.
    """
    is_cut_off = row.sample.get("finish_reason") == "length"
    if isinstance(row.prompt, str) and (row.rendered or vocabulary.template != "chat"):
        if not isinstance(row.response, str):
            raise InputError("the prompt is text and the response has messages; give both as messages")
        prompt_ids = (vocabulary.response if row.rendered else vocabulary.prompt)(row.prompt)
        response_ids, end = vocabulary.response(row.response), vocabulary.end
        ended = end is not None and response_ids[-1:] != [end] and not is_cut_off
        if ended and end is not None:
            response_ids = [*response_ids, end]
        return replace(row, prompt_ids=prompt_ids, response_ids=response_ids, from_text=True, ended=ended)
    tokens = vocabulary.conversation(*_as_messages(row), options=row.chat, is_cut_off=is_cut_off)
    return replace(
        row,
        prompt_ids=tokens.prompt_ids,
        response_ids=tokens.response_ids,
        loss_mask=tokens.loss_mask,
        from_text=True,
        ended=tokens.is_terminated,
        without_thought=tokens.skips_opening,
        ignored=(*row.ignored, *((THOUGHT_FIELDS[0],) if tokens.has_hidden_thought else ())),
    )


def _as_messages(row: Row) -> tuple[Messages, Messages]:
    """Return prompt and response as messages."""
    assert row.prompt is not None
    assert row.response is not None
    prompt, response = row.prompt, row.response
    return (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        [{"role": "assistant", "content": response}] if isinstance(response, str) else response,
    )


def _checked_ids(row: Row, vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """Return the token ids of prompt and response, checked to be in the vocabulary and not empty."""
    prompt_ids, response_ids = row.prompt_ids or [], row.response_ids or []
    highest = max([*prompt_ids, *response_ids], default=0)
    if highest >= vocabulary.size:
        raise InputError(
            f"{row.location}: the row has token id {highest}, and the ids of the tokenizer end at "
            f"{vocabulary.size - 1}; give the tokenizer that made the ids"
        )
    if not prompt_ids or not response_ids:
        raise InputError(f"{row.location}: the {'response' if prompt_ids else 'prompt'} has no tokens")
    return prompt_ids, response_ids


def _recorded(row: Row, length: int, mask: np.ndarray, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the row's recorded fields in the form of Sample; missing ones are left out."""
    stated = [field for field in RECORDED if field.name in row.sample]
    return arguments(Sample, {field.name: _array(field, row, length, mask, vocabulary) for field in stated})


def _array(field: Field, row: Row, length: int, mask: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Convert a recorded field of a row of `length` tokens with this loss mask [R] to an array in its dtype.

    A field with W values per position gives [positions, W].
    """
    array = np.array(row.sample[field.name], np.float64 if field.is_float else np.int64)
    if field.token_ids and array.max(initial=0) >= vocabulary.size:
        raise InputError(
            f"{row.location}: {field.name} holds token id {array.max()}, and the ids of the tokenizer end at "
            f"{vocabulary.size - 1}; give the tokenizer that made the ids"
        )
    if field.values is not None:
        whole_numbers(array, *field.values, field.name)
    if field.width:
        axes = {"token": length, "read": length - 1, "response": len(mask), "trained": int(mask.sum())}
        places = axes[field.axis]
        if not places or len(array) % places:
            raise InputError(
                f"{row.location}: {field.name} has {len(array)} values, which cannot be divided evenly among the "
                f"sample's {places} tokens of this field"
            )
        array = array.reshape(places, -1)
    return array.astype(field.dtype)


def _question(row: Row, domain: str, settings: ImportSettings) -> Prompt:
    """Build the prompt of a row. Its name is a hash of the question, unless the row names it."""
    question: str | Messages = "" if row.prompt is None else row.prompt
    messages = ""
    if not isinstance(question, str):
        messages = json.dumps(question, ensure_ascii=False)
        question = conversation_text(question)
    key = messages or question or repr(row.prompt_ids)
    if row.chat.tools:
        tools = json.dumps(row.chat.tools, ensure_ascii=False)
        key, question = f"{key}\0{tools}", f"tools: {tools}\n{question}"
    digest = hashlib.blake2b(f"{key}\0{row.answer}".encode(errors="surrogatepass"), digest_size=8).hexdigest()
    stated: dict[str, Any] = {
        "split": SPLIT, "source": f"import:{settings.format}", "messages": messages, **row.question,
    }  # fmt: skip
    return Prompt(
        prompt_id=row.sample.get("prompt_id", f"{domain}-import-{digest}"),
        domain=domain, text=question, answer=row.answer, **stated,
    )  # fmt: skip


def _uid(
    stage: str, row: Row, tokens: np.ndarray, logprobs: np.ndarray | None, mask: np.ndarray, seen: dict[str, int]
) -> str:
    """Return a 128-bit identity of the content. `seen` counts equal rows of one import, so that each gets its own."""
    whole = hashlib.blake2b(f"{stage}\0{row.iteration}".encode(), digest_size=16, person=b"mopd-import")
    for array in (tokens, mask, *(() if logprobs is None else (logprobs,))):
        whole.update(array.tobytes() + b"\0")
    before = seen.get(whole.hexdigest(), 0)
    seen[whole.hexdigest()] = before + 1
    whole.update(before.to_bytes(8, "little"))
    return whole.hexdigest()
