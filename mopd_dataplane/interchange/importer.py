"""Imports rows of another framework into a store: all rows are checked, then written; importing twice adds nothing."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.base.file_urls import Place, files_at
from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.errors import EngineError, InputError, MismatchError, MopdError
from mopd_dataplane.fields import IDS, INT32, RECORDED, Field, arguments
from mopd_dataplane.interchange.formats import FORMATS, STATED
from mopd_dataplane.interchange.row_files import SUFFIXES, read_rows
from mopd_dataplane.interchange.rows import Messages, Row
from mopd_dataplane.interchange.signal_entries import TeacherSignal
from mopd_dataplane.interchange.teachers_in import Teachers
from mopd_dataplane.interchange.vocabulary import Vocabulary
from mopd_dataplane.job.sections import NAME
from mopd_dataplane.records import Prompt, Sample, Signal, Teacher
from mopd_dataplane.store.arrow_rows import check_sample, sample_crc
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.decode import keep_tokenizer
from mopd_dataplane.store.sample_values import log_probs, other_content, whole_numbers

BATCH = 1024
"""Samples committed together, at most."""
BATCH_BYTES = 256 << 20
"""Signals committed together, about."""
IMPORTED = "imported"
"""In place of the weights' digest of a teacher of whom only log-probs are known."""
CHECKED = ("uid", "prompt_id", "group_id", "stage", "tokenizer")
"""Fields that a row may state and that are compared, or made where it does not."""
SPLIT = "import"
"""Split of imported prompts: no rollout samples them, no evaluation asks them."""


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Values for what the rows do not state; a value that a plain row states takes precedence.

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
    """Name of the teacher whose log-probs the rows hold."""


@dataclass
class ImportReport:
    """Result of an import."""

    rows: int = 0
    """Rows read."""
    samples: int = 0
    """Samples they make; a trajectory that does not continue itself makes several."""
    inserted: int = 0
    """Samples the store did not have."""
    tokenised: int = 0
    """Samples whose ids were made here, from text."""
    ended: int = 0
    """Samples made of text that got the tokenizer's end-of-sequence token, which their text does not show."""
    with_logprobs: int = 0
    """Samples that came with the sampler's log-probs; the others have none (null)."""
    rewards: int = 0
    """Rewards the store did not have."""
    signals: int = 0
    """Signals of teachers the store did not have."""
    ignored: list[str] = field(default_factory=list)
    """Fields of the rows that nothing was made of; only the plain format knows its fields."""


def import_rollouts(
    store: Store | str,
    path: Place,
    settings: ImportSettings,
    vocabulary: Vocabulary,
    *,
    progress: Callable[[int], None] = lambda samples: None,
) -> ImportReport:
    """Import a file, all .jsonl and .parquet files of a folder, or those that match a pattern; a path or a URL.

    store: a store, or the path or URI of one, which is created once every row is checked.
    Every row is read and checked before anything is written, so a malformed one leaves the store as it was. uids
    follow from the content: the same rows again add nothing, and a killed import continues when it is repeated.
    Raises UnknownNameError for an unknown format, InputError naming file and row: not JSON, a field of
    another type, ids outside the vocabulary, impossible log-probs, no stage or domain, a uid that names other content,
    a teacher of that name that the store has scored with.
    """
    reader = find_plugin("mopd.importers", settings.format, FORMATS)
    files = files_at(path, SUFFIXES)
    target = Store.find(store) if isinstance(store, str) else store
    teachers = Teachers(target, [str(path), *files], (vocabulary.digest, vocabulary.size))
    prompts = _check(target, path, _samples(reader, files, settings, vocabulary), teachers)
    tokenizer = vocabulary.file()
    if isinstance(store, str):
        store = Store.create(store)
    keep_tokenizer(store, vocabulary.digest, tokenizer)
    teachers.bring(store)
    report, places = ImportReport(), set[str]()
    for batch in _batches(_samples(reader, files, settings, vocabulary)):
        places |= {row.place for row, _, _ in batch}
        report.ignored = sorted({*report.ignored, *(name for row, _, _ in batch for name in row.ignored)})
        _write(store, batch, prompts, report)
        progress(report.samples)
    report.rows = len(places)
    detail = {"format": settings.format, "rows": report.rows, "tokenised": report.tokenised}
    text = "\0".join([settings.format, settings.stage, *(Path(file).name for file in files)])
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()  # the same when the import is repeated
    store.add_event(f"import/{name}", settings.stage, "import", -1, float(report.samples), detail)
    return report


