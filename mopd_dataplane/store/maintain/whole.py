"""Check of every table before a command that writes: missing or truncated files are refused before any change."""

from collections.abc import Iterator, Mapping

import lance

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.maintain.verify_rows import audit_rows


def require_whole(tables: Mapping[str, Table], *, rows: bool = False) -> None:
    """Check that each table opens, with the acknowledged manifest and every data file it names. Raises DamagedError if
    not.

    rows: rows of metadata are read too, with their checksums. Payload is checked only by `mopd store verify`.
    """
    for table in tables.values():
        dataset = table.open()
        wrong = audit_rows(table.name, dataset, table.spec.key) if rows and not table.spec.heavy else ()
        for problem in (table.manifest_damage(), *_files_missing(dataset), *(finding.problem for finding in wrong)):
            if problem:
                raise DamagedError(
                    f"{table.uri}: {problem}; nothing was changed: run `mopd store verify`, and restore what it names "
                    "from a copy"
                )


def file_sizes(dataset: lance.LanceDataset) -> dict[str, int]:
    """Return the bytes of every file of a dataset, of all versions."""
    batches = [batch.select(["path", "size_bytes"]).to_pylist() for batch in dataset.all_files()]
    return {row["path"]: row["size_bytes"] for batch in batches for row in batch}


def _files_missing(dataset: lance.LanceDataset) -> Iterator[str]:
    """Yield the data files of a version that are missing, or differ in size from its manifest."""
    sizes = file_sizes(dataset)
    for fragment in dataset.get_fragments():
        for file in fragment.data_files():
            size, recorded = sizes.get(f"data/{file.path}"), file.file_size_bytes
            if size is None:
                yield f"data file {file.path} is missing"
            elif recorded and size != recorded:
                yield f"data file {file.path} has {size:,} bytes, {recorded:,} were written"
