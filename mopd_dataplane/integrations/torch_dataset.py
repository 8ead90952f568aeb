"""Planned steps as a dataset of torch, for loops that take a DataLoader: accelerate, Lightning, your own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.load.stream import BatchStream
from mopd_dataplane.records import Pack


class StoreDataset(IterableDataset[dict[str, Any]]):
    """One item for each planned step: {"step", "loss_tokens", "packs": [{name: tensor}, …], "next"}.

    packs: this rank's share of the step, with the fields of `records.Pack` and `position_ids`; a field without values
    is left out. The tensors are copies, so they may be kept and may cross from a worker process; BatchStream itself
    copies nothing. loss_tokens: trained tokens of all ranks; divide the sum of token losses by it. next: the position
    after this step, the same at any number of ranks. A trainer that prefetches saves the `next` of the last step that
    it trained on, and gives it to `load_state_dict`; `state_dict` is the position of the next item, as torchdata's
    StatefulDataLoader needs it. A pass begins there, and at the first window after a pass that ended.

    Use it with `DataLoader(dataset, batch_size=None)`. With workers, one of them reads and the others have nothing to
    do, because the store's loader is a process of its own already.

    Example: DataLoader(StoreDataset("runs/demo", LoadSpec(stage="student", signals=("logprob",))), batch_size=None)
    """

    def __init__(
        self,
        store: str | Path,
        spec: LoadSpec,
        *,
        windows: Sequence[int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """windows: those to read, in order; None reads all that are planned, until the plan log is closed.

        rank, world_size: of data parallelism; by default those of torch.distributed, else of torchrun's environment.
        Wrappers must not divide the items again: pass only model and optimizer to `Accelerator.prepare`.
        """
        self._store, self._spec = str(store), spec
        self._windows = None if windows is None else list(windows)
        self._rank, self._world_size = rank, world_size
        self._next = self._first

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Steps from the current position on. Raises what BatchStream raises."""
        worker = get_worker_info()
        if worker is not None and worker.id:
            return
        rank, world_size = self._ranks()
        stream = BatchStream(self._store, self._spec, windows=self._windows, rank=rank, world_size=world_size)
        try:
            stream.load_state_dict(self._next)
            for batch in stream:
                packs = []
                for pack in batch.packs:
                    packs.append(_copy(pack))
                    batch.release(pack)
                self._next = stream.state_dict()
                yield {
                    "step": batch.step, "loss_tokens": batch.loss_tokens, "packs": packs, "next": dict(self._next)
                }  # fmt: skip
        finally:
            stream.close()
        self._next = self._first

    def state_dict(self) -> dict[str, int]:
        """Position of the next step: {"window", "step"}."""
        return dict(self._next)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next pass at a saved position."""
        self._next = {"window": int(state["window"]), "step": int(state["step"])}

    def __getstate__(self) -> dict[str, Any]:
        """With the rank of the process that starts the workers: they are no members of its group."""
        rank, world_size = self._ranks()
        return self.__dict__ | {"_rank": rank, "_world_size": world_size}

    @property
    def _first(self) -> dict[str, int]:
        return {"window": self._windows[0] if self._windows else 0, "step": 0}

    def _ranks(self) -> tuple[int, int]:
        if self._rank is not None and self._world_size is not None:
            return self._rank, self._world_size
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _copy(pack: Pack) -> dict[str, Any]:
    """The tensors of a pack, in memory of their own."""
    values = {item.name: getattr(pack, item.name) for item in fields(pack) if item.name != "extra"}
    values |= {**pack.extra, "position_ids": pack.position_ids}
    present = {name: value for name, value in values.items() if value is not None and not isinstance(value, str)}
    names = {name: value for name, value in values.items() if isinstance(value, str) and value}
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in present.items()
    } | names
