"""The packs of one training step, as bars of samples, and the packs of each rank."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from mopd_dataplane.plan.balance import deal_steps, pack_costs
from mopd_dataplane.query.job import remembered_job
from mopd_dataplane.query.lineage import step_lineage

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store


MOST_RANKS = 1024


def step_page(store: Store, snapshot: Snapshot, stage: str, step: int, ranks: int = 0) -> dict[str, Any]:
    """`step`: its row; `packs`: number, teacher, tokens and members (uid, total_len, domain); `budget` of a pack;
    `ranks`: packs and share of the mean work of each data-parallel rank that the packs are dealt to.

    ranks: how many; 0 takes the job's. Raises UnknownNameError when the stage has no such step.
    """
    line = step_lineage(store, stage, step, snapshot)
    plan = line.plan.to_pylist()[0]
    settings = json.loads(plan["settings"])
    packs: dict[int, dict[str, Any]] = {}
    for sample in line.samples.to_pylist():
        pack = packs.setdefault(
            sample["pack"], {"pack": sample["pack"], "teacher": sample["teacher"], "tokens": 0, "members": []}
        )
        pack["tokens"] += sample["total_len"]
        pack["members"].append({key: sample[key] for key in ("uid", "total_len", "loss_tokens", "domain")})
    row = line.step.to_pylist()[0]
    return {
        "step": row | {"created_at": row["created_at"].isoformat()},
        "packs": list(packs.values()),
        "budget": settings.get("pack_tokens", 0),
        "stats": json.loads(plan["stats"]),
        "steps": _around(store, snapshot, stage),
        "ranks": _dealt(list(packs.values()), min(ranks, MOST_RANKS) or _data_parallel(store)),
    }


def _dealt(packs: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The packs of a step that each rank gets, dealt as the loader deals them."""
    lengths = np.array([member["total_len"] for pack in packs for member in pack["members"]])
    starts = np.cumsum([0, *(len(pack["members"]) for pack in packs)])
    dealt, load = deal_steps(pack_costs(lengths, starts), np.array([0, len(packs)]), ranks)
    mean = float(load[0].mean())
    return [
        {"packs": sorted(packs[at]["pack"] for at in own if at >= 0), "work": work / mean if mean else 0.0}
        for own, work in zip(dealt[0].tolist(), load[0].tolist(), strict=True)
    ]


def _data_parallel(store: Store) -> int:
    """Ranks of the job that made the store; 1 where no job did."""
    scale = remembered_job(store).get("scale", {})
    return max(1, int(scale.get("ranks", 1)) // max(1, int(scale.get("context_parallel", 1))))


def _around(store: Store, snapshot: Snapshot, stage: str) -> dict[str, Any]:
    rows = store.table("steps", ["stage", "step"], snapshot=snapshot).to_pylist()
    steps = [row["step"] for row in rows if row["stage"] == stage]
    return {"first": min(steps), "last": max(steps)}
