"""Finds the samples with a run of token ids, in one pass over the token files."""

from collections.abc import Iterator, Sequence

import lance
import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.store.format.arrow_rows import tokens_crc
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.read.list_files import ElementRange, ListFiles
from mopd_dataplane.store.read.row_reader import checked_columns, take_rows

WINDOW = 4 << 20
"""Number of tokens read at a time."""


def find_run(tokens: NDArray[np.int32], run: Sequence[int]) -> NDArray[np.int64]:
    """Return the indices at which the run of ids starts.

    >>> find_run(np.array([1, 2, 1, 2, 3], np.int32), [1, 2]).tolist()
    [0, 2]
    """
    places = np.flatnonzero(tokens[: max(0, len(tokens) - len(run) + 1)] == run[0])
    for offset, token in enumerate(run[1:], 1):
        places = places[tokens[places + offset] == token]
    return places


def scan_tokens(
    samples: lance.LanceDataset,
    tokens: lance.LanceDataset,
    sample_rows: NDArray[np.int64],
    payload_rows: NDArray[np.int64],
    skipped: NDArray[np.integer],
    run: Sequence[int],
    *,
    window: int = WINDOW,
) -> Iterator[tuple[NDArray[np.int64], int]] | None:
    """Yield the indices of the samples whose tokens contain the run, range by range, and the number searched so far.

    Returns None when files must be read through Lance. sample_rows, payload_rows: [n] row of each sample in the two
    tables. skipped: [n] number of tokens at its start, such as the prompt, that do not count. A sample in two ranges
    may be yielded twice. Raises DamagedError for a file that ends early.
    """
    offsets = row_ids(tokens).offsets(payload_rows)
    order = np.argsort(offsets, kind="stable")
    lying = offsets[order]
    ends = np.cumsum([fragment.count_rows() for fragment in tokens.get_fragments()])
    firsts = order[np.unique(np.searchsorted(ends, lying, side="right"), return_index=True)[1]]
    crcs = take_rows(samples, sample_rows[firsts], ["payload_crc"])["payload_crc"].to_numpy()
    files = ListFiles(tokens, checked_columns(tokens), tokens_crc)
    ranges = files.ranges("tokens", offsets[firsts], crcs, window, len(run) - 1)
    return None if ranges is None else _found(ranges, order, lying, skipped[order], run)


def _found(
    ranges: Iterator[ElementRange],
    order: NDArray[np.int64],
    lying: NDArray[np.int64],
    skipped: NDArray[np.integer],
    run: Sequence[int],
) -> Iterator[tuple[NDArray[np.int64], int]]:
    for part in ranges:
        places = find_run(part.elements, run) + part.base
        rows = np.searchsorted(part.starts, places, side="right") - 1
        at = np.minimum(np.searchsorted(lying, rows + part.first_row), len(lying) - 1)
        is_match = lying[at] == rows + part.first_row
        is_match &= places + len(run) <= part.starts[rows] + part.lengths[rows]
        is_match &= places - part.starts[rows] >= skipped[at]
        passed = part.first_row + int(np.searchsorted(part.starts, part.base + len(part.elements)))
        yield order[np.unique(at[is_match])], int(np.searchsorted(lying, passed))
