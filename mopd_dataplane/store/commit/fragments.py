"""Merges small files of a table, so that it has few files however many commits there are. Rows keep their ids.

Tiers by size: when more than COUNT files lie between one LIMIT and the next, they and all smaller ones become one. Each
byte is copied about once a tier, so commit time stays flat; about a hundred files lie beside the gigabyte ones.
"""

import lance
from lance.optimize import Compaction, CompactionOptions

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.store.commit.durability import Barrier
from mopd_dataplane.store.commit.merge_check import check_copies
from mopd_dataplane.store.format.lance_errors import reading

MIB = 1 << 20
TIERS = ((MIB // 8, 32), (4 * MIB, 32), (64 * MIB, 32), (1024 * MIB, 32))
"""(limit in bytes, largest number of files of that size)"""
PAGE = MIB
"""Average size in bytes below which merged files are written anew instead of copied page by page."""


def merge_limit(dataset: lance.LanceDataset) -> int:
    """Return the size limit in bytes up to which files should be merged; 0 when no tier has too many."""
    fragments = dataset.get_fragments()
    if len(fragments) <= min(count for _, count in TIERS):
        return 0
    sizes = _sizes(fragments).values()
    least = 0
    for limit, count in TIERS:
        if sum(least <= size < limit for size in sizes) > count:
            return limit
        least = limit
    return 0


def merge_small(dataset: lance.LanceDataset, limit: int, barrier: Barrier | None) -> int:
    """Merge neighbouring files below `limit` bytes. Returns how many were replaced; the handle moves to the new
    version.

    Raises OSError when another commit came first, DamagedError as check_copies does; nothing has changed then.
    """
    sizes = _sizes(dataset.get_fragments())
    large = [number for number, size in sizes.items() if size >= limit]
    small = [size for number, size in sizes.items() if number not in large]
    options: CompactionOptions = {
        "target_rows_per_fragment": 1 << 31,
        # A copy keeps the pages: good for large ones, many times the data for pages of a few rows.
        "compaction_mode": "reencode" if sum(small) < PAGE * len(small) else "try_binary_copy",
        "excluded_fragment_ids": large,
    }
    with reading(dataset.uri):
        done = [task.execute(dataset) for task in Compaction.plan(dataset, options).tasks]
    if not done:
        return 0
    if barrier is not None:
        barrier.sync_data(fragment for result in done for fragment in result.new_fragments)
    fault_point("merge.written")
    check_copies(dataset, done)
    Compaction.commit(dataset, done)
    fault_point("merge.committed")
    return sum(result.metrics.fragments_removed for result in done)


def _sizes(fragments: list[lance.LanceFragment]) -> dict[int, float]:
    """Return the bytes of each fragment, estimated from its rows if Lance has not recorded them."""
    sizes = {f.fragment_id: sum(d.file_size_bytes or 0 for d in f.data_files()) for f in fragments}
    rows = {f.fragment_id: f.metadata.physical_rows for f in fragments}
    measured = sum(rows[number] for number, size in sizes.items() if size)
    per_row = sum(sizes.values()) / measured if measured else 0.0
    return {number: size or rows[number] * per_row for number, size in sizes.items()}
