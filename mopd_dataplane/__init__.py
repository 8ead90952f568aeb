"""mopd-dataplane: the data plane of multi-teacher on-policy distillation.

The flow, one line a component:

    rollout   prompts  -> samples    the student writes; every token is logged as it is decoded
    store     samples  -> datasets   metadata apart from payload, exactly once, pinned snapshots
    score     samples  -> signals    each sample's teacher gives every token a log-prob
    plan      metadata -> plan       global shuffle, packing, balance, teacher order
    load      plan     -> batches    one shared-memory copy per node
    train     batches  -> policy     reverse KL and its relatives, from stored signals
    query     store    -> answers    SQL, one sample token by token, one HTML report

Importing this package loads neither torch nor lance.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import MopdError

if TYPE_CHECKING:
    from mopd_dataplane.job.job import Job
    from mopd_dataplane.job.load import load_job
    from mopd_dataplane.job.objectives import Divergence, Term
    from mopd_dataplane.load.spec import LoadSpec
    from mopd_dataplane.load.stream import BatchStream
    from mopd_dataplane.records import Batch, Pack, PlanWindow, Prompt, Sample, Signal, Snapshot, Teacher, sample_uid
    from mopd_dataplane.rollout.engines.engine import Engine, Request, StepOutput
    from mopd_dataplane.rollout.engines.kinds import EngineKind
    from mopd_dataplane.rollout.tools.environments import Conversation, Environment
    from mopd_dataplane.run.pipeline import rollout_stage, run_job, score_stage, train_stage
    from mopd_dataplane.run.steps.plan import plan_stage
    from mopd_dataplane.run.steps.plan_ahead import plan_ahead
    from mopd_dataplane.run.steps.reward import reward_stage
    from mopd_dataplane.score.signal_kinds import TokenSignal
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.group_commit.writer import GroupWriter

__version__ = "0.1.0"
__all__ = [
    "Batch", "BatchStream", "Conversation", "Divergence", "Engine", "EngineKind", "Environment", "GroupWriter", "Job",
    "LoadSpec", "MopdError", "Pack", "PlanWindow", "Prompt", "Request", "Sample", "Signal", "Snapshot", "StepOutput",
    "Store", "Teacher", "Term", "TokenSignal", "__version__", "create_store", "load_job", "open_store", "plan_ahead",
    "plan_stage", "reward_stage", "rollout_stage", "run_job", "sample_uid", "score_stage", "train_stage",
]  # fmt: skip


def open_store(uri: str, *, storage_options: dict[str, str] | None = None) -> Store:
    """Open an existing store (a folder or an object-store URI) for reading and writing.

    Raises UnknownNameError when there is no store, MismatchError when another format version wrote it, DamagedError
    when its mark is not as it was written.
    """
    from mopd_dataplane.store.dataset import Store

    return Store.open(uri, storage_options=storage_options)


def create_store(uri: str, *, storage_options: dict[str, str] | None = None, single_writer: bool = False) -> Store:
    """Open a store, creating it if there is nothing at `uri`; single_writer and errors: see Store.create."""
    from mopd_dataplane.store.dataset import Store

    return Store.create(uri, storage_options=storage_options, single_writer=single_writer)


# Where torchao is installed, transformers imports it with its first model, and it warns of kernels for other hardware.
for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

_RECORDS = ("Batch", "Pack", "PlanWindow", "Prompt", "Sample", "Signal", "Snapshot", "Teacher", "sample_uid")
_HOMES = {
    **dict.fromkeys(_RECORDS, "records"), "Store": "store.dataset",
    "GroupWriter": "store.group_commit.writer", "Job": "job.job", "load_job": "job.load",
    **dict.fromkeys(("run_job", "rollout_stage", "score_stage", "train_stage"), "run.pipeline"),
    "reward_stage": "run.steps.reward", "plan_stage": "run.steps.plan",
    "plan_ahead": "run.steps.plan_ahead",
    "LoadSpec": "load.spec", "BatchStream": "load.stream",
    **dict.fromkeys(("Engine", "Request", "StepOutput"), "rollout.engines.engine"),
    "EngineKind": "rollout.engines.kinds", **dict.fromkeys(("Divergence", "Term"), "job.objectives"),
    "TokenSignal": "score.signal_kinds",
    **dict.fromkeys(("Conversation", "Environment"), "rollout.tools.environments"),
}  # fmt: skip
"""Loaded at first use: `mopd --help` waits for neither numpy nor lance."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"mopd_dataplane.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
