"""The job that made a store: the job.json beside its tables, if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store


def remembered_job(store: Store) -> dict[str, Any]:
    """The job as plain values; empty for a store that no job made."""
    return store.read_json("job.json") or {}


def stage_starts(job: dict[str, Any]) -> dict[str, str]:
    """Stage name -> policy it starts from."""
    return {stage["name"]: stage["start"] for stage in job.get("stages", [])}
