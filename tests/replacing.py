"""Rows of a table replaced behind the library's back."""

from __future__ import annotations

import lance
import pyarrow as pa
from lance.fragment import RowIdSequence, write_fragments


def replace_rows(uri: str, rows: pa.Table) -> None:
    """Have a dataset hold other rows, with ids from 0 on."""
    dataset = lance.dataset(uri)
    [fresh] = write_fragments(rows, dataset, mode="append", data_storage_version=dataset.data_storage_version)
    fresh.row_id_meta = RowIdSequence(list(range(rows.num_rows))).to_inline_metadata()
    held = [fragment.fragment_id for fragment in dataset.get_fragments()]
    operation = lance.LanceOperation.Update(removed_fragment_ids=held, new_fragments=[fresh])
    lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
