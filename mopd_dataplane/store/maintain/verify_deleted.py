"""The audit of deletions: checks that every record exists and is finished, and that no deleted name is left."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.compute as pc

from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.deletion_records import FOLDER, UID, Deletions, names_prompt, prompt_hash, uids_in
from mopd_dataplane.store.maintain.verify_files import JOB_FILES
from mopd_dataplane.store.maintain.verify_report import Finding
from mopd_dataplane.store.queue.queue_log import LOGS
from mopd_dataplane.store.read.decode import KEPT
from mopd_dataplane.tables import TABLES

_NOT_SEARCHED = {*TABLES, "signals", "queues", LOGS, "acknowledged", "locks", FOLDER}
"""Folders that are not searched: datasets, which are searched row by row (contents of old versions leave the disk with
them), numbers of versions, and the records."""
_FOLDERS = ("wal", "checkpoints", "policies", "discriminators", "snapshots", KEPT)
_SINGLE_FILES = (*JOB_FILES, "report.html")
"""Folders and files of an object store that are searched."""
_TENSORS = ".safetensors"
_CHUNK, _OVERLAP = 8 << 20, 4096
"""Bytes of a file that are searched at once, and bytes of the part before that are searched again."""
_REPAIR = "`mopd store repair` removes the row"
_HEX = re.compile(UID.pattern.encode())
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"')


class Deleted:
    """uids of samples and hashes of prompts of finished deletions, of which nothing may be left."""

    def __init__(self, deletions: Deletions) -> None:
        finished = [deletion for deletion in deletions.all() if deletion.finished]
        going = deletions.unfinished()
        self.uids = {u for deletion in finished for u in deletion.uids} - {u for one in going for u in one.uids}
        self.prompts = {p for deletion in finished for p in deletion.prompts} - {
            p for one in going for p in one.prompts
        }

    def __bool__(self) -> bool:
        return bool(self.uids or self.prompts)


def audit_records(deletions: Deletions) -> Iterator[Finding]:
    """Check that no record was lost, and that no deletion was left unfinished."""
    for name in deletions.lost():
        problem = (
            "the record of a deletion is gone: what it names can come back; restore it from a copy of the store, or "
            "delete the same samples again"
        )
        yield Finding(f"{FOLDER}/{name}.json", -1, "", problem)
    for name in deletions.witnesses():
        deletions.check_witness(name)
    for deletion in deletions.unfinished():
        how = f"--where {deletion.where!r}" if deletion.where else ""
        how = f"`mopd store delete` with {how} continues it" if how else "`mopd store repair` finishes it"
        problem = f"deletion {deletion.name} of {deletion.began} is not finished: {how}"
        yield Finding(FOLDER, -1, "", problem)


def audit_rows_of_deleted(name: str, dataset: lance.LanceDataset, deleted: Deleted) -> Iterator[Finding]:
    """Check that no row of a table names a deleted sample or prompt."""
    columns = [column for column in ("uid", "prompt_id", "event_id", "detail") if column in dataset.schema.names]
    if not deleted or not columns:
        return
    rows = dataset.to_table(columns=columns, with_row_id=True)
    if "uid" in columns and deleted.uids:
        for row in rows.filter(pc.is_in(rows["uid"], value_set=pa.array(sorted(deleted.uids)))).to_pylist():
            yield Finding(name, row["_rowid"], row["uid"], f"names a deleted sample; {_REPAIR}")
    if name == "events":
        for row in rows.to_pylist():
            for uid in sorted(deleted.uids & uids_in(row["event_id"], row["detail"])):
                yield Finding(name, row["_rowid"], uid, f"names a deleted sample; {_REPAIR}")
            if names_prompt(row["detail"], deleted.prompts):
                yield Finding(name, row["_rowid"], row["event_id"], f"names a deleted prompt; {_REPAIR}")
    if "prompt_id" in columns and deleted.prompts:
        gone = [text for text in rows["prompt_id"].unique().to_pylist() if prompt_hash(text) in deleted.prompts]
        for row in rows.filter(pc.is_in(rows["prompt_id"], value_set=pa.array(gone, pa.string()))).to_pylist():
            key = row.get("uid", row["prompt_id"])
            yield Finding(name, row["_rowid"], key, f"names the deleted prompt {row['prompt_id']!r:.80}; {_REPAIR}")


def audit_files_of_deleted(location: StoreLocation, deleted: Deleted) -> Iterator[Finding]:
    """Check that no file beside the tables names a deleted sample or, as a quoted text, a deleted prompt."""
    for name in _files(location) if deleted else ():
        for uid in sorted(_named(location, name, deleted)):
            problem = "names a deleted sample or prompt; delete the file, or end what writes it and delete again"
            yield Finding(name, -1, uid, problem)


def _files(location: StoreLocation) -> Iterator[str]:
    if location.files is not None:
        names = [name for folder in _FOLDERS for name in location.files.under(folder)]
        names += [name for name in _SINGLE_FILES if location.files.has(name)]
    else:
        root = location.local(".")
        entries = [root / name for name in location.children(".") if name not in _NOT_SEARCHED]
        inside = (sorted(entry.rglob("*")) if entry.is_dir() else [entry] for entry in entries)
        names = [file.relative_to(root).as_posix() for files in inside for file in files if file.is_file()]
    yield from (name for name in names if Path(name).suffix != _TENSORS)


def _named(location: StoreLocation, name: str, deleted: Deleted) -> set[str]:
    """Return the uids of deleted samples, and hashes of deleted prompts, that a file names."""
    uids: set[str] = set()
    for chunk in _chunks(location, name):
        uids |= deleted.uids.intersection(match.decode() for match in _HEX.findall(chunk))
        for quoted in set(_QUOTED.findall(chunk)) if deleted.prompts else ():
            with suppress(ValueError):
                if (digest := prompt_hash(str(json.loads(quoted)))) in deleted.prompts:
                    uids.add(digest)
    return uids


def _chunks(location: StoreLocation, name: str) -> Iterator[bytes]:
    if location.files is not None:
        yield location.files.read(name) or b""
        return
    with location.local(name).open("rb") as file:
        before = b""
        while part := file.read(_CHUNK):
            yield before + part
            before = part[-_OVERLAP:]
