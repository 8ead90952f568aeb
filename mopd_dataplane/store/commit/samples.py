"""Commits samples: payload first, metadata row last, exactly once by uid, durable on return.

    look up        uids that `samples` has are done
    place payload  rows of `tokens`: reuse those that an interrupted commit left, append the rest, sync
    insert         rows of `samples`: the commit record, compare-and-swap, sync

After a kill between any two of these, the same call ends with each sample visible once.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.memory import freed_memory_kept
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.records import Sample
from mopd_dataplane.store.commit.payload import place_payload
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format.arrow_rows import check_sample, placed_rows, sample_crc, sample_rows, token_rows
from mopd_dataplane.store.format.sample_values import other_content
from mopd_dataplane.store.read.row_reader import token_crcs

LARGE = 4 << 20
"""Bytes of tokens above which a commit keeps the memory that Lance frees, for the next one."""
ROWS_S = 600.0
"""Longest time for building the metadata rows of one commit, with their checksums, in seconds."""


@dataclass(frozen=True)
class CommitReceipt:
    """Result of a commit.

    Example: of three samples one was there before: rows=[7, 3, 8], inserted=2, versions={"tokens": 5, "samples": 5}.
    """

    rows: NDArray[np.int64]
    """[n] row id in `samples` of every sample, also of those that existed before; -1 for a deleted one."""
    inserted: int
    """Number of samples that this call made visible."""
    versions: dict[str, int]
    """Versions of `tokens` and `samples` that hold the samples."""
    dropped: tuple[str, ...] = ()
    """uids of samples whose content was dropped, because the uid names other content or was deleted."""


def commit_samples(
    samples: Table, tokens: Table, batch: Sequence[Sample], *, keep_first: bool = False
) -> CommitReceipt:
    """Make samples visible and durable; see Store.commit_samples."""
    for sample in batch:
        check_sample(sample)
    uids = [sample.uid for sample in batch]
    size = sum(sample.tokens.nbytes for sample in batch)
    memory = freed_memory_kept(return_it=False) if size >= LARGE else nullcontext()
    with memory, ThreadPoolExecutor(1, "metadata") as beside:  # overlaps waiting for Lance and the disk
        matches, visible = samples.find(pa.table({"uid": pa.array(uids, pa.string())}))
        absent = np.flatnonzero(matches < 0).tolist()
        payload = token_rows([batch[i] for i in absent])
        # Not before: two threads that both make arrays wait for each other longer than they work.
        rows = beside.submit(sample_rows, batch)

        def crcs() -> list[int]:
            return list(rows.result(ROWS_S)["payload_crc"].to_pylist())

        dropped = _dropped(visible, uids, crcs, (matches >= 0).tolist(), keep_first)
        payload_rows = np.full(len(batch), -1, np.int64)
        payload_rows[absent], with_payload = place_payload(
            tokens,
            [batch[i].uid for i in absent],
            lambda places: [sample_crc(batch[absent[i]]) for i in places],
            lambda places: payload if len(places) == len(absent) else payload.take(places),
            token_crcs,
            adopt=tokens.open().count_rows() != visible.count_rows(),
        )
        tokens.make_durable(with_payload)
    fault_point("commit.payload.durable")
    done = samples.insert(placed_rows(rows.result(ROWS_S), payload_rows))
    samples.make_durable(done.dataset)
    fault_point("commit.metadata.durable")
    versions = {"tokens": with_payload.version, "samples": done.dataset.version}
    overtaken = ((matches < 0) & ~done.is_new).tolist()  # another writer was first, since the look-up
    dropped += [uid for uid in _dropped(done.dataset, uids, crcs, overtaken, keep_first) if uid not in dropped]
    return CommitReceipt(rows=done.rows, inserted=int(done.is_new.sum()), versions=versions, dropped=tuple(dropped))


def commit_undeleted(
    samples: Table, tokens: Table, batch: Sequence[Sample], deleted: NDArray[np.bool_], *, keep_first: bool
) -> CommitReceipt:
    """Commit the samples that were not deleted. The receipt has row -1 for the others. deleted: [n] bool."""
    undeleted = [sample for sample, is_deleted in zip(batch, deleted, strict=True) if not is_deleted]
    receipt = commit_samples(samples, tokens, undeleted, keep_first=keep_first)
    if len(undeleted) == len(batch):
        return receipt
    rows = np.full(len(batch), -1, np.int64)
    rows[~deleted] = receipt.rows
    gone = tuple(sample.uid for sample, is_deleted in zip(batch, deleted, strict=True) if is_deleted)
    return replace(receipt, rows=rows, dropped=receipt.dropped + gone)


def _dropped(
    dataset: lance.LanceDataset,
    uids: Sequence[str],
    crcs: Callable[[], Sequence[int]],
    there: list[bool],
    keep_first: bool,
) -> list[str]:
    """Return the uids that name other content already. Raises MismatchError for them, unless `keep_first`."""
    if not any(there) and len(set(uids)) == len(uids):
        return []
    lost = list(dict.fromkeys(uids[row] for row in other_content(dataset, uids, crcs())))
    if lost and not keep_first:
        raise MismatchError(
            f"sample {lost[0]} is in the store, or in this batch, with other tokens, log-probs or masks ({len(lost)} "
            "such); a uid names one content for ever: give the new sample a uid of its own (records.sample_uid)"
        )
    return lost
