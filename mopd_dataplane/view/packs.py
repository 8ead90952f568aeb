"""One training step as it lay in memory: packs as bars of samples, and what each rank got."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mopd_dataplane.query.lineage import step_lineage

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store


def step_page(store: Store, stage: str, step: int) -> dict[str, Any]:
    """`step`: its row; `packs`: number, teacher, tokens and members (uid, total_len, domain); `budget` of a pack.

    Raises UnknownNameError when the stage has no such step.
    """
    line = step_lineage(store, stage, step)
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
        "steps": _around(store, stage),
    }


def _around(store: Store, stage: str) -> dict[str, Any]:
    steps = [row["step"] for row in store.table("steps", ["stage", "step"]).to_pylist() if row["stage"] == stage]
    return {"first": min(steps), "last": max(steps)}
