"""Lance's `take` of a list column alone: the baseline of bench/peers.py for a store's reader."""

from __future__ import annotations

from collections.abc import Sequence

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

ROWS_PER_FILE = 512


def write_records(uri: str, offsets: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
    """A dataset of one column, `data`: record i is records[offsets[i]:offsets[i + 1]]."""
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.asarray(records)))
    rows = pa.table({"data": column})
    lance.write_dataset(rows, uri, data_storage_version="2.0", max_rows_per_file=ROWS_PER_FILE)


class BareTake:
    """Records of a dataset by number; opened at first use, so that it can be handed to another process."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._dataset: lance.LanceDataset | None = None

    def __call__(self, rows: Sequence[int]) -> NDArray[np.uint8]:
        """Bytes of the records, one after the other."""
        if self._dataset is None:
            self._dataset = lance.dataset(self._uri)
        column = self._dataset.take(list(rows), columns=["data"])["data"].combine_chunks()
        values: NDArray[np.uint8] = column.flatten().to_numpy()
        return values
