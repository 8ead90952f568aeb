"""vLLM on this machine: checks that it is installed, and starts an engine whose core is a separate process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from mopd_dataplane.base.extras import is_installed
from mopd_dataplane.errors import EngineError, InputError
from mopd_dataplane.models.hf import model_shape, quiet_transformers

_CPU_CACHE_BYTES = 4 << 30
"""Upper bound of the cache of keys and values on a CPU, in bytes, unless the job sets another."""


def require_vllm() -> None:
    """Raise InputError unless vLLM can be imported."""
    if not is_installed("vllm"):
        raise InputError(
            "vLLM is not installed here: pip install 'mopd-dataplane[train,vllm]' on a machine with a GPU; "
            "docs/engines.md has the CPU build. A running server, given by its URL, needs none"
        )


def start(folder: Path, arguments: Mapping[str, Any], *, threads: int) -> Any:
    """Start a vllm.LLMEngine whose core is a separate process. Raises InputError, EngineError."""
    quiet_transformers()
    with _environment(threads), _deaf_to_interrupts():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        options = {"model": str(folder), "disable_log_stats": True, "skip_tokenizer_init": True, **arguments}
        if current_platform.is_cpu():
            options = {"enforce_eager": True, "kv_cache_memory_bytes": _cache_bytes(folder, options), **options}
        try:
            settings = EngineArgs(**options)
        except TypeError as error:
            raise InputError(f"engine.options: {error}; they are vLLM's EngineArgs") from None
        try:
            engine = LLMEngine.from_engine_args(settings)
        except Exception as error:
            raise EngineError(f"vLLM did not start with {folder}: {_told(error)}; its own output says more") from error
    threading.Thread(target=_report_death, args=(engine.engine_core,), name="vllm-death", daemon=True).start()
    return engine


def can_sleep() -> bool:
    """Check if this build of vLLM can free the device without ending: its CUDA and ROCm builds can."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available())


def _report_death(core: Any) -> None:
    """Wake the caller that waits for an answer of vLLM's process once that process has died.

    vLLM's synchronous client notices the death but does not wake the waiting caller.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    connection.wait([process.sentinel for process in core.resources.engine_manager.processes])
    core.outputs_queue.put_nowait(EngineDeadError())
    for future in list(core.utility_results.values()):
        if not future.done():
            future.set_exception(EngineDeadError())


def is_dead(engine: Any) -> bool:
    """Check if the process of a started engine has died."""
    return not all(process.is_alive() for process in engine.engine_core.resources.engine_manager.processes)


def _cache_bytes(folder: Path, arguments: Mapping[str, Any]) -> int:
    """Return the bytes of keys and values of every slot at full length, up to _CPU_CACHE_BYTES on a CPU."""
    shape = model_shape(folder)
    heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
    width = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    token = 2 * shape["num_hidden_layers"] * heads * width * (4 if arguments["dtype"] == "float32" else 2)
    return int(min(_CPU_CACHE_BYTES, 2 * token * arguments["max_model_len"] * arguments["max_num_seqs"] + (64 << 20)))


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    """Set environment variables for the start of vLLM. Values that the user has set take precedence."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for answers alone
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    if threads:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    unset = [name for name in variables if not os.environ.get(name)]
    os.environ.update({name: variables[name] for name in unset})
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Start processes inside the block that never receive Ctrl-C, which a terminal sends to them too.

    vLLM's processes would end in the middle of a step, with a traceback; this process ends them once it has stopped
    sampling. A blocked signal stays blocked in children, whatever handlers they set.
    """
    resource_tracker.ensure_running()  # its start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Turn whatever vLLM raises into an EngineError: the engine is not used again."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM failed: {_told(error)}; every logged token is kept: run again to continue with a new engine"
        ) from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
