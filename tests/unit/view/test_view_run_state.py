"""The top of the viewer's first page: stage, iteration, time left, figures, and each teacher's worst answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corrected_store import bare_sample
from starlette.testclient import TestClient
from viewing import BEARER, client_of, get

from mopd_dataplane import Store, create_store


def test_the_worst_answer_of_each_teacher_is_of_the_newest_iteration(page: TestClient, demo_store: Store) -> None:
    state = get(page, "state")
    assert (state["stage"], state["iteration"]) == ("student", 4)
    assert {worst["teacher"] for worst in state["worst"]} == {
        row["name"] for row in demo_store.table("teachers").to_pylist()
    }
    for worst in state["worst"]:
        [reference] = demo_store.sql(f"""
            select uid, mean_reverse_kl as kl from samples join scores using (uid)
            where iteration = 3 and teacher = '{worst["teacher"]}' and kind = 'logprob' order by kl desc limit 1
        """).to_pylist()  # fmt: skip
        assert worst["uid"] == reference["uid"]
        assert worst["kl"] == pytest.approx(reference["kl"])
        assert worst["iteration"] == 3


def test_figures_are_of_each_iteration(page: TestClient, demo_store: Store) -> None:
    state = get(page, "state")
    assert [figures["iteration"] for figures in state["figures"]] == [0, 1, 2, 3]
    for iteration, figures in enumerate(state["figures"]):
        [means] = demo_store.sql(f"""
            select avg(reward) as reward, avg(response_len) as response_len from samples join rewards using (uid)
            where iteration = {iteration}
        """).to_pylist()  # fmt: skip
        assert figures["samples"] == 24
        assert figures["reward"] == pytest.approx(means["reward"])
        assert figures["response_len"] == pytest.approx(means["response_len"])


def test_the_time_left_is_of_the_iterations_that_are_not_trained_on(
    make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = make_store(tmp_path / "half", prompts=1)
    stages = [{"name": "student", "start": "init", "iterations": 12}, {"name": "polish", "start": "student"}]
    (tmp_path / "half" / "job.json").unlink()
    store.write_json("job.json", {"student": {"path": ""}, "stages": stages})
    state = get(client_of(store, **BEARER), "state")
    assert (state["iteration"], state["iterations"], state["later"]) == (4, 12, ["polish"])
    times = store.sql("""
        select max(epoch(created_at)) - min(epoch(created_at) - value) as elapsed from events
        where kind = 'stage_time' and stage = 'student' and iteration >= 0
    """)  # fmt: skip
    assert state["seconds_left"] == pytest.approx(times["elapsed"][0].as_py() / 4 * 8)


def test_a_stage_on_the_samples_of_another_framework_has_no_number_of_iterations_to_reach(
    make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = make_store(tmp_path / "stored", prompts=1)
    (tmp_path / "stored" / "job.json").unlink()
    store.write_json("job.json", {"student": {"path": ""}, "stages": [
        {"name": "student", "start": "init", "data": "stored", "iterations": 1}
    ]})  # fmt: skip
    state = get(client_of(store, **BEARER), "state")
    assert (state["iteration"], state["iterations"], state["seconds_left"]) == (4, None, None)


def test_a_run_without_a_score_or_a_sample_has_no_figures_of_them(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "s"))
    assert get(client_of(store, **BEARER), "state")["stage"] == ""
    store.commit_samples([bare_sample("p", 0, np.random.default_rng(0))])
    state = get(client_of(store, **BEARER), "state")
    assert (state["stage"], state["iteration"]) == ("student", 1)
    assert (state["iterations"], state["seconds_left"]) == (None, None)
    assert (state["figures"][0]["reward"], state["figures"][0]["kl"], state["worst"]) == (None, None, [])


def test_groups_without_spread_are_a_share_of_samples(tmp_path: Path) -> None:
    store, noise = create_store(str(tmp_path / "groups")), np.random.default_rng(0)
    rewards = {"even": (1.0, 1.0), "apart": (0.0, 1.0), "low": (0.0, 0.0)}
    samples = [
        replace(bare_sample(f"{group}{n}", 0, noise), prompt_id=group, group_id=group, group_index=n)
        for group in rewards for n in range(2)
    ]  # fmt: skip
    rows = store.commit_samples(samples).rows
    store.add_rewards([
        {"uid": one.uid, "sample_row": int(row), "verifier": "v", "verifier_version": "1",
         "reward": rewards[one.group_id][one.group_index]} for one, row in zip(samples, rows, strict=True)
    ])  # fmt: skip
    [row] = get(client_of(store, **BEARER), "run")["rollouts"]
    assert row["flat"] == pytest.approx(4 / 6)


def test_runs_without_groups_have_no_such_share(page: TestClient) -> None:
    assert {row["flat"] for row in get(page, "run")["rollouts"]} == {None}
