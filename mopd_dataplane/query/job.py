"""What a store remembers of the job that made it: the job.json beside its tables, when there is one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store


def remembered_job(store: Store) -> dict[str, Any]:
    """The job as plain values; empty for a store that no job made, or that lies on an object store."""
    file = store.root / "job.json" if store.root is not None else None
    if file is None or not file.is_file():
        return {}
    job: dict[str, Any] = json.loads(file.read_text())
    return job


def stage_starts(job: dict[str, Any]) -> dict[str, str]:
    """Stage name -> policy it starts from."""
    return {stage["name"]: stage["start"] for stage in job.get("stages", [])}
