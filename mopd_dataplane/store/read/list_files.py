"""Positions of a table's lists in its local files, for reading by byte range without a copy in between.

Lance file format 2.0 stores the elements of a list column one after the other, without packing, and separately the end
of each list. The file states the position and encoding of both (lance_pages.py). Any other file is read through Lance,
and so is a file if the first row read this way fails its checksum.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import lance
import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.fields import PAYLOAD
from mopd_dataplane.store.format.lance_pages import NotPlain, Page, flat_bits, list_counts, read_pages
from mopd_dataplane.store.read.lists import FileLists, HeldLists, Lists, OpenFiles, Piece

_END = np.dtype("<u8")
SHORT = frozenset(field.column for field in PAYLOAD if field.axis == "span")
"""Columns with few elements per row: those of many rows are read at once."""
GAP = 512
"""Number of list ends, or elements of SHORT columns, that are read unnecessarily rather than with another read."""
LAYOUTS = 4096
"""Number of cached layouts: columns of files."""
_UNREADABLE = (NotPlain, OSError, ValueError, LookupError, ArithmeticError)
"""Errors of a file that is then left to Lance, which tells what is damaged and where."""
_File = tuple[str, int, int]
"""Path, time of change and size of a file."""
Checksum = Callable[[Sequence[NDArray[Any] | None]], int]


@dataclass(frozen=True, slots=True)
class _Pages:
    """Values of one type in k pages of a file, plain and one after the other."""

    starts: NDArray[np.int64]
    """[k + 1] index of the first value of each page."""
    positions: NDArray[np.int64]
    """[k] byte of each page."""
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, pages: Sequence[Page], dtype: np.dtype[Any]) -> Self:
        """Build from pages. Raises NotPlain unless each page has one buffer, of the size of its values."""
        if any(page.sizes != (page.rows * dtype.itemsize,) for page in pages):
            raise NotPlain(f"pages with other buffers than one of {dtype.name} values")
        starts = np.cumsum([0, *(page.rows for page in pages)])
        return cls(starts, np.array([page.positions[0] for page in pages], np.int64), dtype)

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """Yield the positions of the values first:last."""
        page, size = int(np.searchsorted(self.starts, first, side="right")) - 1, self.dtype.itemsize
        while first < last:
            begin, end = int(self.starts[page]), min(last, int(self.starts[page + 1]))
            if first < end:
                yield int(self.positions[page]) + (first - begin) * size, (end - first) * size
            first, page = end, page + 1


@dataclass(frozen=True, slots=True)
class _Column:
    """A list column of one file."""

    ends: _Pages
    """End of the list of each row, counted from the first element of its page."""
    null_shifts: NDArray[np.uint64]
    """[k] number added to the end of a null list, by page of `ends`."""
    first_elements: NDArray[np.int64]
    """[k + 1] index of the first element of the lists of a page."""
    elements: _Pages


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Consecutive elements of a list column in a file of n rows."""

    first_row: int
    """Offset of the file's first row in the scan."""
    starts: NDArray[np.int64]
    """[n] index in the file of the first element of each list."""
    lengths: NDArray[np.int64]
    """[n]"""
    base: int
    """Index in the file of the first of `elements`."""
    elements: NDArray[Any]


