"""Imports rows of another framework into a store: all rows are checked, then written. Importing twice adds nothing."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mopd_dataplane.base.file_urls import PathOrUrl, files_at
from mopd_dataplane.errors import InputError
from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.interchange.conversion import Conversion, Converted, ImportSettings
from mopd_dataplane.interchange.row_files import SUFFIXES, read_rows
from mopd_dataplane.interchange.teachers_in import Teachers
from mopd_dataplane.interchange.vocabulary import Vocabulary
from mopd_dataplane.records import Prompt, Signal
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.arrow_rows import sample_crc
from mopd_dataplane.store.format.sample_values import other_content
from mopd_dataplane.store.read.decode import keep_tokenizer

BATCH = 1024
"""Upper bound of the samples in one commit."""
BATCH_BYTES = 256 << 20
"""Approximate bytes of signals in one commit."""


@dataclass
class ImportReport:
    """Result of an import."""

    rows: int = 0
    """Number of rows read."""
    samples: int = 0
    """Number of samples in them; a trajectory whose steps do not continue each other makes several."""
    inserted: int = 0
    """Number of samples that the store did not have."""
    tokenised: int = 0
    """Number of samples that were tokenised by the import, from text."""
    ended: int = 0
    """Number of text samples to which the token that ends an answer was added (the chat template's, else the
    tokenizer's)."""
    split: int = 0
    """Number of conversations cut into one sample per answer by `rewritten = "split"`."""
    without_thought: int = 0
    """Number of samples whose answer begins before the thought that the chat template opens, because it has none."""
    with_logprobs: int = 0
    """Number of samples with the sampler's log-probs; the others store null."""
    rewards: int = 0
    """Number of rewards that the store did not have."""
    signals: int = 0
    """Number of teachers' signals that the store did not have."""
    ignored: list[str] = field(default_factory=list)
    """Fields of the rows that were not used; only the plain format knows its fields."""


def import_rollouts(
    store: Store | str,
    path: PathOrUrl,
    settings: ImportSettings,
    vocabulary: Vocabulary,
    *,
    progress: Callable[[int], None] = lambda samples: None,
) -> ImportReport:
    """Import a file, all .jsonl and .parquet files of a folder, or those that match a pattern, by path or URL.

    store: a store, or the path or URI of one, which is created once every row is checked. Every row is read and checked
    before anything is written, so a malformed one leaves the store as it was. uids follow from the content: the same
    rows again add nothing, and a killed import continues when it is repeated.
    Raises UnknownNameError for an unknown format, and InputError naming file and row: not JSON, a field of another
    type, ids outside the vocabulary, impossible log-probs, no stage or domain, a uid that names other content, or a
    teacher name with which the store has scored.
    """
    files = files_at(path, SUFFIXES)
    target = Store.find(store) if isinstance(store, str) else store
    teachers = Teachers(target, [str(path), *files], (vocabulary.digest, vocabulary.size))
    prompts = known_prompts(target)
    if not check_rows(target, prompts, _samples(files, settings, vocabulary), teachers):
        raise InputError(f"{path}: no rows")
    tokenizer = vocabulary.file()
    if isinstance(store, str):
        store = Store.create(store)
    keep_tokenizer(store, vocabulary.digest, tokenizer)
    teachers.bring(store)
    report, places, divided = ImportReport(), set[str](), set[str]()
    for batch in batches(_samples(files, settings, vocabulary)):
        places |= {row.location for row, _, _ in batch}
        divided |= {row.location for row, _, _ in batch if row.is_part}
        report.ignored = sorted({*report.ignored, *(name for row, _, _ in batch for name in row.ignored)})
        write_rows(store, batch, prompts, report)
        progress(report.samples)
    report.rows, report.split = len(places), len(divided)
    record_import(store, settings, files, report)
    return report


def record_import(store: Store, settings: ImportSettings, files: Sequence[str], report: ImportReport) -> None:
    """Record an event about an import, under a name that is the same when the import is repeated."""
    detail = {"format": settings.format, "rows": report.rows, "tokenised": report.tokenised}
    text = "\0".join([settings.format, settings.stage, *(Path(file).name for file in files)])
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    store.add_event(f"import/{name}", settings.stage, "import", -1, float(report.samples), detail)


def batches(converted: Iterator[Converted]) -> Iterator[list[Converted]]:
    """Yield the rows in batches that are committed at once."""
    batch: list[Converted] = []
    heavy = 0
    for entry in converted:
        batch.append(entry)
        heavy += sum(said.nbytes for said in entry[0].signals)
        if len(batch) == BATCH or heavy >= BATCH_BYTES:
            yield batch
            batch, heavy = [], 0
    if batch:
        yield batch


def known_prompts(store: Store | None) -> dict[str, Prompt]:
    """Return the prompts of a store by name; none for a store that is still to be made."""
    return {prompt.prompt_id: prompt for prompt in store.prompts()} if store is not None else {}


def check_rows(
    store: Store | None, prompts: dict[str, Prompt], converted: Iterable[Converted], teachers: Teachers
) -> int:
    """Convert every row, and compare its prompt and its uid with those of that name in the store and in other rows.

    prompts: those of the store by name, to which new ones are added; a question that was imported in another format
    before stays as it was. Returns the number of samples. Raises InputError naming file and row.
    """
    places: list[str] = []
    uids: list[str] = []
    crcs: list[int] = []
    for row, prompt, sample in converted:
        places.append(row.location)
        uids.append(sample.uid)
        crcs.append(sample_crc(sample))
        aligned = {said.teacher.name for said in row.signals if said.signal.kind == ALIGNMENT}
        for said in row.signals:
            teachers.check(said, row.location, sample.response_len, sample.loss_tokens, aligned=aligned)
        before = prompts.setdefault(prompt.prompt_id, prompt)
        if not _is_same_question(prompt, before):
            raise InputError(
                f"{row.location}: prompt_id {prompt.prompt_id!r:.80} is the name of another prompt, in the store or in "
                "a row before; rename it, or leave prompt_id out"
            )
    for other in other_content(store.dataset("samples") if store is not None else None, uids, crcs)[:1]:
        raise InputError(
            f"{places[other]}: uid {uids[other]} is the name of a sample with other tokens, log-probs or masks, in the "
            "store or in a row before; leave uid out, and it follows from the content"
        )
    return len(places)


def _is_same_question(prompt: Prompt, other: Prompt) -> bool:
    """Check if two prompts ask the same. The text of messages is for people only, and the source does not count."""
    shown = other.text if prompt.messages and prompt.messages == other.messages else prompt.text
    return replace(prompt, source=other.source, text=shown) == other


def write_rows(store: Store, batch: list[Converted], prompts: dict[str, Prompt], report: ImportReport) -> None:
    """Commit rows that were checked, with their prompts, rewards and signals, and count them in the report."""
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
    report.tokenised += sum(row.from_text for row, _, _ in batch)
    report.ended += sum(row.ended for row, _, _ in batch)
    report.without_thought += sum(row.without_thought for row, _, _ in batch)
    report.with_logprobs += sum(sample.logprobs is not None for sample in samples)
    report.rewards += store.add_rewards(records)
    for (teacher, kind), signals in said.items():
        report.signals += store.commit_signals(teacher, kind, signals)


def _samples(files: Sequence[str], settings: ImportSettings, vocabulary: Vocabulary) -> Iterator[Converted]:
    """Yield every row with its prompt and its sample, checked."""
    conversion = Conversion(settings, vocabulary)
    for file in files:
        for location, fields in read_rows(file):
            yield from conversion.samples(location, fields)
