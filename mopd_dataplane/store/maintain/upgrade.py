"""Copies tables of a store of format 1 into one of format 2. Only this file knows the layout of format 1 on disk.

In format 1 a row's number was its position in the table, and tables referred to each other's rows by it. Rows are
copied in that order into tables with stable row ids, so a row's id is the number it had, and no reference changes. A
pinned version keeps its number too: where the copy needs fewer commits, empty ones are added. So plans, checkpoints and
the token log, which name rows and versions, stay valid unchanged.

Rows of metadata, tokens and listed signals are copied; files of hidden states are hard-linked where possible, since
they do not change. Every step first looks at what is there: after a kill the same call continues, and compares what the
target has with the source, byte by byte.
"""

import json
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import duplicate_file, file_digest
from mopd_dataplane.errors import DamagedError, InputError, MismatchError, UnknownNameError
from mopd_dataplane.records import FORMAT_1_NAMES, Snapshot
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format.dataset_format import blob_columns
from mopd_dataplane.store.format.lance_errors import reading, writing
from mopd_dataplane.store.format.row_checksums import with_row_crcs
from mopd_dataplane.store.location import MARK, UNFINISHED, StoreLocation
from mopd_dataplane.store.read import snapshot as snapshots
from mopd_dataplane.tables import ROW_CRC, TABLES, TableSpec

OLD_FORMAT = 1
PROGRESS = UNFINISHED[1]
"""File that names the source of an unfinished target; removed when the target is complete."""
_NAMES = {new: old for old, new in FORMAT_1_NAMES.items()} | {"topk_source": "support"}
"""Column of format 2 -> its name in format 1, in the tables that used the old name."""
_ROWS, _BYTES = 1 << 16, 64 << 20
"""Bounds of one commit of copied rows: rows and bytes."""


def open_source(folder: Path) -> dict[str, int]:
    """Return the tables of a store of format 1 and their newest versions.

    Raises UnknownNameError when there is no store, MismatchError when it has another format, DamagedError for a mark
    that cannot be read.
    """
    try:
        mark = json.loads((folder / MARK).read_text())
        version = int(mark["format_version"])
    except FileNotFoundError:
        raise UnknownNameError(f"no store at {folder} (it has no {MARK})") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedError(f"{folder / MARK}: {error}; restore it from a copy") from None
    if version != OLD_FORMAT:
        raise MismatchError(f"{folder} has format version {version}; only one of format {OLD_FORMAT} is upgraded")
    signals = sorted(path for path in (folder / "signals").glob("*/*") if path.is_dir())
    queues = sorted(path for path in (folder / "queues").glob("*") if path.is_dir())
    names = [name for name in TABLES if (folder / name).is_dir()]
    names += [path.relative_to(folder).as_posix() for path in (*signals, *queues)]
    return {name: lance.dataset(str(folder / name)).version for name in names}


def old_snapshots(folder: Path) -> dict[str, dict[str, int]]:
    """Return the versions of each table by tag."""
    files = sorted((folder / "snapshots").glob("*.json"))
    return {file.stem: json.loads(file.read_text())["versions"] for file in files}


def upgrade_tables(source: Path, target: StoreLocation, versions: Mapping[str, int]) -> Iterator[str]:
    """Copy every table, its pinned versions, and the snapshots, durable at the end; yields the name of each finished
    table."""
    pins = old_snapshots(source)
    for name in [*TABLES, *(name for name in versions if name not in TABLES)]:
        table = Table(target, name)
        table.create()
        if name in versions:
            pinned = sorted({pin[name] for pin in pins.values() if name in pin})
            _copy_table(source / name, table, versions[name], pinned)
            for version in pinned:
                if table.barrier is not None:
                    table.barrier.sync_version(table.open(version))
        table.make_durable(table.open())
        yield name
    tables = {name: Table(target, name) for name in versions}
    for tag, pin in pins.items():
        snapshots.pin(target, tables, tag, Snapshot(uri=target.uri, versions=pin))
    fault_point("upgrade.pinned")


def _copy_table(source: Path, table: Table, newest: int, pinned: list[int]) -> None:
    old = lance.dataset(str(source), version=newest)
    copy, compare = (_link_files, _relink) if blob_columns(table.spec) else (_copy_rows, _require_same_rows)
    with reading(old.uri), writing(table.uri):
        compare(old, table)
        for version in [*(v for v in pinned if v < newest), newest]:
            at = old.checkout_version(version)
            copy(at, table, version - 1 if version in pinned else None)
            while version in pinned and (target := lance.dataset(table.uri)).version < version:
                target.update_config({"mopd:upgraded": str(target.version)})
            fault_point("upgrade.table")


