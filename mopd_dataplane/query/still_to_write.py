"""What the stages that have begun will still add to a store, at the rate of their iterations so far."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mopd_dataplane.query.job import remembered_job
from mopd_dataplane.store.dataset import Store

PLANNED = 'select stage, count(distinct "window") as windows from plans group by stage'
FREED_BY = {"hidden_passes": "/hidden", "hidden_versions": "/hidden", "stats_versions": "token_stats"}
"""Keys of [retain], and the end of the name of the table whose old rows they free."""


class StillToWrite(NamedTuple):
    """The iterations of a stage that are left."""

    stage: str
    done: int
    """Iterations that are planned."""
    iterations: int
    """Iterations that the job names."""
    iteration_bytes: float
    """Mean bytes of an iteration in the tables, of those so far."""

    @property
    def bytes(self) -> float:
        """Bytes that the iterations to come add to the tables."""
        return (self.iterations - self.done) * self.iteration_bytes


def still_to_write(store: Store, tables: Mapping[str, Mapping[str, Any]]) -> list[StillToWrite]:
    """Return what is left of each stage that samples its data, has begun, and has iterations left.

    tables: Store.info()["tables"]. Bytes that can be freed are left out, and so are tables of which the job frees rows.
    Iterations of all stages count as equally large. Policies are in no table; `[retain]` bounds their number.
    """
    job = remembered_job(store)
    planned = {row["stage"]: row["windows"] for row in store.sql(PLANNED).to_pylist()}
    freed = tuple(end for key, end in FREED_BY.items() if job.get("retain", {}).get(key))
    growing = [table for name, table in tables.items() if not name.endswith(freed)]
    size = sum(table["bytes"] - table["freeable_bytes"] for table in growing)
    return [
        StillToWrite(stage["name"], planned[stage["name"]], stage["iterations"], size / sum(planned.values()))
        for stage in job.get("stages", [])
        if stage.get("data", "rollout") == "rollout" and 0 < planned.get(stage["name"], 0) < stage.get("iterations", 1)
    ]
