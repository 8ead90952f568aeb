"""What the report and the viewer show of the health of signals, and of trainer against sampler by position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane import Store
from mopd_dataplane.query.exactness import gaps_by_position
from mopd_dataplane.query.measures import measure
from mopd_dataplane.query.run_sections import run_sections
from mopd_dataplane.query.sections import Section
from mopd_dataplane.query.signal_health import HEAD
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
from mopd_dataplane.view.shown import Shown
from mopd_dataplane.view.teachers_page import teachers_page

FAILED = {"check": "uniform", "text": "teacher 'words-expert' on domain 'words', check uniform: …"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[..., Store]) -> Store:
    store = make_store(tmp_path_factory.mktemp("health") / "store", prompts=2)
    for iteration, samples, failed in ((0, 9, [FAILED]), (0, 3, []), (1, 9, [FAILED])):
        detail: dict[str, Any] = {
            "teacher": "words-expert", "domain": "words", "policy_version": iteration, "samples": samples,
            "tokens": 10 * samples, "student_logprob": -0.5, "entropy": 4.5, "agreement": 0.01, "uniform": 1.0,
            "constant": 0.5, "zero": 0.0, "collapsed": 1.0, "collapse_position": 0, "end_logprob": -4.5,
            "student_end_logprob": -0.1, "failed": failed,
        }  # fmt: skip
        name = f"signal_health/student/words-expert/words/{iteration}/v{iteration}/{samples}"
        store.add_event(name, "student", "signal_health", iteration, -4.6, detail)
    figures = {"tokens": 80, "reference": -4.6, "entropy": 4.5, "own": -4.6}
    for reader, domains in (("", {"words": figures | {"own": None}}), ("words-expert", {"words": figures})):
        detail = {"reader": reader, "domains": domains}
        store.add_event(f"signal_probe/student/{reader}", "student", "signal_probe", -1, None, detail)
    return store


def section(store: Store, key: str) -> Section:
    return next(part for part in run_sections(measure(store)) if part.key == key)


def test_the_largest_set_of_the_last_iteration_is_shown_with_every_warning_once(store: Store) -> None:
    signals = section(store, "signals")
    health, probes = signals.grids
    assert [[cell.text for cell in row] for row in health.rows] == [
        ["student", "words-expert", "words", "9", "-4.60", "99.5 / 1.65", "4.50", "1.0 %", "100.0 %", "-4.50 / -0.10",
         "uniform"],
    ]  # fmt: skip
    assert [[cell.text for cell in row] for row in probes.rows] == [
        ["student", "start of the stage", "words", "80", "-4.60", "4.50", "–"],
        ["student", "words-expert", "words", "80", "-4.60", "4.50", "-4.60"],
    ]
    assert signals.text == f"{FAILED['text']}."


def test_the_viewer_has_the_same_rows(store: Store) -> None:
    shown = Shown(store)
    health = teachers_page(shown.store, shown.index())["health"]
    assert health["head"] == ["stage", "iteration", *HEAD]
    assert [row[:4] for row in health["rows"]] == [["student", "1", "words-expert", "words"]]
    assert health["warnings"] == [FAILED["text"]]


def test_a_store_that_was_never_measured_says_so(demo_store: Store) -> None:
    assert section(demo_store, "signals").empty == "No signal has been measured."


def test_differences_from_the_sampler_are_shown_by_position(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", prompts=2)
    assert gaps_by_position(store) == [], "no statistics of tokens"
    rows = store.sql(
        "select row_number() over () - 1 as sample_row, loss_tokens, policy_version_last as last from samples"
    ).to_pylist()
    opening = [row for row in rows[:6] if row["last"] == 0]  # of window 0, entirely by the policy that it begins with
    for row in rows[:6]:
        gaps = np.where(np.arange(row["loss_tokens"]) < 3, 0.5, -2.0)
        write_token_stats(store, [
            TokenStats(sample_row=row["sample_row"], stage="student", step=0, policy_version=0,
                       values={"logprob_gap": gaps}),
            TokenStats(sample_row=row["sample_row"], stage="student", step=1, policy_version=0,
                       values={"logprob_gap": np.full(row["loss_tokens"], 9.0)}),
        ])  # fmt: skip
    gap_rows = gaps_by_position(store)
    assert [(row["window"], row["start"], row["last"]) for row in gap_rows] == [(0, 0, 2), (0, 3, 14), (0, 15, 62)]
    assert [row["mean"] for row in gap_rows] == [0.5, 2.0, 2.0]
    assert gap_rows[0]["tokens"] == 3 * len(opening)
    assert sum(row["tokens"] for row in gap_rows) == sum(row["loss_tokens"] for row in opening)
    grid = section(store, "exactness").grids[-1]
    assert [cell.text for cell in grid.rows[0]] == ["student", "0", "0–2", str(3 * len(opening)), "0.5", "0.5"]
    assert "student: the difference grows" not in grid.caption, "2 is no more than four times 0.5"
