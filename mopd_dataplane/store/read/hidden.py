"""Hidden states by byte range, read straight into memory that the caller owns.

Lance stores packed blobs in sidecar files beside its data files, and small ones in the data files. Its public blob
descriptors give the position of each blob in its file, from which the bytes are read, on a local disk and on an object
store (sidecars.py). The file's name is internal to Lance, so a file is used only after the first bytes of its first
blob agreed with a read through Lance. Everything else (other blob kinds) is read through Lance.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.format import lance_errors
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.remote.sidecars import FileEnded, LocalSidecars, Part, Sidecars

LOCATED = 1 << 16
"""Number of positions cached in memory."""
PIECE = 4 << 20
"""Bytes of one read through Lance: larger private buffers fault page by page."""
PROBE = 4096
INLINE, PACKED = 0, 1
"""Descriptor kinds of a blob in the data file itself, and in a sidecar that it shares."""


class HiddenReader:
    """Reads one teacher's hidden states by byte range, at one version. Used by one thread at a time."""

    def __init__(self, dataset: lance.LanceDataset, sidecars: Sidecars | None = None) -> None:
        """Open a reader. sidecars: of the dataset; by default those of a local folder, and none on an object store."""
        self._dataset = dataset
        folder = Path(dataset.uri) / "data"
        self._sidecars = sidecars if sidecars is not None or not folder.is_dir() else LocalSidecars(folder)
        fragments = dataset.get_fragments() if self._sidecars is not None else []
        self._first_rows = np.array([0, *accumulate(fragment.count_rows() for fragment in fragments)])
        self._stems = [PurePosixPath(fragment.data_files()[0].path).stem for fragment in fragments]
        self._known: dict[int, tuple[str, int, int] | None] = {}
        """Row → file, position and size of its blob; None for one that is read through Lance."""
        self._files: dict[str, Any | None] = {}
        """Open files by name; None for one that must not be used."""

    def describe(self, payload_rows: Sequence[int] | NDArray[np.int64]) -> pa.Table:
        """Return uid, codec, rows (M) and row_bytes of each payload row, in their order."""
        offsets = row_ids(self._dataset).offsets(payload_rows)
        return self._dataset.take(offsets.tolist(), columns=["uid", "codec", "rows", "row_bytes"])

    def require_sizes(self, payload_rows: Sequence[int], sizes: Sequence[int]) -> None:
        """Check that Lance records the same size of each row as the row's own columns. Raises DamagedError if not.

        Readers here use the columns, others the sizes that Lance records.
        """
        recorded = self._descriptors(row_ids(self._dataset).offsets(payload_rows)).field("size").to_pylist()
        for row, size, said in zip(payload_rows, sizes, recorded, strict=True):
            if said != size:
                raise self._damage(row, 0, size, f"Lance records {said:,} bytes")

    def locate(self, payload_rows: Sequence[int]) -> None:
        """Look up in one request the positions of rows that are read next."""
        unknown = [row for row in payload_rows if row not in self._known] if self._sidecars is not None else []
        if not unknown:
            return
        if len(self._known) + len(unknown) > LOCATED:
            self._known.clear()
        offsets = row_ids(self._dataset).offsets(unknown)
        columns = self._descriptors(offsets)
        fields = (columns.field(name).to_pylist() for name in ("kind", "position", "size", "blob_id"))
        fragments = np.searchsorted(self._first_rows, offsets, side="right") - 1
        for row, fragment, kind, position, size, blob_id in zip(unknown, fragments, *fields, strict=True):
            stem = self._stems[fragment]
            names = {INLINE: f"{stem}.lance", PACKED: f"{stem}/{f'{blob_id:032b}'[::-1]}.blob"}
            self._known[row] = (names[kind], position, size) if kind in names else None

    def open_files(self, payload_rows: Sequence[int]) -> None:
        """Open the files of rows that are read first."""
        self.locate(payload_rows)
        places = ((row, self._known.get(row)) for row in payload_rows)
        for row in {position[0]: row for row, position in places if position is not None}.values():
            self._locate(row)

    def read_into(self, payload_row: int, start_byte: int, target: memoryview) -> None:
        """Fill `target` with the bytes of one sample from `start_byte` on. Raises DamagedError when they are
        missing."""
        self._read([(payload_row, start_byte, target)])

    def read_whole(self, payload_rows: Sequence[int], sizes: Sequence[int], target: memoryview) -> None:
        """Fill `target` with samples one after the other; sizes: the bytes of each. Raises DamagedError as
        read_into."""
        self.locate(payload_rows)
        ends = accumulate(sizes)
        self._read([(r, 0, target[end - size : end]) for r, size, end in zip(payload_rows, sizes, ends, strict=True)])

    def _read(self, reads: Sequence[tuple[int, int, memoryview]]) -> None:
        """Fill each memory with bytes of a row from a position on."""
        parts: list[Part] = []
        requests: list[tuple[int, int, memoryview]] = []
        for row, start, memory in reads:
            if not memory:  # no trained token
                continue
            located = self._locate(row)
            if located is None:
                self._through_lance(row, start, memory)
                continue
            file, position, size = located
            if start + len(memory) > size:
                raise self._damage(row, start, len(memory), f"the blob has {size:,} bytes")
            parts.append(Part(file, position + start, memory))
            requests.append((row, start, memory))
        if self._sidecars is None or not parts:
            return
        try:
            self._sidecars.read(parts)
        except FileEnded as ended:
            row, start, memory = requests[ended.args[0]]
            raise self._damage(row, start, len(memory), "the file ends before") from None

    def _locate(self, row: int) -> tuple[Any, int, int] | None:
        """Return (file, position, size) of a row's blob, or None when it must be read through Lance."""
        self.locate([row])
        located = self._known.get(row)
        if located is None or self._sidecars is None:
            return None
        name, position, size = located
        if name not in self._files:
            first = bytearray(min(PROBE, size))
            self._through_lance(row, 0, memoryview(first))
            self._files[name] = self._sidecars.open(name, position, bytes(first))
        file = self._files[name]
        return None if file is None else (file, position, size)

    def _through_lance(self, row: int, start: int, memory: memoryview) -> None:
        try:
            blob = self._dataset.take_blobs("hidden", ids=[row])[0]
            if blob is None:
                raise DamagedError(f"{self._dataset.uri}: row {row} holds no hidden states")
            with blob:
                for done in range(0, len(memory), PIECE):
                    piece = memory[done : done + PIECE]
                    piece[:] = blob.read_range(start + done, len(piece))
        except (ValueError, OSError) as error:
            if failure := lance_errors.environment_failure(self._dataset.uri, error):
                raise failure from None
            raise self._damage(row, start, len(memory), str(error)) from error

    def _damage(self, payload_row: int, start_byte: int, nbytes: int, why: str) -> DamagedError:
        return DamagedError(f"{self._dataset.uri}: row {payload_row}, {nbytes} bytes from byte {start_byte}: {why}")

    def _descriptors(self, offsets: NDArray[np.int64]) -> pa.StructArray:
        """Return Lance's public descriptors of the blobs at these offsets: kind, position, size, blob_id."""
        with lance_errors.reading(self._dataset.uri):
            return self._dataset.take(offsets.tolist(), columns=["hidden"])["hidden"].combine_chunks()
