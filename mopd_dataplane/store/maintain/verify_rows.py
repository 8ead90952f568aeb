"""The audit of metadata: checks that every row is as committed, file by file, and in parts where a file cannot be
read."""

from collections.abc import Collection, Iterator

import lance

from mopd_dataplane.store.format.row_checksums import wrong_rows
from mopd_dataplane.store.format.row_ids import fragment_ids
from mopd_dataplane.store.maintain.verify_report import Finding, damage, left_out

ROWS = 1 << 16
"""Number of rows read at once."""
SMALLEST = 256
"""Number of rows read together when a larger part cannot be read."""


def audit_rows(
    name: str, dataset: lance.LanceDataset, key: tuple[str, ...], read: Collection[str] = ()
) -> Iterator[Finding]:
    """Find rows of a version that differ from their committed content; files in `read` were audited before."""
    for fragment in dataset.get_fragments():
        if why := left_out(name, "rows", fragment.fragment_id):
            yield Finding(name, -1, "", f"{', '.join(files_of(fragment))}: {why}")
        elif not set(files_of(fragment)) <= set(read):
            for row, uid, problem in _audit_part(fragment, key, 0, fragment.count_rows()):
                yield Finding(name, int(fragment_ids(fragment)[row]), uid, problem)


def audit_columns(name: str, dataset: lance.LanceDataset, read: Collection[str] = ()) -> Iterator[Finding]:
    """Find files of payload whose columns cannot be read together; files in `read` were audited before.

    Payload is read column by column, which Lance does also when the columns of a file do not have equally many rows.
    """
    for fragment in dataset.get_fragments():
        if set(files_of(fragment)) <= set(read):
            continue
        if why := left_out(name, "columns", fragment.fragment_id):
            yield Finding(name, -1, "", f"{', '.join(files_of(fragment))}: {why}")
            continue
        try:
            fragment.to_table(limit=1)
        except BaseException as error:
            yield Finding(name, -1, "", f"{', '.join(files_of(fragment))}: cannot be read ({damage(error)})")


def files_of(fragment: lance.LanceFragment) -> list[str]:
    """Return the names of a fragment's data files."""
    return [data_file.path for data_file in fragment.data_files()]


def _audit_part(
    fragment: lance.LanceFragment, key: tuple[str, ...], first: int, count: int
) -> Iterator[tuple[int, str, str]]:
    """Yield (index in the file, key, problem) of bad rows from `first` on, reading smaller parts if a part cannot be
    read."""
    if count > ROWS:
        for start in range(first, first + count, ROWS):
            yield from _audit_part(fragment, key, start, min(ROWS, first + count - start))
        return
    try:
        rows = fragment.to_table(offset=first or None, limit=count)
        wrong = list(wrong_rows(rows))
    except BaseException as error:
        problem = damage(error)
        if count <= SMALLEST:
            yield first, "", f"{count} rows from this one on cannot be read ({problem})"
            return
        yield from _audit_part(fragment, key, first, count // 2)
        yield from _audit_part(fragment, key, first + count // 2, count - count // 2)
        return
    if rows.num_rows != count:
        yield first, "", f"{count} rows from this one on are said to be there, and are not"
    for row, crc, committed in wrong:
        named = "/".join(str(rows[part][row].as_py()) for part in key)
        said = f"row crc32c {crc:08x}, {committed:08x} was committed"
        yield first + row, named, said
