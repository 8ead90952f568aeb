"""The step whose loss or gradient was not finite, as a file beside the checkpoints from the trainer to the job."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.errors import EngineError

_FILE = "not-finite.json"


class NotFiniteError(EngineError):
    """Loss or gradient of a step is not finite; the update was not applied."""

    def __init__(self, stage: str, step: int, loss: float, grad_norm: float) -> None:
        super().__init__(
            f"stage {stage!r} step {step}: loss {loss}, gradient norm {grad_norm}; the update was not applied and the "
            "last checkpoint is intact: lower learning_rate, or look at the samples of this step"
        )
        self.loss = str(loss)
        self.grad_norm = str(grad_norm)


@dataclass(frozen=True, kw_only=True)
class FailedStep:
    """A step whose update was not applied."""

    step: int
    """Step inside the stage."""
    window: int
    window_step: int
    loss: str
    grad_norm: str


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
