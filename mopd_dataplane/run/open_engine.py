"""Opens the engine that a job samples with. One that takes long to start is kept and loads one policy after another,
unless `engine.keep` is false."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.job import Job
from mopd_dataplane.models.devices import free_device_memory
from mopd_dataplane.rollout.engines.engine import CanSleep
from mopd_dataplane.rollout.engines.kinds import engine_kind

if TYPE_CHECKING:
    from mopd_dataplane.job.sections import Lora
    from mopd_dataplane.rollout.engines.engine import Engine
    from mopd_dataplane.rollout.engines.hf import MixedTeacher


class Engines:
    """The engines of one run, each used as `with run.engines.use(folder, version) as engine: ...`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kept: Engine | None = None
        self._kept_for: Lora | None = None

    @contextmanager
    def use(
        self, folder: Path, version: int, *, mixed_teacher: MixedTeacher | None = None, adapter: Lora | None = None
    ) -> Iterator[Engine]:
        """An engine with free slots and this policy. One that fails, or is interrupted, is not used again.

        adapter: see EngineKind.open.
        """
        engine = self._ready(folder, version, mixed_teacher, adapter)
        try:
            yield engine
        except BaseException:
            engine.close()
            raise
        settings = self._job.engine
        stays = engine_kind(settings.kind).stays
        if stays and (settings.keep or (isinstance(engine, CanSleep) and engine.sleep())):
            self._kept, self._kept_for = engine, adapter
        else:
            engine.close()  # its memory is needed by what follows

    def close(self) -> None:
        """End the engine that is kept, if any."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _ready(self, folder: Path, version: int, mixed_teacher: MixedTeacher | None, adapter: Lora | None) -> Engine:
        """The kept engine with this policy, or a new one."""
        free_device_memory()
        last_engine, self._kept = self._kept, None
        if last_engine is not None:
            try:
                if adapter is None or adapter == self._kept_for:
                    last_engine.load_policy(folder, version)
                    return last_engine
            except MismatchError:
                pass  # a model of another shape or base: a new engine will say if it cannot be had
            except BaseException:
                last_engine.close()
                raise
            last_engine.close()
        return start_engine(self._job, folder, version, mixed_teacher=mixed_teacher, adapter=adapter)


def start_engine(
    job: Job, folder: Path, version: int, *, mixed_teacher: MixedTeacher | None = None, adapter: Lora | None = None
) -> Engine:
    """A new engine with the job's settings and this policy. Raises MismatchError, EngineError."""
    settings = job.engine
    kind = engine_kind(settings.kind)
    dtype = settings.dtype or job.student.dtype
    return kind.open(folder, version, settings, dtype=dtype, mixed_teacher=mixed_teacher, adapter=adapter)
