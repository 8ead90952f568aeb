"""metrics.jsonl: one StepMetrics per line, cut back to the checkpoint on resume; and the trackers that mirror it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.sealed_json import seal_line, unseal
from mopd_dataplane.errors import InputError
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
        kept = [line for line in _whole_lines(self._path) if unseal(line, str(self._path))["step"] < steps_done]
        publish_file(self._path, "".join(f"{line}\n" for line in kept).encode())
        self._file = self._path.open("a")

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; visible to readers at once."""
        self._file.write(seal_line(asdict(metrics)) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Make every line durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()


def read_metrics(folder: Path) -> list[StepMetrics]:
    """Every complete line of a metrics file, in order; a line still being written is left out. Raises DamagedError."""
    return [StepMetrics(**unseal(line, str(folder / FILE))) for line in _whole_lines(folder / FILE)]


def _whole_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


class Tracker(Protocol):
    """Where metrics go besides the file."""

    def write(self, metrics: StepMetrics) -> None:
        """Record one step."""

    def close(self) -> None:
        """Flush."""


def open_tracker(kind: str, folder: Path, *, name: str, steps_done: int) -> Tracker | None:
    """TensorBoard or W&B, when asked for; a resumed run goes on at `steps_done` instead of showing steps twice.

    Raises InputError when the package is not installed.
    """
    if kind == "none":
        return None
    try:
        return _TensorBoard(folder, steps_done) if kind == "tensorboard" else _WandB(folder, name)
    except ImportError:
        raise InputError(f"track = {kind!r} needs the package: pip install 'mopd-dataplane[track]'") from None


def _scalars(metrics: StepMetrics) -> dict[str, float]:
    values = {k: v for k, v in asdict(metrics).items() if isinstance(v, int | float)} | metrics.extra
    return {f"{metrics.stage}/{name}": float(value) for name, value in values.items() if name != "step"}


class _TensorBoard:
    def __init__(self, folder: Path, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=steps_done)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in _scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: Path, name: str) -> None:
        import wandb

        # The folder names the run, so that a restart continues it; W&B drops steps that it has already seen.
        identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run: Any = wandb.init(dir=str(folder), name=name, project="mopd", id=identity, resume="allow")

    def write(self, metrics: StepMetrics) -> None:
        self._run.log(_scalars(metrics), step=metrics.step)

    def close(self) -> None:
        self._run.finish()
