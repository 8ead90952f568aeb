"""Writes payload before metadata, once per payload, even if an earlier commit died before its metadata row."""

from collections.abc import Callable, Sequence

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.store.commit.table import Table


def place_payload(
    table: Table,
    uids: Sequence[str],
    crcs_of: Callable[[list[int]], Sequence[int]],
    make_rows: Callable[[list[int]], pa.Table],
    crcs_at: Callable[[lance.LanceDataset, list[int]], list[int]],
    *,
    adopt: bool = True,
) -> tuple[NDArray[np.int64], lance.LanceDataset]:
    """Write payloads to `table`, reusing rows that an interrupted commit left.

    Returns the row id of each payload, [n], and a version that has them all. A row with equal uid and checksum, to
    which no metadata row points, is reused; the rest is appended. `crcs_of` returns the checksums at some indices of
    the batch, `make_rows` builds their rows; `crcs_at` computes the checksums of some rows of the dataset. Without
    `adopt` the table is known to hold no unused row.
    """
    places, dataset = np.full(len(uids), -1, np.int64), table.open()
    if adopt:
        places, dataset = table.find(pa.table({"uid": pa.array(uids, pa.string())}))
    left = np.flatnonzero(places >= 0)
    if len(left):
        equal = np.array(crcs_at(dataset, places[left].tolist())) == np.array(crcs_of(left.tolist()))
        places[left[~equal]] = -1
    fresh = np.flatnonzero(places < 0)
    if len(fresh):
        places[fresh], dataset = table.append(make_rows(fresh.tolist()))
    return places, dataset
