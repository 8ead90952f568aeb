"""Lineage joins recorded tables: sample to steps, step to samples, and both agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane import Store
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.query.lineage import sample_lineage, step_lineage
from mopd_dataplane.records import PlanWindow


def test_sample_lineage_holds_prompt_scores_and_rewards(demo_store: Store) -> None:
    uid = demo_store.samples(columns=["uid"])["uid"][5].as_py()
    line = sample_lineage(demo_store, uid)
    assert (line.uid, line.sample_row) == (uid, 5)
    assert line.prompt["prompt_id"][0].as_py() == line.sample["prompt_id"][0].as_py()
    assert line.scores["kind"].to_pylist() == ["hidden", "logprob"]
    assert line.rewards.num_rows == 1


def test_steps_and_samples_agree_both_ways(demo_store: Store) -> None:
    for step in (0, 7, 23):
        made_of = step_lineage(demo_store, "student", step)
        assert made_of.plan["digest"][0].as_py() == made_of.step["plan_digest"][0].as_py()
        assert made_of.samples.num_rows > 0
        for row in made_of.samples.select(["uid", "sample_row", "pack"]).to_pylist():
            line = sample_lineage(demo_store, row["uid"])
            assert line.sample_row == row["sample_row"]
            assert [(use["step"], use["pack"]) for use in line.uses.to_pylist()] == [(step, row["pack"])]


def test_every_sample_of_a_window_is_in_exactly_one_of_its_steps(demo_store: Store) -> None:
    rows = [
        row for step in range(6) for row in step_lineage(demo_store, "student", step).samples["sample_row"].to_pylist()
    ]
    window = demo_store.plan("student", 0)
    assert window is not None
    assert sorted(rows) == sorted(window.sample_rows.tolist())


def test_planned_but_untrained_sample_has_a_use_without_step_once_per_epoch(
    tmp_path: Path, make_store: Callable[..., Store]
) -> None:
    store = make_store(tmp_path / "store", prompts=1)
    store.add_plan(
        PlanWindow(
            stage="later", window=0, seed=0, settings={"epochs": 2}, snapshot=store.snapshot(),
            sample_rows=np.array([3, 1, 3], np.int64), pack_starts=np.array([0, 2, 3], np.int64),
            pack_teachers=np.array([-1, -1], np.int16), step_starts=np.array([0, 1, 2], np.int64), teachers=[],
            digest="d" * 32,
        )
    )  # fmt: skip
    uid = store.samples(columns=["uid"])["uid"][3].as_py()
    uses = [use for use in sample_lineage(store, uid).uses.to_pylist() if use["stage"] == "later"]
    assert [(use["pack"], use["step"]) for use in uses] == [(0, None), (1, None)]


def test_unknown_step_names_the_steps_there_are(demo_store: Store) -> None:
    with pytest.raises(UnknownNameError, match="it has 0 to 23"):
        step_lineage(demo_store, "student", 99)
    with pytest.raises(UnknownNameError, match="did you mean 'student'"):
        step_lineage(demo_store, "studnt", 0)
