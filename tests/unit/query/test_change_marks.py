"""Changes of the job stand in the report, in the viewer and in SQL, at the place where they begin."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import Store, open_store
from mopd_dataplane.query.change_marks import change_marks
from mopd_dataplane.query.compare import compare_policies
from mopd_dataplane.query.measures import measure
from mopd_dataplane.query.report import write_report
from mopd_dataplane.query.sections import comparison_grid
from mopd_dataplane.records import Change
from mopd_dataplane.store.commit.changes import add_changes, read_changes
from mopd_dataplane.view.run_page import run_page
from mopd_dataplane.view.shown import Shown

RATE = Change(
    ordinal=0, stage="student", iteration=2, key="stages.student.train.learning_rate", before="0.001", after="0.0002",
    change_class="from here on", command="mopd run job.toml --from-here",
)  # fmt: skip
LONGER = Change(
    ordinal=1, stage="student", iteration=3, key="stages.student.iterations", before="3", after="9",
    change_class="from here on", command="mopd run job.toml",
)  # fmt: skip
SLOTS = Change(
    ordinal=2, stage="student", iteration=3, key="engine.slots", before="64", after="8", change_class="free",
    command="mopd run job.toml --set engine.slots=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def changed_store(make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = make_store(tmp_path_factory.mktemp("changed") / "store", prompts=4)
    add_changes(store, [RATE, LONGER, SLOTS])
    return store


def test_changes_are_read_as_they_were_recorded(changed_store: Store) -> None:
    assert read_changes(changed_store) == [RATE, LONGER, SLOTS]
    rows = changed_store.sql("select key, after from changes where change_class = 'free'").to_pylist()
    assert rows == [{"key": "engine.slots", "after": "8"}]


def test_a_mark_stands_before_what_the_change_begins_with(changed_store: Store) -> None:
    rows = measure(changed_store).changes
    first_steps = {
        row["window"]: row["step"]
        for row in changed_store.sql('select "window", min(step) as step from steps group by 1').to_pylist()
    }
    assert [mark.x for mark in change_marks(rows, ["student"], "iteration")] == [1.5, 2.5]
    assert [mark.x for mark in change_marks(rows, ["student"], "step")] == [first_steps[2] - 0.5, first_steps[3] - 0.5]
    assert [mark.x for mark in change_marks(rows, ["student"], "policy version")] == [2.5, 3.5]
    labels = [mark.label for mark in change_marks(rows, ["student"], "iteration")]
    assert labels == ["train.learning_rate: 0.001 → 0.0002", "iterations: 3 → 9"], "free keys change no curve"
    assert change_marks(rows, ["base"], "iteration") == []
    assert change_marks(rows, ["base", "student"], "step")[0].label.startswith("student train.learning_rate")


@pytest.mark.slow
def test_the_report_draws_and_lists_them(changed_store: Store, demo_store: Store, tmp_path: Path) -> None:
    page = write_report(changed_store, tmp_path / "changed.html").read_text()
    assert "train.learning_rate: 0.001 → 0.0002" in page
    assert "The job changed at step" in page
    assert "The job changed at iteration 1.5: train.learning_rate" in page
    assert "mopd run job.toml --set engine.slots=8" in page
    other = write_report(demo_store, tmp_path / "demo.html").read_text()
    assert "The job changed at" not in other
    assert "The job is the one that the run began with." in other


def test_the_page_of_the_run_has_them(changed_store: Store) -> None:
    shown = Shown(changed_store)
    changes = run_page(changed_store, shown.index())["changes"]
    assert [(row["iteration"], row["text"]) for row in changes[:1]] == [(2, "train.learning_rate: 0.001 → 0.0002")]
    assert changes[0]["step"] is not None


def test_a_comparison_names_the_changes_that_a_policy_was_trained_by(changed_store: Store) -> None:
    comparison = compare_policies(f"{changed_store.uri}#student@1", f"{changed_store.uri}#student@4")
    rate = "student from iteration 2: train.learning_rate: 0.001 → 0.0002"
    assert comparison.changes == {"a": [], "b": [rate, "student from iteration 3: iterations: 3 → 9"]}
    caption = comparison_grid(comparison).caption
    assert f"The job of B changed: {rate}" in caption
    assert "The job of A" not in caption


def test_a_store_without_the_table_is_whole_and_gets_it_with_the_first_change(
    make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = make_store(tmp_path / "store", prompts=2)
    shutil.rmtree(store.path("changes"))
    shutil.rmtree(store.path("acknowledged") / "changes", ignore_errors=True)
    old = open_store(store.uri)
    assert "changes" not in old.names()
    assert read_changes(old) == []
    assert old.verify().ok
    assert measure(old).changes == []
    add_changes(old, [])
    assert "changes" not in old.names()
    add_changes(old, [RATE])
    assert read_changes(open_store(store.uri)) == [RATE]