def _require_same_rows(old: lance.LanceDataset, table: Table) -> None:
    """Raise MismatchError unless the rows that a killed call has copied are those of the source.

    Rows of metadata are compared by their checksums, which the verification at the end compares with the rows.
    """
    target = lance.dataset(table.uri)
    columns = table.spec.schema.names if table.spec.heavy else [ROW_CRC.name]
    have, at_once = target.count_rows(), _rows_at_once(old)
    for first in range(0, have, at_once):
        limit = min(at_once, have - first)
        rows = _converted(old.to_table(offset=first, limit=limit), table.spec).select(columns)
        if not rows.equals(target.to_table(columns=columns, offset=first, limit=limit)):
            raise MismatchError(
                f"{old.uri}: rows {first} to {first + limit - 1} of version {old.version} differ from those in "
                f"{table.uri}, the copy that an earlier call began; delete the copy and upgrade again"
            )


def _rows_at_once(old: lance.LanceDataset) -> int:
    """Rows of one read or commit."""
    size = sum(data.file_size_bytes or 0 for part in old.get_fragments() for data in part.data_files())
    return max(1, min(_ROWS, _BYTES * old.count_rows() // max(size, 1)))


def _copy_rows(old: lance.LanceDataset, table: Table, last: int | None) -> None:
    """Append the missing rows. last: the version by which all but the last commit must be done."""
    target = lance.dataset(table.uri)
    have, total = target.count_rows(), old.count_rows()
    if have >= total:
        return
    at_once = _rows_at_once(old)
    commits = -(-(total - have) // at_once)
    if last is not None:
        commits = min(commits, last - target.version + 1)
    cuts = np.linspace(have, total, max(commits, 1) + 1).astype(int).tolist()
    for first, end in pairwise(cuts):
        rows = _converted(old.to_table(offset=first, limit=end - first), table.spec)
        target = _append(target, write_fragments(rows, target, mode="append", data_storage_version=table.spec.storage))
        fault_point("upgrade.rows")


def _append(target: lance.LanceDataset, fragments: list[FragmentMetadata]) -> lance.LanceDataset:
    return lance.LanceDataset.commit(target, lance.LanceOperation.Append(fragments), read_version=target.version)


def _converted(rows: pa.Table, spec: TableSpec) -> pa.Table:
    """Convert rows to the names of format 2, with their checksums; new columns are null, or empty text."""
    columns = {}
    for field in spec.schema:
        old_name = field.name if field.name in rows.column_names else _NAMES.get(field.name, field.name)
        if old_name in rows.column_names:
            columns[field.name] = rows[old_name].cast(field.type)
        else:
            columns[field.name] = pa.repeat(pa.scalar(None if field.nullable else "", field.type), rows.num_rows)
    table = pa.table(columns, schema=spec.schema)
    return table if spec.heavy else with_row_crcs(table)


def _link_files(old: lance.LanceDataset, table: Table, last: int | None) -> None:
    """Make a table of hidden states name the files of the old one: new ones are appended, freed ones replaced."""
    target, root = lance.dataset(table.uri), Path(table.uri)
    theirs, ours = old.get_fragments(), target.get_fragments()
    if [field.id() for field in old.lance_schema.fields()] != [field.id() for field in target.lance_schema.fields()]:
        raise InputError(
            f"{old.uri}: the ids of its columns are not those of format 2, so its files cannot be used; score it again"
        )
    replaced = {index for index, (a, b) in enumerate(zip(theirs, ours, strict=False)) if _files(a) != _files(b)}
    if fresh := theirs[len(ours) :]:
        for fragment in fresh:
            _link(old, root, fragment)
        target = _append(target, [_described(fragment) for fragment in fresh])
        fault_point("upgrade.linked")
    if replaced:
        fragments = [fragment.metadata for fragment in target.get_fragments()]
        for index in replaced:
            _link(old, root, theirs[index])
            freed = _described(theirs[index])
            freed.id, freed.row_id_meta = fragments[index].id, fragments[index].row_id_meta
            fragments[index] = freed
        operation = lance.LanceOperation.Merge(fragments, target.lance_schema)
        lance.LanceDataset.commit(target, operation, read_version=target.version)


def _relink(old: lance.LanceDataset, table: Table) -> None:
    """Have every file of hidden states that a killed call has linked be the one that the source has now."""
    data = Path(table.uri) / "data"
    for file in [path for path in data.rglob("*") if path.is_file()]:
        if (source := Path(old.uri) / "data" / file.relative_to(data)).is_file():
            link_file(source, file)


def _files(fragment: lance.LanceFragment) -> list[str]:
    return [data_file.path for data_file in fragment.data_files()]


def _described(fragment: lance.LanceFragment) -> FragmentMetadata:
    return FragmentMetadata.from_json(json.dumps({**fragment.metadata.to_json(), "row_id_meta": None}))


def _link(old: lance.LanceDataset, root: Path, fragment: lance.LanceFragment) -> None:
    """Link the data file of a fragment, and the files beside it with its blobs."""
    for name in _files(fragment):
        path = Path(old.uri) / "data" / name
        beside = path.with_suffix("")
        for file in [path, *(beside.iterdir() if beside.is_dir() else ())]:
            link_file(file, root / "data" / file.relative_to(path.parent))


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the disk cannot. A target that is another file is replaced."""
    if target.exists():
        if target.samefile(source) or _same_content(source, target):
            return
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        duplicate_file(source, target)


def _same_content(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and file_digest(one) == file_digest(other)
