"""Compares the rows that a merge has copied, or a deletion has kept, before they are committed.

The files that a merge replaces are dropped a few commits later, and then only the copy is left. So each copied row of
payload is compared with the original, and each row of metadata with the checksum with which it was committed. A damaged
metadata file stays unmerged, and is named, until it is restored.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader
from lance.fragment import FragmentMetadata
from lance.optimize import RewriteResult

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.format.lance_errors import reading
from mopd_dataplane.store.format.row_checksums import row_crcs
from mopd_dataplane.tables import ROW_CRC

BYTES = 16 << 20
"""Approximate size of the rows that are compared at once, in bytes."""
ROWS = 1 << 16


def check_copies(dataset: lance.LanceDataset, done: Iterable[RewriteResult]) -> None:
    """Check that the new files of each merge hold the rows of its old ones, as committed. Raises DamagedError if
    not."""
    for result in done:
        merged = {fragment.id for fragment in result.original_fragments}  # type: ignore[attr-defined]
        old = [fragment for fragment in dataset.get_fragments() if fragment.fragment_id in merged]
        at_once = rows_at_once(result.new_fragments)
        sums = [ROW_CRC.name] if ROW_CRC.name in dataset.schema.names else None
        with reading(dataset.uri):
            originals = dataset.scanner(columns=sums, fragments=old, batch_size=at_once, scan_in_order=True)
            check_kept(dataset, originals.to_batches(), result.new_fragments)


def check_kept(
    dataset: lance.LanceDataset, batches: Iterable[pa.RecordBatch], fresh: Sequence[FragmentMetadata]
) -> None:
    """Check that new files hold these rows, metadata as committed. Raises DamagedError if not."""
    at_once = rows_at_once(fresh)
    with reading(dataset.uri):
        copies = _in_parts(_copies(dataset, fresh, at_once), at_once)
        for one, other in zip_longest(_in_parts(batches, at_once), copies):
            _compare(dataset.uri, one, other)


def rows_at_once(fragments: Sequence[FragmentMetadata]) -> int:
    """Return the number of rows of these files that take about BYTES."""
    size = sum(data.file_size_bytes or 0 for fragment in fragments for data in fragment.files)
    return max(1, min(ROWS, BYTES * sum(fragment.physical_rows for fragment in fragments) // max(size, 1)))


def _compare(where: str, old: pa.Table | None, new: pa.Table | None) -> None:
    if old is None or new is None or old.num_rows != new.num_rows:
        raise DamagedError(f"{where}: a copy has lost or doubled rows; nothing was changed, run it again")
    crcs = row_crcs(new)
    if ROW_CRC.name not in new.column_names:
        same = bool((crcs == row_crcs(old.select(new.column_names))).all())
    else:
        same = new[ROW_CRC.name].equals(old[ROW_CRC.name])
        for row in np.flatnonzero(crcs != new[ROW_CRC.name].to_numpy()).tolist():
            raise DamagedError(
                f"{where}: row {new.slice(row, 1).to_pylist()[0]!r:.120} is not as it was committed; its file is not "
                "merged: run `mopd store verify`, and restore what it names from a copy"
            )
    if not same:
        raise DamagedError(f"{where}: rows were copied wrong; nothing was changed, run it again")


def _copies(
    dataset: lance.LanceDataset, fragments: Iterable[FragmentMetadata], at_once: int
) -> Iterator[pa.RecordBatch]:
    """Read the rows of files that no version names yet."""
    options = dataset.initial_storage_options
    for fragment in fragments:
        readers = [LanceFileReader(f"{dataset.uri}/data/{data.path}", options) for data in fragment.files]
        for start in range(0, fragment.physical_rows, at_once):
            count = min(at_once, fragment.physical_rows - start)
            parts = [reader.read_range(start, count).to_table() for reader in readers]
            columns = {name: part[name] for part in parts for name in part.column_names}
            rows = pa.table({name: columns[name] for name in dataset.schema.names if name in columns})
            yield from rows.to_batches()


def _in_parts(batches: Iterable[pa.RecordBatch], at_once: int) -> Iterator[pa.Table]:
    """Regroup rows into parts of `at_once` rows, the last one smaller."""
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        pending.append(batch)
        while (count := sum(part.num_rows for part in pending)) >= at_once:
            rows = pa.Table.from_batches(pending)
            yield rows.slice(0, at_once)
            pending = rows.slice(at_once).to_batches() if count > at_once else []
    if pending:
        yield pa.Table.from_batches(pending)
