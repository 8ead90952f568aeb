"""Memory of a trainer on this machine's CPU beside what `mopd check` says that it needs.

Two optimizer steps of the project's own trainer on a few tokens, so that activations are next to nothing. Peak memory
is the largest resident size of the process during them, as the kernel keeps it, less the size that it had before the
weights were read; what a process loads once is loaded by a tiny model first.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.bench.calls import apart
from mopd_dataplane.bench.peak import forget_peak, peak_bytes, resident_bytes
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.models.adapter_files import is_adapter
from mopd_dataplane.models.hf import check_model_folder
from mopd_dataplane.run.estimate import training_bytes

if TYPE_CHECKING:
    from mopd_dataplane.job.sections import Train
    from mopd_dataplane.train.loop import Trainer

TOKENS = (8, 8)
"""Tokens of the two sequences of a step."""
DEADLINE_S = 600.0
KINDS = (
    ("float32", 0, ""), ("bfloat16", 0, ""), ("bfloat16", 0, "master_weights"), ("float32", 0, "offload"),
    ("bfloat16", 0, "offload"), ("float32", 32, ""), ("bfloat16", 32, ""),
)  # fmt: skip
"""student.dtype, rank of the adapter (0 trains the weights), and a key of [train] that is true."""


def measure(model: Path) -> list[dict[str, Any]]:
    """One row for each of KINDS.

    Raises UnknownNameError or InputError for a folder that holds no model, MismatchError for one that holds an adapter,
    EngineError when measuring fails.
    """
    check_whole_model(model)
    return [apart(measured, str(model), *kind, timeout_s=DEADLINE_S) for kind in KINDS]


def check_whole_model(folder: Path) -> None:
    """Raise UnknownNameError or InputError for a folder that holds no model, MismatchError for an adapter's."""
    if is_adapter(folder):
        raise MismatchError(f"{folder} is an adapter; give the folder of a whole model: its base, or its merged form")
    check_model_folder(folder)


def measured(model: str, dtype: str, rank: int, option: str) -> dict[str, Any]:
    """The row of one of KINDS, measured in this process."""
    from mopd_dataplane.job.sections import Lora, Train
    from mopd_dataplane.models.adapters import trained_tensors
    from mopd_dataplane.models.tiny import FAMILIES, of_family

    keys: dict[str, Any] = {option: True} if option else {}
    train = Train(lora=Lora(r=rank), **keys)
    with tempfile.TemporaryDirectory() as tiny:
        of_family(FAMILIES["smollm2"], Path(tiny), seed=0, dtype="float32")
        _steps(_trainer(Path(tiny), dtype, train))
    gc.collect()
    before = resident_bytes()
    trainer = _trainer(Path(model), dtype, train)
    forget_peak()
    _steps(trainer)
    bytes_used = peak_bytes() - before
    adapter = sum(weight.numel() for weight in trained_tensors(trainer.student.model).values()) if rank else 0
    parameters = sum(weight.numel() for weight in trainer.student.parameters()) - adapter
    computed = sum(training_bytes(parameters, train, dtype=dtype, adapter=adapter))
    return {
        "dtype": dtype, "rank": rank, "option": option, "parameters": parameters, "adapter_parameters": adapter,
        "computed_bytes": computed, "peak_bytes": bytes_used, "peak_over_computed": bytes_used / computed,
    }  # fmt: skip


def _trainer(model: Path, dtype: str, train: Train) -> Trainer:
    import torch

    from mopd_dataplane.job.objectives import CrossEntropyTerm, Objective
    from mopd_dataplane.train.loop import Trainer
    from mopd_dataplane.train.objective import ObjectiveLoss
    from mopd_dataplane.train.ranks import Ranks
    from mopd_dataplane.train.student import load_student

    ranks, forward = Ranks.join("cpu", environment={}), getattr(torch, dtype)
    student = load_student(model, ranks, train, dtype=forward)
    return Trainer(student, ObjectiveLoss(Objective(cross_entropy=CrossEntropyTerm())), train, ranks)


def _steps(trainer: Trainer) -> None:
    """Two: the moments are made by the first."""
    from mopd_dataplane.bench.gpu_step import random_batch
    from mopd_dataplane.train.spec import Window

    window = Window(window=0, plan_digest="", snapshot_digest="", steps=2, policy_version=0)
    for step in range(window.steps):
        trainer.step(random_batch(1, list(TOKENS), 8), window, step)
