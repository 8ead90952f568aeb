"""What `mopd store info` says of the iterations that are left."""

from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane.query.still_to_write import still_to_write
from mopd_dataplane.store.dataset import Store


@pytest.fixture
def store(make_store: Any, tmp_path: Path) -> Store:
    made: Store = make_store(tmp_path / "store", prompts=1)
    return made


def write_job(store: Store, iterations: int, **job: Any) -> None:
    stages = [
        {"name": "base", "start": "init", "data": "reference", "iterations": 1},
        {"name": "student", "start": "base", "data": "rollout", "iterations": iterations},
        {"name": "later", "start": "student", "data": "rollout", "iterations": 9},
    ]
    store.write_json("job.json", {"student": {"path": ""}, "stages": stages, **job})


def bytes_of(store: Store, leave_out: str) -> int:
    tables = store.info()["tables"].items()
    return sum(table["bytes"] - table["freeable_bytes"] for name, table in tables if not name.endswith(leave_out))


def test_the_iterations_left_take_the_mean_of_those_so_far(store: Store) -> None:
    done = store.table("plans", ["window"]).num_rows
    write_job(store, iterations=done + 10)
    (left,) = still_to_write(store, store.info()["tables"])
    assert (left.stage, left.done, left.iterations) == ("student", done, done + 10)
    assert left.iteration_bytes == pytest.approx(bytes_of(store, "nothing") / done)
    assert left.bytes == pytest.approx(10 * left.iteration_bytes)


def test_tables_that_retention_bounds_are_left_out(store: Store) -> None:
    done = store.table("plans", ["window"]).num_rows
    write_job(store, iterations=done + 10, retain={"stats_versions": 2, "hidden_passes": 0})
    (left,) = still_to_write(store, store.info()["tables"])
    assert left.iteration_bytes == pytest.approx(bytes_of(store, "token_stats") / done)
    assert bytes_of(store, "token_stats") < bytes_of(store, "nothing")


def test_a_stage_that_is_planned_to_its_end_writes_nothing_more(store: Store) -> None:
    write_job(store, iterations=store.table("plans", ["window"]).num_rows)
    assert still_to_write(store, store.info()["tables"]) == []
