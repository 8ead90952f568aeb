"""An accelerator without hardware: a torch device `standin` that computes on the CPU and shares no memory with it.

    refuses   an operation over tensors of the device and of the host, as CUDA does (a host scalar may pass)
    counts    every copy from the device to the host, with the line of this package that asked for it

`Tensor.to("standin")`, factories with `device=`, modules, autograd and views work as on any backend, since torch's own
dispatcher sends what touches the device here (PrivateUse1 with a Python kernel for everything). While `active()`,
torch.accelerator names it, so that `device = "auto"` finds it. With this folder on PYTHONPATH torch loads it at import
(entry point `torch.backends`), and MOPD_STAND_IN=FOLDER makes it active: a whole job can run on it, its trainer
included, and each process leaves its counts in the folder as JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "standin"
_aten = torch.ops.aten
_ACROSS = {_aten.copy_.default, _aten._to_copy.default}
"""What may see both sides: copies."""
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
"""What takes indices from the host, as on CUDA, where they are copied to the device."""
_READS = {
    _aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.masked_select.default,
    _aten.is_nonzero.default, _aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default,
}  # fmt: skip
"""What makes the host wait for a value of the device."""

host_copies: Counter[str] = Counter()
"""Copies and waits from device to host: `file:function` of this package, how often."""


class StandInTensor(torch.Tensor):
    """A tensor of the device; `raw` is the CPU tensor that holds its values."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> StandInTensor:
        """Wrap a CPU tensor."""
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            layout=raw.layout, device=torch.device(NAME, 0), requires_grad=False,
        )  # fmt: skip
        tensor.raw = raw
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation with a tensor of the device in it."""
        if func._can_decompose():  # in inference mode torch leaves that to us
            return func.decompose(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StandInTensor({self.raw!r})"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, StandInTensor)]
    _refuse_mixing(func, args, tensors, ours)
    lands = _is_ours(device) if device is not None else bool(ours)
    if func in _READS or (ours and device is not None and not lands):
        _count()
    if func is _aten.copy_.default and isinstance(args[1], StandInTensor) and not isinstance(args[0], StandInTensor):
        _count()
        args[0].copy_(args[1].raw)
        return args[0]
    raw_args, raw_kwargs = tree_map_only(StandInTensor, lambda tensor: tensor.raw, (args, kwargs))
    if device is not None and lands:
        raw_kwargs["device"] = torch.device("cpu")
    raw_kwargs.pop("pin_memory", None)
    out = func(*raw_args, **raw_kwargs)
    if not lands or func is _aten.set_.source_Storage:
        return out
    wrapped = tree_map_only(torch.Tensor, lambda tensor: StandInTensor(tensor), out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if ours else wrapped


def _refuse_mixing(func: Any, args: Any, tensors: list[torch.Tensor], ours: list[StandInTensor]) -> None:
    if not ours or len(ours) == len(tensors) or func in _ACROSS:
        return
    host = [tensor for tensor in tensors if not isinstance(tensor, StandInTensor) and tensor.dim() > 0]
    if host and func in _INDEXED and all(tensor.is_cpu and not tensor.is_floating_point() for tensor in host):
        return
    if not host and func._schema.is_mutable and isinstance(args[0], torch.Tensor):  # a scalar is read, not written
        host = [args[0]] if not isinstance(args[0], StandInTensor) else []
    if host:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and "
            f"{host[0].device}, in {func} at {_asked_by()}"
        )


def _is_ours(device: Any) -> bool:
    return torch.device(device).type == NAME


def _count() -> None:
    host_copies[_asked_by()] += 1


def _asked_by() -> str:
    """The innermost function of this package on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for package in ("mopd_dataplane/", "mopd_kernels/"):
            if f"/{package}" in path:
                return f"{path.rpartition(f'/{package}')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class _Stream:
    """The only queue of work; nothing ever waits in it."""

    device_type = NAME

    def synchronize(self) -> None:
        """Everything is done."""

    def wait_stream(self, _other: _Stream) -> None:
        """There is no other."""


_STREAM = _Stream()


class _Backend:
    """What torch asks of a device's module (torch.standin)."""

    is_active = False

    def is_available(self) -> bool:
        """Whether torch.accelerator may name it."""
        return self.is_active

    def is_initialized(self) -> bool:
        """Nothing needs it."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        """The only one."""
        return 0

    def set_device(self, _device: Any) -> None:
        """There is one."""

    def device_count(self) -> int:
        """There is one."""
        return 1

    def manual_seed_all(self, _seed: int) -> None:
        """Draws are the CPU's."""

    def synchronize(self, _device: Any = None) -> None:
        """Nothing runs by itself."""

    def current_stream(self, _device: Any = None) -> _Stream:
        """The only one."""
        return _STREAM

    def stream(self, _stream: _Stream) -> AbstractContextManager[None]:
        """Work is done where it stands."""
        return nullcontext()

    def mem_get_info(self, _device: Any = None) -> tuple[int, int]:
        """Free and all bytes: enough for every model of the tests."""
        return 8 << 30, 16 << 30

    def empty_cache(self) -> None:
        """Nothing is kept."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may lower to."""
        return [torch.bfloat16, torch.float16]


backend = _Backend()


class _Hook(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined,misc]
    def is_available(self) -> bool:
        return backend.is_active

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, _device: int) -> bool:
        return True


_dispatch: torch.library.Library | None = None


def register() -> None:
    """Make the device known to torch; once a process."""
    global _dispatch
    if _dispatch is not None:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=backend, hook=_Hook())
    _dispatch = torch.library.Library("_", "IMPL")
    _dispatch.fallback(_fallback, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    _kept.append(aten)
    if folder := os.environ.get("MOPD_STAND_IN"):
        backend.is_active = True
        atexit.register(lambda: Path(folder, f"{os.getpid()}.json").write_text(json.dumps(host_copies)))


_kept: list[Any] = []


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _run(_aten.copy_.default, (target, source), {})


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(func, args, kwargs)


@contextmanager
def active() -> Iterator[Counter[str]]:
    """torch.accelerator names the device; what is copied to the host meanwhile."""
    register()
    backend.is_active = True
    host_copies.clear()
    try:
        yield host_copies
    finally:
        backend.is_active = False
