"""Which engine a job samples with. vLLM takes long to start: unless told otherwise (`engine.keep`) a run keeps it and
gives it policy after policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.job import Job
from mopd_dataplane.models.devices import free_device_memory, resolve_device
from mopd_dataplane.rollout.engines.engine import Sleeper

if TYPE_CHECKING:
    from mopd_dataplane.rollout.engines.engine import Engine
    from mopd_dataplane.rollout.engines.hf import Partner


class Engines:
    """The engines of one run. Used as

    with run.engines.use(folder, version) as engine: ...
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kept: Engine | None = None

    @contextmanager
    def use(self, folder: Path, version: int, *, partner: Partner | None = None) -> Iterator[Engine]:
        """An engine with free slots and this policy. One that fails, or is interrupted, is not used again."""
        engine = self._ready(folder, version, partner)
        try:
            yield engine
        except BaseException:
            engine.close()
            raise
        if self._job.engine.kind == "vllm" and (
            self._job.engine.keep or (isinstance(engine, Sleeper) and engine.sleep())
        ):
            self._kept = engine
        else:
            engine.close()  # its memory is needed by what follows

    def close(self) -> None:
        """End the engine that is kept, if any."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _ready(self, folder: Path, version: int, partner: Partner | None) -> Engine:
        """The kept engine with this policy, or a new one."""
        free_device_memory()
        kept, self._kept = self._kept, None
        if kept is not None:
            try:
                kept.load_policy(folder, version)
                return kept
            except MismatchError:
                pass  # a model of another shape: a new engine will say if it cannot be had
            except BaseException:
                kept.close()
                raise
            kept.close()
        return start_engine(self._job, folder, version, partner=partner)


def start_engine(job: Job, folder: Path, version: int, *, partner: Partner | None = None) -> Engine:
    """A new engine as the job wants it, with this policy. Raises MismatchError, EngineError."""
    settings, dtype = job.engine, job.engine.dtype or job.student.dtype
    if settings.kind == "hf":
        from mopd_dataplane.rollout.engines.hf import HfEngine

        return HfEngine(
            folder, slots=settings.slots, policy_version=version, dtype=dtype, device=resolve_device(settings.device),
            threads=settings.threads, partner=partner,
        )  # fmt: skip
    assert partner is None, "the job file refuses rollout.teacher_mix with vLLM"
    if settings.url:
        from mopd_dataplane.rollout.engines.vllm_server import ServerEngine

        return ServerEngine(
            folder, url=settings.url, slots=settings.slots, policy_version=version, noise=settings.noise,
            reload=settings.reload,
        )  # fmt: skip
    from mopd_dataplane.rollout.engines.vllm import VllmEngine

    return VllmEngine(
        folder, slots=settings.slots, policy_version=version, dtype=dtype, noise=settings.noise,
        threads=settings.threads, options=settings.options, sleeps=not settings.keep,
    )  # fmt: skip
