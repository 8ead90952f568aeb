"""Records of deletions, by identity alone: deleted samples cannot be added again, and errors can name the deletion.

    deletions/<n>.json         uids and row ids of the samples, sha256 of the prompts' names; nothing of their content
    deletions/<n>.begun.json   states that record n was written, so that its later loss is noticed

A record is written before the first row is removed and closed after the last. An open one is a deletion to be
continued, by the command whose predicate it holds until then. Its number is claimed by creating its file, so two
deletions at once write two records; no number is used twice.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import DamagedError, MismatchError, UnknownNameError
from mopd_dataplane.records import Sample
from mopd_dataplane.store.location import StoreLocation

FOLDER = "deletions"
UID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
"""A sample's uid inside a text."""
_RECORD, _WITNESS = re.compile(r"(\d+)\.json"), re.compile(r"(\d+)\.begun\.json")


class PromptSlot(NamedTuple):
    """Position that a deleted prompt had in `prompts`: its row id, among the prompts of its domain and split."""

    row: int
    domain: str
    split: str


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """Samples and prompts that were deleted together.

    Example: Deletion(name="0", began="2026-11-23T08:00:00+00:00", finished=True, uids=("9f…",), rows=(17,),
    prompts=()).
    """

    name: str
    began: str
    finished: bool
    uids: tuple[str, ...]
    rows: tuple[int, ...]
    """Row ids of the samples in `samples`."""
    prompts: tuple[str, ...]
    """sha256 of the names of prompts, hex."""
    slots: tuple[PromptSlot, ...] = ()
    """Positions of the prompts; empty in a record of an earlier version of this package."""
    where: str = ""
    """Predicate of the command that continues an unfinished deletion; empty once it is finished."""


