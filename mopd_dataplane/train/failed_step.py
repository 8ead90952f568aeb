"""The spike at which a trainer stopped, as a file beside the checkpoints from the trainer to the job."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mopd_dataplane.base.files import publish_file

_FILE = "failed-step.json"


@dataclass(frozen=True, kw_only=True)
class FailedStep:
    """A step whose update was not applied."""

    step: int
    """Step inside the stage."""
    window: int
    window_step: int
    loss: str
    grad_norm: str
    reason: str
    """Why the update was not applied."""


def write_failed_step(folder: Path, failed: FailedStep) -> None:
    """Write a failed step to the folder, for the job."""
    publish_file(folder / _FILE, json.dumps(asdict(failed)).encode())


def take_failed_step(folder: Path) -> FailedStep | None:
    """Read and remove the failed step that a trainer wrote. Returns None if there is none."""
    file = folder / _FILE
    if not file.is_file():
        return None
    failed = FailedStep(**json.loads(file.read_text()))
    file.unlink()
    return failed
