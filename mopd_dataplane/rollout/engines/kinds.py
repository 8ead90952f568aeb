"""The kinds of engines: what each can do, and how it is opened. Importing this module loads none of them.

Another package offers one as an entry point of `mopd.engines`, or it is named `package.module:Name` as `engine.kind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.errors import UnknownNameError

if TYPE_CHECKING:
    from mopd_dataplane.job import sections
    from mopd_dataplane.rollout.engines.engine import Engine
    from mopd_dataplane.rollout.engines.hf import MixedTeacher


class EngineKind(ABC):
    """A kind of engine, created without arguments. Its attributes tell which settings a job may use with it."""

    records: tuple[str, ...] = ()
    """Supported values of `rollout.record`."""
    mixes: bool = False
    """True if it can draw from two models (`rollout.teacher_mix`)."""
    stays: bool = False
    """True if it takes long to start, so that a run keeps it between policies (`engine.keep`)."""
    here: bool = False
    """True if it decodes in this process, on `engine.device`."""
    settings: tuple[str, ...] = ("options",)
    """Supported keys of `[engine]` beside kind, slots, threads and dtype."""
    adapters: bool = True
    """True if it can decode a policy that is an adapter on a base."""
    leaves_adapters: bool = True
    """True if an engine that was opened on an adapter can also load whole weights."""
    highest_rank: int = 0
    """Largest supported rank of an adapter; 0 for any."""
    is_checked: bool = False
    """Whether its log-probs are compared with transformers' plain pass before it samples for a stage."""
    package: str = ""
    """Module that must be installed on its machine; empty for none."""

    @abstractmethod
    def open(
        self,
        folder: Path,
        version: int,
        settings: sections.Engine,
        *,
        dtype: str,
        mixed_teacher: MixedTeacher | None,
        adapter: sections.Lora | None = None,
    ) -> Engine:
        """Open an engine with this policy, every slot free.

        mixed_teacher: passed only to a kind that mixes. adapter: settings of the adapters that later policies will be,
        if the stage trains an adapter.
        Raises MismatchError for a model that it cannot decode, EngineError when it does not start.
        """

    def check_adapter(self, folder: Path) -> None:  # noqa: B027  most kinds take what transformers takes
        """Check that an adapter is decoded as peft does. Raises MismatchError if not."""


class Hf(EngineKind):
    """Transformers, in this process."""

    records = ("sampling_mask", "experts")
    mixes = True
    here = True
    settings = ("device",)

    def open(
        self,
        folder: Path,
        version: int,
        settings: sections.Engine,
        *,
        dtype: str,
        mixed_teacher: MixedTeacher | None,
        adapter: sections.Lora | None = None,
    ) -> Engine:
        from mopd_dataplane.models.devices import resolve_device
        from mopd_dataplane.rollout.engines.hf import HfEngine

        return HfEngine(
            folder, slots=settings.slots, policy_version=version, dtype=dtype, device=resolve_device(settings.device),
            threads=settings.threads, mixed_teacher=mixed_teacher,
        )  # fmt: skip


class Vllm(EngineKind):
    """vLLM, started here or a running server."""

    stays = True
    is_checked = True
    settings = ("url", "reload", "options", "noise", "keep")
    leaves_adapters = False
    highest_rank = 512
    package = "vllm"

    def check_adapter(self, folder: Path) -> None:
        from mopd_dataplane.models.vllm_adapters import check_for_vllm

        check_for_vllm(folder)

    def open(
        self,
        folder: Path,
        version: int,
        settings: sections.Engine,
        *,
        dtype: str,
        mixed_teacher: MixedTeacher | None,
        adapter: sections.Lora | None = None,
    ) -> Engine:
        if settings.url:
            from mopd_dataplane.rollout.engines.vllm_server import ServerEngine

            return ServerEngine(
                folder, url=settings.url, slots=settings.slots, policy_version=version, noise=settings.noise,
                reload=settings.reload, adapter=adapter,
            )  # fmt: skip
        from mopd_dataplane.rollout.engines.vllm import VllmEngine

        return VllmEngine(
            folder, slots=settings.slots, policy_version=version, dtype=dtype, noise=settings.noise,
            threads=settings.threads, options=settings.options, sleeps=not settings.keep, adapter=adapter,
        )  # fmt: skip


ENGINES: dict[str, type[EngineKind]] = {"hf": Hf, "vllm": Vllm}
"""Built-in kinds, by their names in `engine.kind`."""


def engine_kind(name: str) -> EngineKind:
    """Return the kind of this name. Raises UnknownNameError."""
    plugin: Any = find_plugin("mopd.engines", name, ENGINES)
    if not (isinstance(plugin, type) and issubclass(plugin, EngineKind)):
        raise UnknownNameError(f"engine {name!r} is no class derived from {__name__}.EngineKind")
    return plugin()


def kinds_that(can: Callable[[type[EngineKind]], bool]) -> str:
    """List the built-in kinds with a capability, as written in a job, for messages.

    >>> kinds_that(lambda kind: kind.mixes)
    '"hf"'
    """
    return " or ".join(f'"{name}"' for name, kind in ENGINES.items() if can(kind))