class Deletions:
    """The deletions of one store."""

    def __init__(self, location: StoreLocation) -> None:
        self._location = location
        self._known: dict[str, Deletion] = {}
        """Finished deletions, which do not change any more."""

    def names(self) -> list[str]:
        """Return the names of the records, the oldest first."""
        return [str(number) for number in self._numbers(_RECORD)]

    def lost(self) -> list[str]:
        """Return the names of records that were written and are missing."""
        numbers = [*self._numbers(_RECORD), *self._numbers(_WITNESS)]
        return [str(number) for number in sorted(set(range(max(numbers, default=-1) + 1)) - {*self._numbers(_RECORD)})]

    def all(self) -> list[Deletion]:
        """Return every deletion, the oldest first."""
        return [self.read(name) for name in self.names()]

    def unfinished(self) -> list[Deletion]:
        """Return the deletions that have begun and not finished."""
        return [deletion for deletion in self.all() if not deletion.finished]

    def begin(
        self,
        uids: Iterable[str],
        rows: Iterable[int],
        prompts: Iterable[str],
        *,
        slots: Iterable[PromptSlot] = (),
        where: str = "",
    ) -> Deletion:
        """Record a coming deletion; durable on return, under a number that no other call gets.

        prompts: names. where: the predicate whose command continues it after a kill.
        """
        self._location.check_preconditions()
        value: dict[str, Any] = {
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "finished": False,
            "uids": [*uids],
            "rows": [*rows],
            "prompts": [*map(prompt_hash, prompts)],
            "slots": [[*slot] for slot in slots],
            "where": where,
            "token": uuid.uuid4().hex,
        }
        number = max([*self._numbers(_RECORD), *self._numbers(_WITNESS)], default=-1) + 1
        while not self._location.create_json(_file(str(number)), value):
            number += 1
        self._witness(str(number))
        return self.read(str(number))

    def close(self, deletion: Deletion) -> None:
        """Record that a deletion is finished, and erase its predicate, which may name what was deleted."""
        value = self._location.read_json(_file(deletion.name)) or {}
        self._location.write_json(_file(deletion.name), value | {"finished": True, "where": ""})
        self._witness(deletion.name)

    def uids(self) -> set[str]:
        """Return the uids of all deleted samples."""
        return {uid for deletion in self.all() for uid in deletion.uids}

    def rows(self) -> NDArray[np.int64]:
        """Return the row ids of all deleted samples in `samples`: [n]."""
        return np.array([row for deletion in self.all() for row in deletion.rows], np.int64)

    def prompts(self) -> set[str]:
        """Return the sha256 of the names of all deleted prompts, hex."""
        return {prompt for deletion in self.all() for prompt in deletion.prompts}

    def slots(self, split: str | None = None, domains: Collection[str] | None = None) -> list[PromptSlot]:
        """Return the positions of the deleted prompts of a split and some domains (None: of all), each once."""
        slots = {slot for deletion in self.all() for slot in deletion.slots}
        return sorted(
            slot for slot in slots if split in (None, slot.split) and (domains is None or slot.domain in domains)
        )

    def prompts_without_slot(self) -> int:
        """Return the number of deleted prompts without a recorded domain, which an earlier version deleted."""
        return sum(len(deletion.prompts) for deletion in self.all() if not deletion.slots)

    def raise_if_deleted(self, uids: Collection[str]) -> None:
        """Check that none of the samples was deleted. Raises MismatchError if one was."""
        for deletion in self.all():
            if gone := set(uids).intersection(deletion.uids):
                raise MismatchError(
                    f"{self._location.uri}: sample {min(gone)} was deleted ({deletion.began}, `mopd store delete`) and "
                    f"cannot come back under its uid ({len(gone)} such); leave it out, or write it to another store"
                )

    def raise_if_prompts_deleted(self, names: Collection[str]) -> None:
        """Check that none of the prompts was deleted. Raises MismatchError if one was."""
        for deletion in self.all():
            gone = set(deletion.prompts)
            for name in names if gone else ():
                if prompt_hash(name) in gone:
                    raise MismatchError(
                        f"{self._location.uri}: prompt {name!r:.80} was deleted ({deletion.began}, `mopd store "
                        "delete`); take it out of what is read, or write to another store"
                    )

    def raise_if_rows_deleted(self, sample_rows: ArrayLike) -> None:
        """Check that none of these rows of `samples` was deleted. Raises UnknownNameError if one was."""
        rows = np.asarray(sample_rows, np.int64)
        for deletion in self.all():
            gone = np.flatnonzero(np.isin(deletion.rows, rows))
            if len(gone):
                at = int(gone[0])
                raise UnknownNameError(
                    f"{self._location.uri}: row {deletion.rows[at]} of `samples`, sample {deletion.uids[at]}, was "
                    f"deleted ({deletion.began}, `mopd store delete`; {len(gone)} of the {len(np.unique(rows))} asked "
                    "for): a plan that holds it cannot be trained from any more; plan what is left in a stage of its "
                    "own"
                )

    def are_deleted(self, samples: Sequence[Sample]) -> NDArray[np.bool_]:
        """Return whether each sample or its prompt was deleted: [n] bool."""
        deletions = self.all()
        gone = {uid for deletion in deletions for uid in deletion.uids}
        hashes = {prompt for deletion in deletions for prompt in deletion.prompts}
        names = {sample.prompt_id for sample in samples} if hashes else ()
        by_name = {name: prompt_hash(name) in hashes for name in names}
        return np.array([one.uid in gone or by_name.get(one.prompt_id, False) for one in samples], np.bool_)

    def without_deleted(self, table: str, rows: pa.Table) -> pa.Table:
        """Return the rows that refer to no deleted sample, and in `events` and `evals` to no deleted prompt."""
        deletions = self.all()
        if not deletions:
            return rows
        deleted = {uid for deletion in deletions for uid in deletion.uids}
        if "uid" in rows.column_names:
            rows = rows.filter(pc.invert(pc.is_in(rows["uid"], value_set=pa.array(sorted(deleted), pa.string()))))
        hashes = {prompt for deletion in deletions for prompt in deletion.prompts}
        if table == "events":
            texts = zip(rows["event_id"].to_pylist(), rows["detail"].to_pylist(), strict=True)
            stays = [
                deleted.isdisjoint(uids_in(name, detail)) and not names_prompt(detail, hashes) for name, detail in texts
            ]
            rows = rows.filter(pa.array(stays, pa.bool_()))
        if table == "evals":
            stays = [prompt_hash(name) not in hashes for name in rows["prompt_id"].to_pylist()]
            rows = rows.filter(pa.array(stays, pa.bool_()))
        return rows

    def refuse_version(self, table: str, version: int) -> None:
        """Raise UnknownNameError for a missing version if deletions may be the reason: they unpin the versions they
        touch."""
        if deletions := self.all():
            raise UnknownNameError(
                f"{self._location.uri}: version {version} of {table!r} is gone; samples were deleted "
                f"({deletions[-1].began}, `mopd store delete`), which gave up the snapshots that held them: a plan of "
                "such a snapshot cannot be trained from any more; plan what is left in a stage of its own"
            ) from None

    def read(self, name: str) -> Deletion:
        """Read the deletion of a record. Raises DamagedError when it is damaged."""
        if name in self._known:
            return self._known[name]
        value = self._location.read_json(_file(name))
        if value is None:
            raise DamagedError(f"{self._location.of(_file(name))} is gone; restore it from a copy of the store")
        deletion = Deletion(
            name=name,
            began=str(value["began"]),
            finished=bool(value["finished"]),
            uids=tuple(value["uids"]),
            rows=tuple(value["rows"]),
            prompts=tuple(value["prompts"]),
            slots=tuple(PromptSlot(*slot) for slot in value.get("slots", [])),
            where=str(value.get("where", "")),
        )
        if deletion.finished:
            self._known[name] = deletion
        return deletion

    def check_witness(self, name: str) -> None:
        """Check the file that states that a record was written, if it exists. Raises DamagedError."""
        self._location.read_json(f"{FOLDER}/{name}.begun.json")

    def witnesses(self) -> list[str]:
        """Return the names of the records that are known to have been written."""
        return [str(number) for number in self._numbers(_WITNESS)]

    def _witness(self, name: str) -> None:
        file = f"{FOLDER}/{name}.begun.json"
        if not self._location.has(file):
            self._location.write_json(file, {"record": name})

    def _numbers(self, form: re.Pattern[str]) -> list[int]:
        matches = (form.fullmatch(name) for name in self._location.children(FOLDER))
        return sorted(int(match[1]) for match in matches if match)


def prompt_hash(name: str) -> str:
    """Return the sha256 of a prompt's name, by which its deletion is recorded."""
    return hashlib.sha256(name.encode()).hexdigest()


def uids_in(*texts: str) -> set[str]:
    """Return everything in some texts that has the form of a uid."""
    return {uid for text in texts for uid in UID.findall(text)}


def names_prompt(detail: str, hashes: Collection[str]) -> bool:
    """Whether an event's detail names a prompt, by the hash of its name, that is one of these."""
    if not hashes or '"prompt_id"' not in detail:
        return False
    name = json.loads(detail).get("prompt_id")
    return isinstance(name, str) and prompt_hash(name) in hashes


def _file(name: str) -> str:
    return f"{FOLDER}/{name}.json"
