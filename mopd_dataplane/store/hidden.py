"""Hidden states by byte range, straight into memory the caller owns.

Lance keeps packed blobs in sidecar files beside its data files, and small ones in the data files. Its public blob
descriptors say where in its file each blob lies; the bytes are read from there, on a local disk and on an object store
(sidecars.py). The file's name is internal to Lance, so a file is used only after the first bytes of its first blob
agreed with a read through Lance. Everything else (other blob kinds) is read through Lance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store import lance_errors
from mopd_dataplane.store.network import network_failure
from mopd_dataplane.store.row_ids import row_ids
from mopd_dataplane.store.sidecars import FileEnded, LocalSidecars, Part, Sidecars

OPEN_BLOBS = 64
"""Blob handles of Lance kept open."""
LOCATED = 1 << 16
"""Places kept in memory."""
PIECE = 4 << 20
"""Bytes of one read through Lance: larger private buffers fault page by page."""
PROBE = 4096
INLINE, PACKED = 0, 1
"""Descriptor kinds of a blob in the data file itself, and in a sidecar that it shares."""


class HiddenReader:
    """Reads one teacher's hidden states by byte range, at one version. Used by one thread at a time."""

    def __init__(self, dataset: lance.LanceDataset, sidecars: Sidecars | None = None) -> None:
        """sidecars: of the dataset; by default those of a local folder, and on an object store none."""
        self._dataset = dataset
        self._blobs: OrderedDict[int, lance.BlobFile] = OrderedDict()
        folder = Path(dataset.uri) / "data"
        self._sidecars = sidecars if sidecars is not None or not folder.is_dir() else LocalSidecars(folder)
        self._places = _Places(dataset, self._sidecars)

    def describe(self, payload_rows: Sequence[int] | NDArray[np.int64]) -> pa.Table:
        """uid, codec, rows (M) and row_bytes of each payload row, in the asked order."""
        offsets = row_ids(self._dataset).offsets(payload_rows)
        return self._dataset.take(offsets.tolist(), columns=["uid", "codec", "rows", "row_bytes"])

    def require_sizes(self, payload_rows: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise DamagedError unless Lance records as many bytes of each row as the row's own columns say: readers here
        go by the columns, others by what Lance records."""
        recorded = _descriptors(self._dataset, row_ids(self._dataset).offsets(payload_rows)).field("size").to_pylist()
        for row, wanted, said in zip(payload_rows, sizes, recorded, strict=True):
            if said != wanted:
                raise self._damage(row, 0, wanted, f"Lance records {said:,} bytes")

    def locate(self, payload_rows: Sequence[int]) -> None:
        """Look up in one request where rows lie that are read next."""
        self._places.locate(payload_rows)

    def open_files(self, payload_rows: Sequence[int]) -> None:
        """Open the files of rows that are read first."""
        for row in self._places.one_of_each_file(payload_rows):
            self._places.find(row, self._probe)

    def read_into(self, payload_row: int, start_byte: int, target: memoryview) -> None:
        """Fill `target` with the bytes of one sample from `start_byte` on; DamagedError when they are not there."""
        self._read([(payload_row, start_byte, target)])

    def read_whole(self, payload_rows: Sequence[int], sizes: Sequence[int], target: memoryview) -> None:
        """Fill `target` with samples one after the other, given the bytes of each; DamagedError as read_into."""
        self.locate(payload_rows)
        ends = accumulate(sizes)
        self._read([(r, 0, target[end - size : end]) for r, size, end in zip(payload_rows, sizes, ends, strict=True)])

    def _read(self, wanted: Sequence[tuple[int, int, memoryview]]) -> None:
        """Fill each memory from a row's byte on."""
        parts: list[Part] = []
        asked: list[tuple[int, int, memoryview]] = []
        for row, start, memory in wanted:
            if not memory:  # no trained token
                continue
            place = self._places.find(row, self._probe)
            if place is None:
                for done in range(0, len(memory), PIECE):
                    piece = memory[done : done + PIECE]
                    piece[:] = self._through_lance(row, start + done, len(piece))
                continue
            file, position, size = place
            if start + len(memory) > size:
                raise self._damage(row, start, len(memory), f"the blob has {size:,} bytes")
            parts.append(Part(file, position + start, memory))
            asked.append((row, start, memory))
        if self._sidecars is None or not parts:
            return
        try:
            self._sidecars.read(parts)
        except FileEnded as ended:
            row, start, memory = asked[ended.args[0]]
            raise self._damage(row, start, len(memory), "the file ends before") from None

    def _probe(self, payload_row: int, size: int) -> bytes:
        return self._through_lance(payload_row, 0, min(PROBE, size))

    def _through_lance(self, payload_row: int, start_byte: int, nbytes: int) -> bytes:
        try:
            piece: bytes = self._blob(payload_row).read_range(start_byte, nbytes)
        except (ValueError, OSError) as error:
            if failure := network_failure(self._dataset.uri, error):
                raise failure from None
            raise self._damage(payload_row, start_byte, nbytes, str(error)) from error
        return piece

    def _damage(self, payload_row: int, start_byte: int, nbytes: int, why: str) -> DamagedError:
        return DamagedError(f"{self._dataset.uri}: row {payload_row}, {nbytes} bytes from byte {start_byte}: {why}")

    def _blob(self, payload_row: int) -> lance.BlobFile:
        blob = self._blobs.pop(payload_row, None) or self._open_blob(payload_row)
        self._blobs[payload_row] = blob
        return blob

    def _open_blob(self, payload_row: int) -> lance.BlobFile:
        if len(self._blobs) >= OPEN_BLOBS:
            self._blobs.popitem(last=False)[1].close()
        blob = self._dataset.take_blobs("hidden", ids=[payload_row])[0]
        if blob is None:
            raise DamagedError(f"{self._dataset.uri}: row {payload_row} holds no hidden states")
        return blob


def _descriptors(dataset: lance.LanceDataset, offsets: NDArray[np.int64]) -> pa.StructArray:
    """Lance's public descriptors of the blobs at these offsets: kind, position, size, blob_id."""
    with lance_errors.reading(dataset.uri):
        return dataset.take(offsets.tolist(), columns=["hidden"])["hidden"].combine_chunks()


class _Places:
    """Positions of the blobs of one version of a dataset in its sidecar files."""

    def __init__(self, dataset: lance.LanceDataset, sidecars: Sidecars | None) -> None:
        self._dataset = dataset
        self._sidecars = sidecars
        fragments = dataset.get_fragments() if sidecars is not None else []
        self._first_rows = np.array([0, *accumulate(fragment.count_rows() for fragment in fragments)])
        self._stems = [PurePosixPath(fragment.data_files()[0].path).stem for fragment in fragments]
        self._known: dict[int, tuple[str, int, int] | None] = {}
        self._files: dict[str, Any | None] = {}
        """Open files by name; None for one that may not be used."""

    def locate(self, rows: Sequence[int]) -> None:
        """Learn file, position and size of the blobs of these rows."""
        unknown = [row for row in rows if row not in self._known] if self._sidecars is not None else []
        if not unknown:
            return
        if len(self._known) + len(unknown) > LOCATED:
            self._known.clear()
        offsets = row_ids(self._dataset).offsets(unknown)
        columns = _descriptors(self._dataset, offsets)
        fields = (columns.field(name).to_pylist() for name in ("kind", "position", "size", "blob_id"))
        fragments = np.searchsorted(self._first_rows, offsets, side="right") - 1
        for row, fragment, kind, position, size, blob_id in zip(unknown, fragments, *fields, strict=True):
            stem = self._stems[fragment]
            names = {INLINE: f"{stem}.lance", PACKED: f"{stem}/{f'{blob_id:032b}'[::-1]}.blob"}
            self._known[row] = (names[kind], position, size) if kind in names else None

    def one_of_each_file(self, rows: Sequence[int]) -> list[int]:
        """One of these rows for each file that some of them lie in."""
        self.locate(rows)
        places = ((row, self._known.get(row)) for row in rows)
        return list({place[0]: row for row, place in places if place is not None}.values())

    def find(self, row: int, probe: Callable[[int, int], bytes]) -> tuple[Any, int, int] | None:
        """(file, position, size) of a row's blob; None when it must be read through Lance."""
        self.locate([row])
        known = self._known.get(row)
        if known is None or self._sidecars is None:
            return None
        name, position, size = known
        if name not in self._files:
            self._files[name] = self._sidecars.open(name, position, probe(row, size))
        file = self._files[name]
        return None if file is None else (file, position, size)
