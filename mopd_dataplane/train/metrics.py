"""metrics.jsonl: one StepMetrics per line, cut back to the checkpoint on resume."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.sealed_json import seal_line, unseal
from mopd_dataplane.records import StepMetrics

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends one line a step, with its checksum; `sync` makes them durable, before a checkpoint gets its name.

    steps_done: lines of later steps, written after the checkpoint that training resumes from, are dropped: those
    steps run again.
    """

    def __init__(self, folder: Path, *, steps_done: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        kept = [asdict(metrics) for metrics in MetricsReader(folder).steps() if metrics.step < steps_done]
        publish_file(self._path, "".join(f"{seal_line(metrics)}\n" for metrics in kept).encode())
        self._file = self._path.open("a")

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; readers see it immediately."""
        self._file.write(seal_line(asdict(metrics)) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Make every line durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()


class MetricsReader:
    """Follows a metrics file: each line is read and checked once, however often one looks."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._steps: list[StepMetrics] = []
        self._inode = 0
        self._read = 0

    def steps(self) -> Sequence[StepMetrics]:
        """Every complete line in order; a line still being written is left out. Raises DamagedError."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._inode or about.st_size < self._read:  # a trainer has begun it anew
                self._steps, self._inode, self._read = [], about.st_ino, 0
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._steps += [StepMetrics(**unseal(line, str(self._path))) for line in new.splitlines()]
        self._read += len(new)
        return self._steps
