"""Records of what was deleted from a store, by identity alone: it cannot be added again, and errors can name the
deletion.

    deletions/<n>.json      uids and row ids of the samples, sha256 of the prompts' names; nothing of their content

A record is written before the first row goes and is closed after the last: an open one is a deletion to be continued.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.store.place import Place

FOLDER = "deletions"


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
    """Row ids that the samples had in `samples`."""
    prompts: tuple[str, ...]
    """sha256 of the names of prompts, hex."""


class Deletions:
    """The deletions of one store."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: dict[str, Deletion] = {}
        """Finished ones, which do not change any more."""

    def all(self) -> list[Deletion]:
        """Every deletion, the oldest first."""
        files = [name for name in self._place.children(FOLDER) if name.endswith(".json")]
        return [self._read(name.removesuffix(".json")) for name in sorted(files, key=lambda name: (len(name), name))]

    def begin(self, uids: Iterable[str], rows: Iterable[int], prompts: Iterable[str]) -> Deletion:
        """Record what is about to be deleted; durable on return. prompts: names."""
        begun = Deletion(
            name=str(len(self.all())),
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            finished=False,
            uids=tuple(uids),
            rows=tuple(rows),
            prompts=tuple(map(prompt_hash, prompts)),
        )
        self._write(begun, finished=False)
        return begun

    def close(self, deletion: Deletion) -> None:
        """Record that a deletion is finished."""
        self._write(deletion, finished=True)

    def uids(self) -> set[str]:
        """uids of every sample that was deleted."""
        return {uid for deletion in self.all() for uid in deletion.uids}

    def rows(self) -> NDArray[np.int64]:
        """[n] row ids that deleted samples had in `samples`."""
        return np.array([row for deletion in self.all() for row in deletion.rows], np.int64)

    def refuse_uids(self, uids: Collection[str]) -> None:
        """Raise MismatchError when one of the samples was deleted."""
        for deletion in self.all():
            if gone := set(uids).intersection(deletion.uids):
                raise MismatchError(
                    f"{self._place.uri}: sample {min(gone)} was deleted ({deletion.began}, `mopd store delete`) and "
                    f"cannot come back under its uid ({len(gone)} such); leave it out, or write it to another store"
                )

    def refuse_prompts(self, names: Collection[str]) -> None:
        """Raise MismatchError when one of the prompts was deleted."""
        for deletion in self.all():
            gone = set(deletion.prompts)
            for name in names if gone else ():
                if prompt_hash(name) in gone:
                    raise MismatchError(
                        f"{self._place.uri}: prompt {name!r:.80} was deleted ({deletion.began}, `mopd store delete`); "
                        "take it out of what the job reads, or write to another store"
                    )

    def refuse_rows(self, sample_rows: ArrayLike) -> None:
        """Raise UnknownNameError when one of these rows of `samples` was deleted."""
        wanted = np.asarray(sample_rows, np.int64)
        for deletion in self.all():
            gone = np.flatnonzero(np.isin(deletion.rows, wanted))
            if len(gone):
                at = int(gone[0])
                raise UnknownNameError(
                    f"{self._place.uri}: row {deletion.rows[at]} of `samples`, sample {deletion.uids[at]}, was deleted "
                    f"({deletion.began}, `mopd store delete`; {len(gone)} of the {len(np.unique(wanted))} asked for): "
                    "a plan that holds it cannot be trained from any more; plan what is left in a stage of its own"
                )

    def without_deleted(self, table: str, rows: pa.Table) -> pa.Table:
        """Return the rows that refer to no deleted sample and, in `evals`, to no deleted prompt.

        Call it under the table's commit lock: a deletion waits for that lock once, after its record is durable.
        """
        deletions = self.all()
        if not deletions:
            return rows
        if "uid" in rows.column_names:
            deleted = pa.array([uid for deletion in deletions for uid in deletion.uids], pa.string())
            rows = rows.filter(pc.invert(pc.is_in(rows["uid"], value_set=deleted)))
        if table == "evals":
            hashes = {prompt for deletion in deletions for prompt in deletion.prompts}
            stays = [prompt_hash(name) not in hashes for name in rows["prompt_id"].to_pylist()]
            rows = rows.filter(pa.array(stays, pa.bool_()))
        return rows

    def refuse_version(self, table: str, version: int) -> None:
        """Raise UnknownNameError for a version that is gone, when deletions may be why: they unpin what they touch."""
        if deletions := self.all():
            raise UnknownNameError(
                f"{self._place.uri}: version {version} of {table!r} is gone; samples were deleted "
                f"({deletions[-1].began}, `mopd store delete`), which gave up the snapshots that held them: a plan of "
                "such a snapshot cannot be trained from any more; plan what is left in a stage of its own"
            ) from None

    def _read(self, name: str) -> Deletion:
        if name in self._known:
            return self._known[name]
        held = self._place.read_json(f"{FOLDER}/{name}.json") or {}
        found = Deletion(
            name=name,
            began=str(held["began"]),
            finished=bool(held["finished"]),
            uids=tuple(held["uids"]),
            rows=tuple(held["rows"]),
            prompts=tuple(held["prompts"]),
        )
        if found.finished:
            self._known[name] = found
        return found

    def _write(self, deletion: Deletion, *, finished: bool) -> None:
        value = asdict(deletion) | {"finished": finished}
        self._place.write_json(f"{FOLDER}/{value.pop('name')}.json", value)


def prompt_hash(name: str) -> str:
    """sha256 of a prompt's name, by which its deletion is recorded."""
    return hashlib.sha256(name.encode()).hexdigest()
