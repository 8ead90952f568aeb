"""References to payload: a row of this store's table, or a row of the same table in another store.

`payload_row` of a linked sample or signal holds the number of the other store above ROW_BITS, and the row id there
below. Number 0 is this store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import InputError

Rows = NDArray[np.int64]
ROW_BITS = 40
"""Bits of a row id: 10^12 rows a table."""
OWN = 0
"""Number of the store itself."""
_MOST = (1 << ROW_BITS) - 1


def reference(number: int, rows: ArrayLike) -> Rows:
    """Return references to rows of another store's table. Raises InputError for a row id that is too large."""
    ids = np.asarray(rows, np.int64)
    if len(ids) and int(ids.max()) > _MOST:
        raise InputError(
            f"row {int(ids.max())} of a table is beyond {_MOST}, the largest that another store can refer to; copy "
            "these samples with mopd store copy"
        )
    return (np.int64(number) << ROW_BITS) | ids


def other_uid(uid: str, store_uuid: str) -> str:
    """Return the uid here of a sample of another store whose uid another sample here has. The same function leads back.

    uid: 32 hex digits. store_uuid: id of the other store.
    """
    mask = hashlib.blake2b(store_uuid.encode(), digest_size=16, person=b"mopd-link-uid").hexdigest()
    return f"{int(uid, 16) ^ int(mask, 16):032x}"


def store_numbers(payload_rows: ArrayLike) -> Rows:
    """Return the number of the store that has each row: [n]."""
    return np.asarray(payload_rows, np.int64) >> ROW_BITS


def rows_there(payload_rows: ArrayLike) -> Rows:
    """Return the row id of each row in the store that has it: [n]."""
    return np.asarray(payload_rows, np.int64) & _MOST


def is_own(payload_rows: ArrayLike) -> NDArray[np.bool_]:
    """Return whether each row is in the store itself: [n]."""
    return np.asarray(store_numbers(payload_rows) == OWN)


def by_store(payload_rows: ArrayLike) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield (number of a store, indices of the rows that it has), by number."""
    numbers = store_numbers(payload_rows)
    for number in np.unique(numbers).tolist():
        yield number, np.flatnonzero(numbers == number)
