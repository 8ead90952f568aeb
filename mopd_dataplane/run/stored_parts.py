"""Parts of a stage's stored samples, of which each window takes one (stages.NAME.window_samples).

The samples are cut once, in the order of their rows, before the first window: what is imported or deleted later moves
no sample into another part. Each pass takes every part once, in a seeded order of its own.
"""

import json
from dataclasses import dataclass

from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.plan.shuffle import permutation, philox_key
from mopd_dataplane.store.dataset import Store

PARTS = "parts"
"""Kind of the event that holds where a stage's samples are cut."""


@dataclass(frozen=True)
class Parts:
    """Where the samples of a stage are cut, and the order in which windows take the parts.

    Example: cuts (0, 100, 180) are two parts; windows 0 and 1 take each of them once, windows 2 and 3 once again.
    """

    stage: str
    seed: int
    cuts: tuple[int, ...]
    """[parts + 1] row ids: part p has the stage's samples from row cuts[p] up to, but not including, cuts[p + 1]."""

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def rows_of(self, window: int) -> range:
        """Row ids of a window's samples; samples of other stages may lie between them."""
        passes, turn = divmod(window, len(self))
        order = permutation(len(self), philox_key(self.seed, "parts", self.stage, passes))
        part = int(order[turn])
        return range(self.cuts[part], self.cuts[part + 1])


def record_parts(store: Store, parts: Parts) -> None:
    """Record where a stage's samples are cut; what was recorded before stays."""
    detail = {"seed": parts.seed, "cuts": list(parts.cuts)}
    store.add_event(f"{PARTS}/{parts.stage}", parts.stage, PARTS, -1, float(len(parts)), detail)


def recorded_parts(store: Store, stage: str) -> Parts | None:
    """Where a stage's samples are cut; None before its first window."""
    events = store.table("events", ["detail"], filter=f"kind = '{PARTS}' AND stage = '{stage}'")
    if not events.num_rows:
        return None
    detail = json.loads(events["detail"][0].as_py())
    return Parts(stage, detail["seed"], tuple(detail["cuts"]))


def rows_of_window(store: Store, stage: str, window: int) -> range:
    """Row ids of a window's samples. Raises UnknownNameError before the stage's samples are cut into parts."""
    parts = recorded_parts(store, stage)
    if parts is None:
        raise UnknownNameError(
            f"stage {stage!r} has no windows in {store.uri} yet; plan the first one: mopd plan JOB --stage {stage}"
        )
    return parts.rows_of(window)
