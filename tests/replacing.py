"""Rows of a table replaced behind the library's back."""

from __future__ import annotations

import lance
import pyarrow as pa
from lance.fragment import RowIdSequence, write_fragments

from mopd_dataplane.store.format.row_checksums import with_row_crcs
from mopd_dataplane.tables import ROW_CRC


def replace_rows(uri: str, rows: pa.Table) -> None:
    """Have a dataset hold other rows, with ids from 0 on; metadata with sums that are right."""
    dataset = lance.dataset(uri)
    if ROW_CRC.name in rows.column_names:
        rows = with_row_crcs(rows).cast(rows.schema)
    [fresh] = write_fragments(rows, dataset, mode="append", data_storage_version=dataset.data_storage_version)
    fresh.row_id_meta = RowIdSequence(list(range(rows.num_rows))).to_inline_metadata()
    fragment_ids = [fragment.fragment_id for fragment in dataset.get_fragments()]
    operation = lance.LanceOperation.Update(removed_fragment_ids=fragment_ids, new_fragments=[fresh])
    lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
