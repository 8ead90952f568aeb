"""LoRA adapters in a vLLM started by this process: the base is in memory once, each adapter is a LoRA request on it.

vLLM's prefix cache tells adapters apart by name and path of a request. The name here is the digest of the adapter's
weights, so different adapters never share a cached prefix.

vLLM silently ignores factors of modules that it cannot adapt. So each adapter is checked for the modules that it
reaches (see vllm_worker.py), and refused if vLLM ignores some of its factors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.models.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    factor_modules,
    highest_rank,
    outside_layers,
    read_adapter_config,
)
from mopd_dataplane.models.vllm_local import answering

if TYPE_CHECKING:
    from mopd_dataplane.job.sections import Lora

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank."""
HEAD = "lm_head"
_WORKER = "mopd_dataplane.models.vllm_worker.AdapterWorker"


def check_for_vllm(folder: Path) -> None:
    """Check that vLLM computes an adapter as peft does. Raises MismatchError if not."""
    config = read_adapter_config(folder)
    where = folder / ADAPTER_CONFIG
    if config.get("use_dora"):
        raise MismatchError(f"{where}: use_dora = true, which vLLM's LoRA does not compute; {_otherwise()}")
    if highest_rank(folder) > RANKS[-1]:
        raise MismatchError(f"{where}: rank {highest_rank(folder)}, and vLLM takes at most {RANKS[-1]}; {_otherwise()}")


def check_for_scoring(folder: Path, *, url: str, reads: str) -> None:
    """Check that an adapter can score in vLLM with what is read there (`score.reads`). Raises MismatchError if not."""
    check_for_vllm(folder)
    if reads in ("states", "extract_hidden_states"):
        return
    said = f"{folder}: score.reads = {reads!r} makes vLLM fail where it is prepared to adapt the LM head"
    if url:
        raise MismatchError(
            f'{said}, as the server at {url} is by default; set score.reads = "states", or take out url'
        )
    if outside := outside_layers(folder):
        raise MismatchError(
            f"{said}, and this adapter has factors outside the numbered layers ({outside}); set "
            'score.reads = "states", or give its merged form'
        )


def _otherwise() -> str:
    kinds = 'engine.kind, score.engine = "hf"'
    return f"give its merged form (peft: merge_and_unload), or let transformers run it ({kinds})"


def room_for(base: Path, adapters: Sequence[Path], trained: Lora | None = None, *, dtype: str) -> dict[str, Any]:
    """Return the EngineArgs of a vLLM that takes these adapters on a base, one at a time, and those that a stage
    trains.

    The LM head is excluded unless an adapter changes it: vLLM would allocate factors for the whole vocabulary, and its
    prompt_logprobs end the engine when the head may be adapted.
    Raises MismatchError for an adapter that vLLM cannot compute.
    """
    for folder in adapters:
        check_for_vllm(folder)
    _check_dtype(dtype)
    ranks = [highest_rank(folder) for folder in adapters]
    targets = {_end(module) for folder in adapters for module in factor_modules(folder)}
    if trained is not None:
        ranks.append(trained.r)
        named = trained.target_modules
        targets |= _layer_modules(base) if isinstance(named, str) else set(map(_end, named))
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": max(1, len(adapters)),
        "max_lora_rank": next(rank for rank in RANKS if rank >= max(ranks)),
        "lora_target_modules": sorted(targets),
        "worker_extension_cls": _WORKER,
    }


def _check_dtype(dtype: str) -> None:
    """Check that vLLM's kernels for adapters take a dtype: its Triton ones need 16 bits. Raises MismatchError."""
    from vllm.platforms import current_platform

    if dtype == "float32" and not current_platform.is_cpu():
        raise MismatchError(
            'vLLM applies adapters in bfloat16 on this device, not in "float32"; set engine.dtype (of a teacher: '
            'teachers.NAME.dtype) = "bfloat16"'
        )


def _layer_modules(base: Path) -> set[str]:
    """Return the last parts of the names of the matrices in a model's numbered layers."""
    names = set()
    for file in base.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as stored:
            for name in stored.keys():  # noqa: SIM118
                inside = re.search(r"\.\d+\.(?:.*\.)?(\w+)\.weight$", name)
                if inside and len(stored.get_slice(name).get_shape()) == 2:
                    names.add(inside[1])
    return names


class VllmAdapters:
    """The adapters that were loaded into a running engine.

    apart: modules whose factors the caller applies itself.
    """

    def __init__(self, engine: Any, *, apart: Collection[str] = ()) -> None:
        self._engine = engine
        self._apart = frozenset(apart)
        self._given: dict[str, Any] = {}
        self._named = 0

    def request(self, folder: Path, digest: str) -> Any:
        """Return the LoRA request for the adapter with this digest, loading it into vLLM if it is not there.

        Raises MismatchError when vLLM would ignore some of its factors, EngineError when loading fails.
        """
        if digest not in self._given:
            from vllm.lora.request import LoRARequest

            check_for_vllm(folder)
            room = self._engine.vllm_config.lora_config.max_lora_rank
            if highest_rank(folder) > room:
                raise MismatchError(
                    f"{folder} has rank {highest_rank(folder)}, and vLLM was started with room for {room}; start a new "
                    "engine for it"
                )
            self._named += 1
            request = LoRARequest(lora_name=digest, lora_int_id=self._named, lora_path=str(folder.resolve()))
            with answering():
                self._engine.add_lora(request)
                missed = self._engine.collective_rpc("unreached", args=(self._named,))
            left_out = {name for name in set.intersection(*map(set, missed)) if _end(name) not in self._apart}
            if left_out:
                self._remove(request)
                raise MismatchError(
                    f"{folder / ADAPTER_WEIGHTS}: vLLM adapts none of {sorted(left_out)[:3]} ({len(left_out)} modules "
                    "of this adapter, by its own lora_target_modules or because the model has them in another form); "
                    + _otherwise()
                )
            self._given[digest] = request
        return self._given[digest]

    def keep_only(self, digest: str) -> None:
        """Unload every adapter from vLLM but the one with this digest."""
        for other in [other for other in self._given if other != digest]:
            self._remove(self._given.pop(other))

    def _remove(self, request: Any) -> None:
        with answering():
            self._engine.remove_lora(request.lora_int_id)


def _end(module: str) -> str:
    return module.rpartition(".")[2]