class ListFiles:
    """Finds and reads lists of one table at one version. Used by one thread at a time."""

    def __init__(self, dataset: lance.LanceDataset, columns: Sequence[str], checksum: Checksum) -> None:
        """Open the files. columns: list columns of the table over which `checksum` is computed."""
        self._folder = Path(dataset.uri) / "data"
        self._fragments = dataset.get_fragments() if self._folder.is_dir() else []
        self._plain = bool(self._fragments) and all(f.metadata.deletion_file is None for f in self._fragments)
        self._first_rows = np.cumsum([0, *(fragment.metadata.physical_rows for fragment in self._fragments)])
        fields = {field.name(): field for field in dataset.lance_schema.fields()}
        self._ids = {name: (fields[name].id(), fields[name].children()[0].id()) for name in columns}
        self._dtypes = {
            name: np.dtype(dataset.schema.field(name).type.value_type.to_pandas_dtype()) for name in columns
        }
        self._checksum = checksum
        self._files = OpenFiles()
        self._columns: dict[int, dict[str, tuple[int, _Column]]] = {}
        """Fragment → for each column, the number of its file and its layout."""

    def locate(
        self, offsets: NDArray[np.int64], columns: Sequence[str], crcs: NDArray[np.int64]
    ) -> dict[str, Lists] | None:
        """Locate some columns of the rows at these offsets of the scan. Returns None when Lance must read them.

        crcs: [n] committed checksum of each row.
        """
        if not self._plain or not len(offsets):
            return None
        try:
            fragments = self._learn_all(offsets, crcs)
            short: dict[str, Lists] = {name: self._read(name, offsets, fragments) for name in columns if name in SHORT}
            lists_by_column = {name: self._find(name, offsets, fragments) for name in columns if name not in SHORT}
            for lists in lists_by_column.values():
                lists.read_ahead()
            return short | lists_by_column
        except _UNREADABLE:
            self._plain = False
            return None

    def ranges(
        self, name: str, offsets: NDArray[np.int64], crcs: NDArray[np.int64], size: int, overlap: int
    ) -> Iterator[ElementRange] | None:
        """Yield all elements of a column in the files with the rows at these offsets, `size` of them and `overlap`
        more.

        Returns None when they must be read through Lance. crcs: [n] committed checksum of each row; one row of each
        file is tested.
        """
        if not self._plain or not len(offsets):
            return None
        try:
            fragments = np.unique(self._learn_all(offsets, crcs)).tolist()
        except _UNREADABLE:
            self._plain = False
            return None
        return self._element_ranges(name, fragments, size, overlap)

    def _element_ranges(self, name: str, fragments: Sequence[int], size: int, overlap: int) -> Iterator[ElementRange]:
        for fragment in fragments:
            (number, column), first = self._columns[fragment][name], int(self._first_rows[fragment])
            rows = np.arange(int(self._first_rows[fragment + 1]) - first)
            starts, lengths, _ = self._bounds(number, column, rows)
            total = int(column.elements.starts[-1])
            for base in range(0, total, size):
                last = min(total, base + size + overlap)
                elements = self._values(number, column.elements, [(base, last)])
                for position, nbytes in column.elements.pieces(last, min(total, last + size)):
                    self._files.ask(number, position, nbytes)
                yield ElementRange(first, starts, lengths, base, elements)

    def _learn_all(self, offsets: NDArray[np.int64], crcs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the fragment of each row, [n], after reading the layout of all of them. Raises NotPlain."""
        fragments = np.searchsorted(self._first_rows, offsets, side="right") - 1
        for fragment, index in zip(*np.unique(fragments, return_index=True), strict=True):
            if int(fragment) not in self._columns:
                self._learn(int(fragment), offsets[index : index + 1], int(crcs[index]))
        return fragments

    def _learn(self, fragment: int, row: NDArray[np.int64], crc: int) -> None:
        """Read the layout of a fragment, and test it on one row. Raises NotPlain."""
        numbers: dict[str, int] = {}
        columns: dict[str, tuple[int, _Column]] = {}
        for name, ids in self._ids.items():
            file = next((file for file in self._fragments[fragment].data_files() if ids[0] in file.fields), None)
            if file is None:
                raise NotPlain(name)  # the column is newer than the file
            path = self._folder / file.path
            if file.path not in numbers:
                numbers[file.path] = self._files.add(path)
            places = [file.column_indices[list(file.fields).index(id_)] for id_ in ids]
            status = path.stat()
            identity = (str(path), status.st_mtime_ns, status.st_size)
            columns[name] = numbers[file.path], _column(identity, places[0], places[1], self._dtypes[name])
        self._columns[fragment] = columns
        try:
            lists = (self._find(name, row, np.array([fragment])) for name in self._ids)
            if self._checksum([column.array(0) for column in lists]) != crc:
                raise NotPlain(f"row {row[0]}")
        except DamagedError as error:
            raise NotPlain(f"row {row[0]}") from error

    def _find(self, name: str, rows: NDArray[np.int64], fragments: NDArray[np.int64]) -> FileLists:
        lengths, numbers, positions = (np.zeros(len(rows), np.int64) for _ in range(3))
        nulls = np.zeros(len(rows), bool)
        cut: list[list[Piece]] = []
        for fragment in np.unique(fragments).tolist():
            (number, column), here = self._columns[fragment][name], np.flatnonzero(fragments == fragment)
            firsts, lengths[here], nulls[here] = self._bounds(number, column, rows[here] - self._first_rows[fragment])
            numbers[here] = number
            elements = column.elements
            page = np.searchsorted(elements.starts, firsts, side="right") - 1
            page = np.minimum(page, len(elements.positions) - 1)
            if not lengths[here].any():
                continue
            positions[here] = elements.positions[page] + (firsts - elements.starts[page]) * elements.dtype.itemsize
            over = (firsts + lengths[here] > elements.starts[page + 1]) & (lengths[here] > 0)
            for at in np.flatnonzero(over).tolist():
                cut.append(list(elements.pieces(int(firsts[at]), int(firsts[at] + lengths[here[at]]))))
                positions[here[at]] = -len(cut)
        return FileLists(self._files, self._dtypes[name], lengths, numbers, positions, nulls, cut)

    def _read(self, name: str, rows: NDArray[np.int64], fragments: NDArray[np.int64]) -> HeldLists:
        """Read lists, those near each other in one read."""
        chunks, firsts, lengths = (np.zeros(len(rows), np.int64) for _ in range(3))
        nulls = np.zeros(len(rows), bool)
        values: list[NDArray[Any]] = []
        for fragment in np.unique(fragments).tolist():
            (number, column), here = self._columns[fragment][name], np.flatnonzero(fragments == fragment)
            starts, lengths[here], nulls[here] = self._bounds(number, column, rows[here] - self._first_rows[fragment])
            runs, firsts[here] = _runs(starts, starts + lengths[here])
            chunks[here] = len(values)
            values.append(self._values(number, column.elements, runs))
        return HeldLists(values, chunks, firsts, lengths, nulls)

    def _bounds(
        self, number: int, column: _Column, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return first element in the file, number of elements, and whether it is null, of the lists in these rows of a
        file."""
        pages = np.searchsorted(column.ends.starts, rows, side="right") - 1
        # Each list begins where the one before it ends.
        before = np.where(rows > column.ends.starts[pages], rows - 1, rows)
        runs, at = _runs(before, rows + 1)
        raw = self._values(number, column.ends, runs)
        shifts = column.null_shifts[pages]
        begin, end = raw[at], raw[at + (rows - before)]
        nulls = end >= shifts
        ends = (end - shifts * nulls).astype(np.int64)
        starts = np.where(rows > before, (begin - shifts * (begin >= shifts)).astype(np.int64), 0)
        lengths = ends - starts
        first_elements = column.first_elements[pages]
        beyond = first_elements + ends > column.first_elements[pages + 1]
        if (lengths < 0).any() or lengths[nulls].any() or beyond.any():
            raise NotPlain(f"file {number}")
        return starts + first_elements, lengths, nulls

    def _values(self, number: int, pages: _Pages, runs: Sequence[tuple[int, int]]) -> NDArray[Any]:
        """Read the values first:last of a file for each of these runs, one after the other."""
        values = np.empty(sum(last - first for first, last in runs), pages.dtype)
        self._files.gather(number, [piece for run in runs for piece in pages.pieces(*run)], values.data)
        return values


def _runs(firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
    """Join ranges that are at most GAP apart, in order. Returns first and last of each, and the start of each range in
    them.

    Range i is firsts[i]:lasts[i]; ranges may overlap.
    """
    order = np.argsort(firsts, kind="stable")
    begins, ends = firsts[order], np.maximum.accumulate(lasts[order])
    cuts = np.flatnonzero(begins[1:] > ends[:-1] + GAP) + 1
    opening, closing = begins[np.append(0, cuts)], ends[np.append(cuts - 1, len(ends) - 1)]
    bases = np.cumsum(closing - opening) - (closing - opening)
    run = np.searchsorted(opening, firsts, side="right") - 1
    return list(zip(opening.tolist(), closing.tolist(), strict=True)), firsts - opening[run] + bases[run]


@lru_cache(maxsize=LAYOUTS)
def _column(file: _File, own: int, below: int, dtype: np.dtype[Any]) -> _Column:
    """Read the layout of a list column. own, below: indices of it and of its elements among the file's columns.

    Files never change, and the next window reads most of them again. Raises NotPlain, OSError.
    """
    path = Path(file[0])
    lists, pages = read_pages(path, own), [page for page in read_pages(path, below) if page.positions]
    if any(flat_bits(page.encoding) != 8 * dtype.itemsize for page in pages):
        raise NotPlain(f"elements of {path} of another size than {dtype.name}")
    said = [list_counts(page.encoding) for page in lists]
    there, claimed = sum(page.rows for page in pages), sum(page.items for page in said)
    if there != claimed:
        raise NotPlain(f"{there} elements of {claimed} in {path}")
    return _Column(
        ends=_Pages.of(lists, _END),
        null_shifts=np.array([page.null_shift for page in said], np.uint64),
        first_elements=np.cumsum([0, *(page.items for page in said)]),
        elements=_Pages.of(pages, dtype),
    )
