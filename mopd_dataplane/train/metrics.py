"""metrics.jsonl: one StepMetrics per line, cut back to the checkpoint on resume; and the trackers that mirror it.

A tracker is TensorBoard, W&B, an entry point of `mopd.trackers`, or is named as `package.module:Name`: a class (or
function) that is called with (folder, name, steps_done) and returns something with `write` and `close`.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from mopd_dataplane.base.extras import missing_package
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.base.sealed_json import seal_line, unseal
from mopd_dataplane.errors import InputError
from mopd_dataplane.records import StepMetrics

FILE = "metrics.jsonl"
PADDING = "padding"
"""Name in a step's `extra` metrics: share of the positions that are padding, where every sequence has a row."""


class MetricsLog:
    """Appends one line per step, with its checksum. `sync` makes the lines durable, before a checkpoint gets its name.

    steps_done: number of steps before the checkpoint from which training resumes. Lines of later steps are dropped,
    because those steps run again.
    """

    def __init__(self, folder: Path, *, steps_done: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        earlier_steps = [asdict(metrics) for metrics in MetricsReader(folder).steps() if metrics.step < steps_done]
        publish_file(self._path, "".join(f"{seal_line(metrics)}\n" for metrics in earlier_steps).encode())
        self._file = self._path.open("a")

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; readers see it immediately."""
        self._file.write(seal_line(asdict(metrics)) + "\n")
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


class MetricsReader:
    """Follows a metrics file: each line is read and checked once, however often `steps` is called."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._steps: list[StepMetrics] = []
        self._inode = 0
        self._read = 0

    def steps(self) -> Sequence[StepMetrics]:
        """Return every complete line in order, without one that is still being written. Raises DamagedError."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._inode or about.st_size < self._read:  # a trainer has started the file anew
                self._steps, self._inode, self._read = [], about.st_ino, 0
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._steps += [StepMetrics(**unseal(line, str(self._path))) for line in new.splitlines()]
        self._read += len(new)
        return self._steps


class Tracker(Protocol):
    """A destination of step metrics besides metrics.jsonl."""

    def write(self, metrics: StepMetrics) -> None:
        """Record one step."""

    def close(self) -> None:
        """Flush all records and close."""


Open = Callable[[Path, str, int], Tracker]
"""(folder that outlives the process, name of the stage, steps that a resumed run has done) -> a tracker."""


def open_tracker(kind: str, folder: Path, *, name: str, steps_done: int) -> Tracker | None:
    """Open the tracker of this kind, or return None for "none".

    A resumed run continues at `steps_done` instead of showing steps twice.
    Raises UnknownNameError for an unknown name, InputError when its package is not installed.
    """
    if kind == "none":
        return None
    opened: Open = find_plugin("mopd.trackers", kind, TRACKERS)
    try:
        return opened(folder, name, steps_done)
    except ModuleNotFoundError as error:
        why = missing_package(error) or f"the package {error.name!r} is not installed; pip install it"
        raise InputError(f"track = {kind!r}: {why}") from None


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """Return the numbers of a step by their names in a tracker, "<stage>/<metric>", without `step` itself."""
    values = {k: v for k, v in asdict(metrics).items() if isinstance(v, int | float)} | metrics.extra
    return {f"{metrics.stage}/{name}": float(value) for name, value in values.items() if name != "step"}


class _TensorBoard:
    def __init__(self, folder: Path, name: str, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=steps_done)

    def write(self, metrics: StepMetrics) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: Path, name: str, steps_done: int) -> None:
        import wandb

        # The folder names the run, so that a restart continues it; W&B drops steps that it has already seen.
        identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run: Any = wandb.init(dir=str(folder), name=name, project="mopd", id=identity, resume="allow")

    def write(self, metrics: StepMetrics) -> None:
        self._run.log(scalars(metrics), step=metrics.step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Open] = {"tensorboard": _TensorBoard, "wandb": _WandB}
"""Built-in trackers, by the name of their package."""
