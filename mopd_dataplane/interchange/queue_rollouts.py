"""Rollouts from the values of a queue: samples, tokens, rewards and signals, written before a fold drops values.

A sample is known by the write of its token ids, not by its number, which frameworks use again; its uid follows from
that write. So values that are recorded again, after a kill or by another process, add nothing, and a value that comes
later, such as a reward, is added to the sample whose tokens it was put beside.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.errors import EngineError, InputError, MismatchError
from mopd_dataplane.interchange.conversion import IMPORTED, Converted, ImportSettings, RowConversion, read_teacher
from mopd_dataplane.interchange.importer import ImportReport, batches, check_rows, write_rows
from mopd_dataplane.interchange.queue_mapping import (
    QueueRollouts,
    read_settings,
    row_of,
    stage_of,
    teacher_arrays,
    uid_of,
)
from mopd_dataplane.interchange.queue_values import plain_value
from mopd_dataplane.interchange.rows import Row
from mopd_dataplane.interchange.signal_entries import TeacherSignal
from mopd_dataplane.interchange.teachers_in import Teachers
from mopd_dataplane.interchange.vocabulary import Vocabulary
from mopd_dataplane.models.chat_template import NO_OPTIONS, AnswerTokens, ChatOptions, Messages
from mopd_dataplane.records import Prompt, Signal
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.queue.queue_log import SETTINGS, make_logs_folder
from mopd_dataplane.store.queue.recording import Part
from mopd_dataplane.store.queue.unfolded import Entry, last_entry, needs_stored_write
from mopd_dataplane.store.queue.values import TAGS, Key, Value, Write
from mopd_dataplane.store.read.decode import keep_tokenizer

REFERENCE = "reference"
"""Name of the teacher whose log-probs a framework calls those of its reference model."""
_Order = tuple[int, str]
"""(stamp, log) of a batch"""


def record_rollouts(uri: Path, queue: str, rollouts: QueueRollouts, tokenizer: dict[str, Any] | None) -> None:
    """Have the values of a queue recorded from its next fold on. tokenizer: the content of its tokenizer.json.

    The store is created if there is none.
    """
    store = Store.create(str(uri))
    keep_tokenizer(store, rollouts.tokenizer, tokenizer)
    publish_file(make_logs_folder(uri, queue) / SETTINGS, (json.dumps(asdict(rollouts), indent=1) + "\n").encode())


def open_recorder(settings: Path) -> QueueRecorder:
    """Return the recorder of a settings file. Raises DamagedError for one that `record_rollouts` did not write."""
    return QueueRecorder(settings.parents[2], settings.parent.name, read_settings(settings))


class QueueRecorder:
    """Makes samples of the values of one queue. Not for several threads."""

    def __init__(self, uri: Path, queue: str, rollouts: QueueRollouts) -> None:
        self._store = Store.open(str(uri))
        self._queue = queue
        self._rollouts, self._mapping = rollouts, rollouts.mapping
        self._read = self._mapping.field_names()
        self._vocabulary = _KnownVocabulary(rollouts.tokenizer, rollouts.vocabulary_size)
        self._said: set[str] = set()
        self._teachers: dict[str, str] = {}
        """Digest of the weights of each teacher of the store, as far as it was looked up."""

    def record(self, part: Part) -> None:
        """See store.queue.recording.Recorder."""
        self._say_unmapped(part)
        contents = self._contents(part, self._due(part))
        converted = (pair for (sample, write), content in contents for pair in self._converted(sample, write, content))
        for batch in batches(converted):
            self._write(batch)

    def _due(self, part: Part) -> dict[tuple[int, Write], _Order]:
        """Samples of which something arrived, by the write of their token ids, with the last batch that brought it."""
        arrivals: list[tuple[int, _Order]] = []
        for batch in part.batches:
            numbers = dict.fromkeys(
                entry.item.key[0]
                for entry in batch.entries
                if not entry.is_clearing and entry.item.key[1] in self._read - {TAGS}
            )
            arrivals += [(number, (batch.stamp, batch.log)) for number in numbers]
        keys = {(number, self._mapping.key_field) for number, _ in arrivals}
        stored = part.stored_writes([key for key in keys if _needs_dataset(part.entries(key))])
        due = {}
        for number, order in arrivals:
            key = number, self._mapping.key_field
            entry = _entry_at(part, key, order, stored.get(key))
            write = stored.get(key) if entry is None else None if entry.is_clearing else entry.write
            if write is not None:
                due[number, write] = order
        return due

    def _contents(
        self, part: Part, due: Mapping[tuple[int, Write], _Order]
    ) -> Iterable[tuple[tuple[int, Write], dict[str, Any]]]:
        """Yield the mapped values of each due sample as they were with its last batch."""
        # What is not in the logs is looked up at once, and only for samples that were begun in an earlier fold.
        absent = [
            (number, name)
            for number, _ in due
            for name in self._read
            if _needs_dataset(part.entries((number, name)))
            and (name in self._required or _needs_dataset(part.entries((number, self._mapping.key_field))))
        ]
        stored = part.stored_values(absent)
        for (number, write), order in due.items():
            content: dict[str, Any] = {}
            for name in self._read:
                key = number, name
                before, of = stored.get(key, (None, None))
                entry = _entry_at(part, key, order, of)
                value: Value | None = before
                if entry is not None:
                    value = None if entry.is_clearing else entry.read()
                if value is not None:
                    content[name] = plain_value(value)
            yield (number, write), content

    @property
    def _required(self) -> set[str]:
        """Fields without which there is no sample."""
        mapping = self._mapping
        return {mapping.prompt, mapping.response} if mapping.response else {mapping.tokens, mapping.mask}

    def _converted(self, number: int, write: Write, content: dict[str, Any]) -> Iterable[Converted]:
        """Return the sample of some values, in a list; an empty one, with a word why, if they are none."""
        location = f"sample {number} of queue {self._queue!r}"
        said = content.get(TAGS) or {}
        stage = stage_of(str(said.get("partition", "")))
        settings = ImportSettings(
            format=f"queue-{self._queue}", stage=stage, domain=self._rollouts.domain, policy=self._rollouts.policy,
            teacher=REFERENCE,
        )  # fmt: skip
        try:
            row = row_of(self._mapping, content, location)
            row.sample |= {
                "uid": uid_of(self._queue, number, write),
                "writer_seq": write.seq,
                "group_index": row.sample.get("group_index", 0),
            }
            (converted,) = RowConversion(settings, self._vocabulary).samples_of(row)
            if (signal := self._signal(content, row, converted)) is not None:
                row.signals.append(signal)
        except (InputError, EngineError, ValueError) as error:
            self._refuse(location, stage, error)
            return []
        return [converted]

    def _signal(self, content: dict[str, Any], row: Row, converted: Converted) -> TeacherSignal | None:
        """Return the signal of the sample's teacher; None without one, or if the store knows the teacher by a model.

        The store has the signals of such a teacher: that is where the queue got them (transferqueue/teacher_fields.py).
        """
        arrays = teacher_arrays(self._mapping, content, row)
        if arrays is None:
            return None
        name, ids, logprobs = arrays
        if self._is_scored_here(name):
            return None
        sample = converted[2]
        if ids is None:
            return read_teacher(logprobs[:, 0].tolist(), sample, name, self._vocabulary)
        trained = sample.loss_mask.astype(bool)
        teacher = read_teacher([0.0] * len(trained), sample, name, self._vocabulary).teacher
        signal = Signal(
            uid="", sample_row=-1, kind="topk", topk_ids=ids[trained].astype(np.int32),
            topk_logprobs=logprobs[trained].astype(np.float32),
        )  # fmt: skip
        return TeacherSignal(teacher, signal)

    def _is_scored_here(self, teacher: str) -> bool:
        """Check if the store knows a teacher by a model, and not by imported log-probs alone."""
        if teacher not in self._teachers:  # one that is new to the store since the last look, or a name without a model
            self._teachers = {name: record.weights_digest for name, record in self._store.teachers().items()}
        return self._teachers.get(teacher, IMPORTED) != IMPORTED

    def _write(self, batch: list[Converted]) -> None:
        """Write samples; if one of them is refused, each by itself."""
        try:
            teachers = Teachers(self._store, [], (self._vocabulary.digest, self._vocabulary.size))
            prompts: dict[str, Prompt] = {}
            check_rows(self._store, prompts, batch, teachers)
            teachers.bring(self._store)
            write_rows(self._store, batch, prompts, ImportReport())
        except (InputError, MismatchError, EngineError) as error:
            if len(batch) == 1:
                row, _, sample = batch[0]
                self._refuse(row.location, sample.stage, error)
                return
            for converted in batch:
                self._write([converted])

    def _refuse(self, location: str, stage: str, error: Exception) -> None:
        """Say what was not recorded: in the folding process's messages, and once for each reason in `events`."""
        reason = str(error).removeprefix(location).lstrip(": ")
        print(f"{location} was not recorded: {reason}", file=sys.stderr, flush=True)
        self._say(stage, "unrecorded", {"reason": reason, "first": location})

    def _say_unmapped(self, part: Part) -> None:
        """Say once which fields are not part of the samples."""
        names = {entry.item.key[1] for batch in part.batches for entry in batch.entries}
        names -= self._read | self._mapping.ignored_fields()
        for name in sorted(names):
            self._say("", "unmapped", {"reason": f"field {name!r} is in the queue alone, until it is cleared"})

    def _say(self, stage: str, kind: str, detail: dict[str, str]) -> None:
        name = hashlib.blake2b(f"{kind}\0{stage}\0{detail['reason']}".encode(), digest_size=8).hexdigest()
        if name not in self._said:
            self._said.add(name)
            self._store.add_event(f"queue/{self._queue}/{name}", stage, kind, -1, None, detail)


def _needs_dataset(entries: list[Entry]) -> bool:
    """Whether the value of a key before these entries matters."""
    return not entries or needs_stored_write(entries)


def _entry_at(part: Part, key: Key, order: _Order, stored: Write | None) -> Entry | None:
    """The entry that decides a key as of a batch; None where the dataset does."""
    entries = [entry for entry in part.entries(key) if (entry.stamp, entry.log) <= order]
    return last_entry(entries, stored) if entries else None


@dataclass(frozen=True)
class _KnownVocabulary(Vocabulary):
    """Digest and size of a tokenizer; samples of a queue have token ids, so nothing is tokenised."""

    digest: str
    size: int
    end: int | None = None
    template: str = "chat"

    def file(self) -> dict[str, Any] | None:
        return None

    def prompt(self, text: str) -> list[int]:
        raise NotImplementedError

    def response(self, text: str) -> list[int]:
        raise NotImplementedError

    def conversation(
        self, prompt: Messages, response: Messages, *, options: ChatOptions = NO_OPTIONS, is_cut_off: bool = False
    ) -> AnswerTokens:
        raise NotImplementedError