def _batches(converted: Iterator[tuple[Row, Prompt, Sample]]) -> Iterator[list[tuple[Row, Prompt, Sample]]]:
    batch: list[tuple[Row, Prompt, Sample]] = []
    heavy = 0
    for entry in converted:
        batch.append(entry)
        heavy += sum(said.nbytes for said in entry[0].signals)
        if len(batch) == BATCH or heavy >= BATCH_BYTES:
            yield batch
            batch, heavy = [], 0
    if batch:
        yield batch


def _check(
    store: Store | None, path: Place, converted: Iterator[tuple[Row, Prompt, Sample]], teachers: Teachers
) -> dict[str, Prompt]:
    """Convert every row, and compare its prompt and its uid with what the store and other rows call by that name.

    Returns the prompts by name: a question that came by another format before stays as that brought it.
    """
    known = {prompt.prompt_id: prompt for prompt in store.prompts()} if store is not None else {}
    places: list[str] = []
    uids: list[str] = []
    crcs: list[int] = []
    for row, prompt, sample in converted:
        places.append(row.place)
        uids.append(sample.uid)
        crcs.append(sample_crc(sample))
        for said in row.signals:
            teachers.check(said, row.place, sample.response_len, sample.loss_tokens)
        before = known.setdefault(prompt.prompt_id, prompt)
        if replace(prompt, source=before.source) != before:
            raise InputError(
                f"{row.place}: prompt_id {prompt.prompt_id!r:.80} is the name of another prompt, in the store or in a "
                "row before; rename it, or leave prompt_id out"
            )
    if not places:
        raise InputError(f"{path}: no rows")
    for other in other_content(store.dataset("samples") if store is not None else None, uids, crcs)[:1]:
        raise InputError(
            f"{places[other]}: uid {uids[other]} is the name of a sample with other tokens, log-probs or masks, in the "
            "store or in a row before; leave uid out, and it follows from the content"
        )
    return known


def _write(
    store: Store, batch: list[tuple[Row, Prompt, Sample]], prompts: dict[str, Prompt], report: ImportReport
) -> None:
    store.add_prompts([prompts[name] for name in {prompt.prompt_id: None for _, prompt, _ in batch}])
    samples = [sample for _, _, sample in batch]
    receipt = store.commit_samples(samples)
    records: list[dict[str, Any]] = []
    said: defaultdict[tuple[str, str], list[Signal]] = defaultdict(list)
    for (row, _, sample), number in zip(batch, receipt.rows.tolist(), strict=True):
        of_sample = {"uid": sample.uid, "sample_row": number}
        for (verifier, version), value in row.rewards.items():
            verdict = {"verifier": verifier, "verifier_version": version, "reward": value}
            records.append(of_sample | verdict | row.verdicts.get(verifier, {}))
        for one in row.signals:
            said[one.teacher.name, one.signal.kind].append(replace(one.signal, uid=sample.uid, sample_row=number))
    report.samples += len(samples)
    report.inserted += receipt.inserted
    report.tokenised += sum(row.prompt_ids is None for row, _, _ in batch)
    report.ended += sum(row.ended for row, _, _ in batch)
    report.with_logprobs += sum(sample.logprobs is not None for sample in samples)
    report.rewards += store.add_rewards(records)
    for (teacher, kind), signals in said.items():
        report.signals += store.commit_signals(teacher, kind, signals)


def _samples(
    reader: Callable[..., Any], files: Sequence[str], settings: ImportSettings, vocabulary: Vocabulary
) -> Iterator[tuple[Row, Prompt, Sample]]:
    """Every row as prompt and sample, checked."""
    seen: dict[str, int] = {}
    groups: dict[str, int] = {}
    ordinal = 0
    for file in files:
        for place, fields in read_rows(file):
            for row in _rows_of(reader, settings.format, fields, place):
                try:
                    yield _converted(row, settings, vocabulary, seen, groups, ordinal)
                except (MismatchError, EngineError) as error:
                    raise InputError(f"{place}: {error}") from None
                ordinal += 1


