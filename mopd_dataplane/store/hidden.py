"""Hidden states by byte range, straight into memory the caller owns.

Lance keeps packed blobs in sidecar files beside its data files. Its public blob descriptors say where in its sidecar
each blob lies; on a local disk the bytes are read from there with `preadv`, without a copy in between. The sidecar's
name is Lance's own business: a file is only used after its first blob's first bytes were the same through Lance. All
else (object stores, other blob kinds) is read through Lance.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.network import network_failure

OPEN_BLOBS = 64
"""Blob handles of Lance kept open."""
LOCATED = 1 << 16
"""Places kept in memory."""
PIECE = 4 << 20
"""Bytes of one read through Lance: larger private buffers fault page by page."""
PROBE = 4096
PACKED = 1
"""Descriptor kind of a blob in a sidecar that it shares."""


class HiddenReader:
    """Reads one teacher's hidden states by byte range, at one version. Used by one thread at a time."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        self._dataset = dataset
        self._blobs: OrderedDict[int, lance.BlobFile] = OrderedDict()
        self._sidecars = _Sidecars(dataset)

    def describe(self, payload_rows: Sequence[int] | NDArray[np.int64]) -> pa.Table:
        """uid, codec, rows (M) and row_bytes of each payload row, in the asked order."""
        return self._dataset.take(np.asarray(payload_rows).tolist(), columns=["uid", "codec", "rows", "row_bytes"])

    def locate(self, payload_rows: Sequence[int]) -> None:
        """Look up in one request where rows lie that are read next."""
        self._sidecars.locate(payload_rows)

    def read_into(self, payload_row: int, start_byte: int, target: memoryview) -> None:
        """Fill `target` with the bytes of one sample from `start_byte` on; DamagedError when they are not there."""
        place = self._sidecars.find(payload_row, self._probe)
        if place is None:
            for done in range(0, len(target), PIECE):
                piece = target[done : done + PIECE]
                piece[:] = self._through_lance(payload_row, start_byte + done, len(piece))
            return
        fd, position, size = place
        if start_byte + len(target) > size:
            raise self._damage(payload_row, start_byte, len(target), f"the blob has {size:,} bytes")
        done = 0
        while done < len(target):
            read = os.preadv(fd, [target[done:]], position + start_byte + done)
            if read == 0:
                raise self._damage(payload_row, start_byte, len(target), "the sidecar file ends before")
            done += read

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
        blob = self._dataset.take_blobs("hidden", indices=[payload_row])[0]
        if blob is None:
            raise DamagedError(f"{self._dataset.uri}: row {payload_row} holds no hidden states")
        return blob


class _Sidecars:
    """The sidecar files of one version of a local dataset, and where blobs lie in them."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        self._dataset = dataset
        self._folder = Path(dataset.uri) / "data"
        self._local = self._folder.is_dir()
        fragments = dataset.get_fragments() if self._local else []
        self._first_rows = np.array([0, *accumulate(fragment.count_rows() for fragment in fragments)])
        self._stems = [Path(fragment.data_files()[0].path).stem for fragment in fragments]
        self._places: dict[int, tuple[Path, int, int] | None] = {}
        self._fds: dict[Path, int] = {}
        """Open files; -1 for one that may not be used."""

    def locate(self, rows: Sequence[int]) -> None:
        """Learn file, position and size of the blobs of these rows."""
        unknown = [row for row in rows if row not in self._places] if self._local else []
        if not unknown:
            return
        if len(self._places) + len(unknown) > LOCATED:
            self._places.clear()
        columns = self._dataset.take(unknown, columns=["hidden"])["hidden"].combine_chunks()
        fields = (columns.field(name).to_pylist() for name in ("kind", "position", "size", "blob_id"))
        fragments = np.searchsorted(self._first_rows, unknown, side="right") - 1
        for row, fragment, kind, position, size, blob_id in zip(unknown, fragments, *fields, strict=True):
            path = self._folder / self._stems[fragment] / f"{blob_id:032b}"[::-1]
            self._places[row] = (path.with_suffix(".blob"), position, size) if kind == PACKED else None

    def find(self, row: int, probe: Callable[[int, int], bytes]) -> tuple[int, int, int] | None:
        """(descriptor of the file, position, size) of a row's blob; None when it must be read through Lance."""
        self.locate([row])
        place = self._places.get(row)
        if place is None:
            return None
        path, position, size = place
        if path not in self._fds:
            self._fds[path] = self._open(path, position, probe(row, size))
        fd = self._fds[path]
        return None if fd < 0 else (fd, position, size)

    def _open(self, path: Path, position: int, expected: bytes) -> int:
        """Descriptor of a sidecar in which the expected bytes lie at `position`, else -1."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1
        if os.pread(fd, len(expected), position) == expected:
            return fd
        os.close(fd)
        return -1

    def __del__(self) -> None:
        for fd in self._fds.values():
            if fd >= 0:
                os.close(fd)
