"""How far a run is: its stage, iteration and time left, figures of its iterations, and the answers to look at.

Which stage and iteration runs is taken from the newest sample; how many there are, from the job that the store keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.query.job import remembered_job
from mopd_dataplane.store.rollouts.conditions import TABLE

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.index import Index

NEWEST_STAGE = f"""
    select stage, max(iteration) + 1 as iteration from {TABLE} where policy <> 'reference'
    group by stage order by max(sample_row) desc limit 1"""
FIGURES = """
    select iteration, count(*) as samples, avg(reward)::double as reward, avg(kl)::double as kl,
           avg(response_len)::double as response_len
    from {table} where stage = {stage} group by iteration order by iteration"""
LAST_ACTION = "train"
"""An iteration is done when it has been trained on."""


def run_state(store: Store, index: Index) -> dict[str, Any]:
    """State of the run at the index's snapshot.

    `stage` ("" without a sample), `iteration` counted from 1, `iterations` and `seconds_left` (None where not known),
    `later` stages that have not begun, `figures` of each iteration, the `worst` answer of each teacher, and when the
    newest sample was `written_at`.
    """
    stages = index.rows(NEWEST_STAGE)
    state: dict[str, Any] = {
        "stage": "", "iteration": 0, "iterations": None, "seconds_left": None, "later": [], "figures": [],
        "worst": [], "written_at": None,
    }  # fmt: skip
    if not stages:
        return state
    stage = stages[0]["stage"]
    jobs = remembered_job(store).get("stages", [])
    names = [job["name"] for job in jobs]
    position = names.index(stage) if stage in names else len(names)
    # Samples that the stage did not write itself have iterations of their own.
    writes = stage in names and jobs[position].get("data", "rollout") == "rollout"
    iterations = jobs[position].get("iterations") if writes else None
    newest = store.take_samples(index.rollouts.sample_rows[-1:], ["created_at"], index.snapshot)["created_at"]
    return state | stages[0] | {
        "iterations": iterations, "seconds_left": _seconds_left(store, index, stage, iterations),
        "later": names[position + 1 :], "figures": index.rows(FIGURES.format(table=TABLE, stage=literal(stage))),
        "worst": [worst for name in index.teachers for worst in _worst(index, stage, name)],
        "written_at": newest[0].as_py().isoformat(),
    }  # fmt: skip


def _seconds_left(store: Store, index: Index, stage: str, iterations: int | None) -> float | None:
    """Time for the iterations of a stage that are not done, at the mean pace of those that are."""
    times = store.sql(
        f"""select iteration, coalesce(detail->>'$.action', '') as action, epoch(created_at) as end, value as seconds
            from events where kind = 'stage_time' and value is not null and iteration >= 0 and stage = {literal(stage)}
        """,
        snapshot=index.snapshot,
    ).to_pylist()
    done = {time["iteration"] for time in times if time["action"] == LAST_ACTION}
    if iterations is None or not done:
        return None
    spans = [time for time in times if time["iteration"] in done]
    elapsed = max(time["end"] for time in spans) - min(time["end"] - time["seconds"] for time in spans)
    return float(elapsed / len(done) * max(0, iterations - len(done)))


def _worst(index: Index, stage: str, teacher: str) -> list[dict[str, Any]]:
    """The answer of the newest scored iteration that a teacher is farthest from; none where it has scored none."""
    column = f'"kl_{teacher}"'
    if f"kl_{teacher}" not in index.columns:
        return []
    scored = f"stage = {literal(stage)} and {column} is not null and policy <> 'reference'"
    return index.rows(
        f"""select {literal(teacher)} as teacher, uid, iteration, {column}::double as kl from {TABLE}
            where {scored} and iteration = (select max(iteration) from {TABLE} where {scored})
            order by {column} desc limit 1"""
    )