def _rows_of(reader: Callable[..., Any], name: str, fields: dict[str, Any], place: str) -> list[Row]:
    """Rows that an importer makes of one row of a file. Raises InputError for an invalid one of another package."""
    if name in FORMATS:
        return list(reader(fields, place))
    try:
        rows = list(reader(fields, place))
    except MopdError:
        raise
    except Exception as error:
        raise InputError(
            f"{place}: importer {name!r:.80} ended with {type(error).__name__}: {error!s:.200}; it takes a row's "
            "fields and its place, and yields interchange rows: mopd_dataplane.testing.check_importer tries one"
        ) from error
    if strange := next((row for row in rows if not isinstance(row, Row)), None):
        raise InputError(f"{place}: importer {name!r:.80} gave {strange!r:.80}; it must yield interchange rows")
    return rows


def _converted(
    row: Row,
    settings: ImportSettings,
    vocabulary: Vocabulary,
    seen: dict[str, int],
    groups: dict[str, int],
    ordinal: int,
) -> tuple[Row, Prompt, Sample]:
    given = row.sample
    domain = row.domain or settings.domain
    stage = settings.stage or given.get("stage", "")
    for name, value in (("domain", domain), ("stage", stage)):
        if not value:
            raise InputError(f"{row.place}: the row names no {name}; give --{name} NAME")
    if not re.fullmatch(NAME, stage):
        raise InputError(f"{row.place}: stage {stage!r:.80}: allowed are up to 64 of a-z, 0-9, '_', '.', '-'")
    if row.iteration < 0:
        raise InputError(f"{row.place}: iteration is {row.iteration}; allowed: 0 and above")
    prompt_ids, response_ids = _ids(row, vocabulary)
    if row.teacher_logprobs is not None:
        if len(row.teacher_logprobs) != len(response_ids):
            raise InputError(
                f"{row.place}: {len(row.teacher_logprobs)} log-probs of a teacher for {len(response_ids)} tokens; "
                "expected one each"
            )
        log_probs(np.array(row.teacher_logprobs, np.float64), "teacher_logprobs")
    if given.get("tokenizer", vocabulary.digest) != vocabulary.digest:
        raise InputError(
            f"{row.place}: token ids of tokenizer {given['tokenizer']!r:.40}, the given one is {vocabulary.digest}; "
            "give the tokenizer that made them"
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
    group = given.get("group_id", f"{prompt.prompt_id}#{row.iteration}")
    index = groups[group] = groups.get(group, -1) + 1
    stated: dict[str, Any] = {
        "group_index": index, "writer": f"import-{settings.format}" + ("-text" if row.prompt_ids is None else ""),
        "writer_seq": ordinal, "policy": settings.policy, "temperature": settings.temperature, "top_p": 1.0, "top_k": 0,
        "finish_reason": "unknown",
    } | {name: given[name] for name in STATED if name in given and name not in CHECKED}  # fmt: skip
    sample = Sample(
        uid=given.get("uid") or _uid(stage, row, tokens, logprobs, mask, seen), prompt_id=prompt.prompt_id,
        group_id=group, iteration=row.iteration, domain=domain, stage=stage, prompt_len=len(prompt_ids), tokens=tokens,
        logprobs=logprobs, loss_mask=mask, turns=row.turns, tokenizer=vocabulary.digest,
        version_starts=whole_numbers(given.get("version_starts", [0]), *IDS, "version_starts").astype(np.int32),
        versions=whole_numbers(given.get("versions", [row.iteration]), *INT32, "versions").astype(np.int32),
        **_recorded(row, len(tokens), mask, vocabulary), **stated,
    )  # fmt: skip
    check_sample(sample)
    if row.teacher_logprobs is not None:
        row.signals.append(_reference(row.teacher_logprobs, sample, settings.teacher, vocabulary))
    return row, prompt, sample


def _reference(values: list[float], sample: Sample, name: str, vocabulary: Vocabulary) -> TeacherSignal:
    """Log-probs of a reference model as a signal of a teacher of whom nothing else is known."""
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


def _ids(row: Row, vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """Token ids as they came, else of the text."""
    if row.prompt_ids is not None and row.response_ids is not None:
        highest = max([*row.prompt_ids, *row.response_ids], default=0)
        if highest >= vocabulary.size:
            raise InputError(
                f"{row.place}: token id {highest}, the tokenizer has {vocabulary.size}; give the right one"
            )
        ids = row.prompt_ids, row.response_ids
    else:
        ids = _tokenised(row, vocabulary)
    if not ids[0] or not ids[1]:
        raise InputError(f"{row.place}: the {'response' if ids[0] else 'prompt'} has no tokens")
    return ids


def _tokenised(row: Row, vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """Token ids of text and messages. A text does not show the end-of-sequence token that the policy sampled last, so
    it gets one, unless its source says that it was cut off."""
    assert row.prompt is not None
    assert row.response is not None
    if not isinstance(row.response, str):
        assert not isinstance(row.prompt, str)
        try:
            prompt, response, row.loss_mask = vocabulary.conversation(row.prompt, row.response)
        except InputError as error:
            raise InputError(f"{row.place}: {error}") from None
        return prompt, response
    rendered = isinstance(row.prompt, str) and row.rendered
    prompt = vocabulary.response(str(row.prompt)) if rendered else vocabulary.prompt(row.prompt)
    response = vocabulary.response(row.response)
    end = vocabulary.end
    row.ended = end is not None and response[-1:] != [end] and row.sample.get("finish_reason") != "length"
    return prompt, [*response, end] if row.ended and end is not None else response


def _recorded(row: Row, length: int, mask: np.ndarray, vocabulary: Vocabulary) -> dict[str, Any]:
    """Recorded fields as Sample has them; what the row does not state is left out."""
    stated = [field for field in RECORDED if field.name in row.sample]
    return arguments(Sample, {field.name: _array(field, row, length, mask, vocabulary) for field in stated})


def _array(field: Field, row: Row, length: int, mask: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """A recorded field of a row of `length` tokens with this loss mask [R], in its dtype; [places, W] of a field with
    several values a place."""
    given = np.array(row.sample[field.name], np.float64 if field.is_float else np.int64)
    if field.token_ids and given.max(initial=0) >= vocabulary.size:
        raise InputError(
            f"{row.place}: {field.name} holds {given.max()}, the tokenizer has {vocabulary.size} ids; "
            "give the right one"
        )
    if field.values is not None:
        whole_numbers(given, *field.values, field.name)
    if field.width:
        axes = {"token": length, "read": length - 1, "response": len(mask), "trained": int(mask.sum())}
        places = axes[field.axis]
        if not places or len(given) % places:
            raise InputError(
                f"{row.place}: {field.name} has {len(given)} values up to {given.max(initial=0)}; expected as many "
                f"for each of {places} places"
            )
        given = given.reshape(places, -1)
    return given.astype(field.dtype)


def _question(row: Row, domain: str, settings: ImportSettings) -> Prompt:
    """The prompt of a row; its name follows from what it asks, unless the row names it."""
    asked: str | Messages = "" if row.prompt is None else row.prompt
    messages = ""
    if not isinstance(asked, str):
        messages = json.dumps(asked, ensure_ascii=False)
        asked = "\n".join(f"{message['role']}: {message['content']}" for message in asked)  # for people to read
    key = messages or asked or repr(row.prompt_ids)
    digest = hashlib.blake2b(f"{key}\0{row.answer}".encode(errors="surrogatepass"), digest_size=8).hexdigest()
    stated: dict[str, Any] = {
        "split": SPLIT, "source": f"import:{settings.format}", "messages": messages, **row.question,
    }  # fmt: skip
    return Prompt(
        prompt_id=row.sample.get("prompt_id", f"{domain}-import-{digest}"),
        domain=domain, text=asked, answer=row.answer, **stated,
    )  # fmt: skip


def _uid(
    stage: str, row: Row, tokens: np.ndarray, logprobs: np.ndarray | None, mask: np.ndarray, seen: dict[str, int]
) -> str:
    """128-bit identity of the content; `seen` counts equal rows of one import, so that each has its own."""
    whole = hashlib.blake2b(f"{stage}\0{row.iteration}".encode(), digest_size=16, person=b"mopd-import")
    for array in (tokens, mask, *(() if logprobs is None else (logprobs,))):
        whole.update(array.tobytes() + b"\0")
    before = seen.get(whole.hexdigest(), 0)
    seen[whole.hexdigest()] = before + 1
    whole.update(before.to_bytes(8, "little"))
    return whole.hexdigest()
