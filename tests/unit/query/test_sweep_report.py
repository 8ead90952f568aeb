"""The report of a sweep: curves against cost, arms paired by prompt, policies at equal cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mopd_dataplane import Prompt, Store, create_store
from mopd_dataplane.cli.app import app
from mopd_dataplane.errors import InputError, MismatchError, UnknownNameError
from mopd_dataplane.query.compare import compare_policies
from mopd_dataplane.query.measures import measure
from mopd_dataplane.query.spent import Spent, nearest_version, spent_by_version
from mopd_dataplane.query.sweep import SweepMeasures, measure_sweep
from mopd_dataplane.query.sweep_report import sweep_grid, write_sweep_report

PROMPTS, DOMAINS = 8, 3


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[..., Store]) -> dict[tuple[str, int], Store]:
    """Two arms with two seeds; the second arm answers one prompt more of every domain right."""
    root = tmp_path_factory.mktemp("sweep")
    stores = {
        (arm, seed): make_store(root / arm / f"seed-{seed}", prompts=PROMPTS, seed=seed)
        for arm in ("low", "high")
        for seed in (0, 1)
    }
    for seed in (0, 1):
        improve(stores["high", seed])
    return stores


def improve(store: Store) -> None:
    """Evaluate a version 5 that has every answer of version 4 right, and one more in each domain."""
    rows = store.sql("from evals where policy = 'student' and policy_version = 4 order by prompt_id").to_pylist()
    wrong = {row["domain"]: row["prompt_id"] for row in reversed(rows) if not row["correct"]}
    store.add_evals(
        {"policy": "student", "policy_version": 5, "prompt_id": row["prompt_id"], "domain": row["domain"],
         "correct": row["correct"] or wrong.get(row["domain"]) == row["prompt_id"], "reward": 1.0, "response": "x",
         "response_len": 1, "finish_reason": "stop"}
        for row in rows
    )  # fmt: skip


@pytest.fixture(scope="module")
def measures(stores: dict[tuple[str, int], Store]) -> SweepMeasures:
    arms = {arm: {seed: Path(stores[arm, seed].uri) for seed in (0, 1)} for arm in ("low", "high")}
    return measure_sweep("demo", arms, "student")


@pytest.mark.slow
def test_cost_is_the_sum_of_the_steps_and_times_before_a_version(stores: dict[tuple[str, int], Store]) -> None:
    store = stores["low", 0]
    spent = spent_by_version(store, "student")
    steps = store.table("steps").to_pylist()
    times = store.sql("select iteration, value, detail from events where kind = 'stage_time'").to_pylist()
    times = [row for row in times if json.loads(row["detail"])["action"] != "evaluate"]
    assert times
    for version in (0, 1, 4):
        before = [step for step in steps if step["window"] < version]
        assert spent[version].answers == sum(step["samples"] for step in before)
        assert spent[version].tokens == sum(step["loss_tokens"] for step in before)
        assert spent[version].seconds == pytest.approx(sum(row["value"] for row in times if row["iteration"] < version))


def test_an_arm_is_paired_with_the_first_over_the_same_prompts(measures: SweepMeasures) -> None:
    low, high = measures.arms
    assert (measures.score, measures.prompts) == ("accuracy", PROMPTS * DOMAINS)
    assert low.difference is None
    assert high.difference is not None
    assert high.difference.value == pytest.approx(1 / PROMPTS)
    assert high.difference.low >= 0, "no resample has an answer that only the first arm has right"
    assert {seed: difference.value for seed, difference in high.differences.items()} == pytest.approx(
        {0: 0.125, 1: 0.125}
    )
    assert high.differences[0].only_a == 0
    assert high.differences[0].only_b == DOMAINS
    assert low.score is not None
    assert low.score.value == pytest.approx(np.mean(list(low.by_seed.values())))


def test_curves_have_the_start_every_version_and_the_divergence_of_its_answers(
    measures: SweepMeasures, stores: dict[tuple[str, int], Store]
) -> None:
    points = measures.arms[0].curves[1]
    assert [point.version for point in points if point.score is not None] == [0, 1, 2, 3, 4]
    assert [point.spent.tokens for point in points] == sorted(point.spent.tokens for point in points)
    report = measure(stores["low", 1])
    by_version = {point.version: point.reverse_kl for point in points}
    of_teachers = [row for row in report.teacher_kl if row["stage"] == "student" and row["iteration"] == 2]
    tokens = sum(row["tokens"] for row in of_teachers)
    expected = sum(row["reverse_kl"] * row["tokens"] for row in of_teachers) / tokens
    assert by_version[2] == pytest.approx(expected, rel=1e-5)


def test_the_page_has_every_metric_against_every_cost(measures: SweepMeasures, tmp_path: Path) -> None:
    page = write_sweep_report(measures, tmp_path / "report.html").read_text()
    for cost in ("answers learnt from", "trained tokens", "seconds of the stage"):
        assert f"accuracy against {cost}" in page
        assert f"reverse KL, nat per token against {cost}" in page
    assert "<script" not in page
    assert "+12.5" in page


def test_an_arm_that_has_not_run_is_named(stores: dict[tuple[str, int], Store], tmp_path: Path) -> None:
    arms = {"low": {0: Path(stores["low", 0].uri)}, "later": {0: tmp_path / "none"}}
    grid = sweep_grid(measure_sweep("demo", arms, "student"))
    assert [cell.text for cell in grid.rows[1]] == ["later", "none", "not run", "–", "–"]
    with pytest.raises(UnknownNameError, match="without --report"):
        measure_sweep("demo", {"later": {0: tmp_path / "none"}}, "student")


def test_runs_without_a_common_prompt_are_refused(
    stores: dict[tuple[str, int], Store], make_store: Callable[..., Store], tmp_path: Path
) -> None:
    make_store(tmp_path / "other", prompts=PROMPTS)
    arms = {"low": {0: Path(stores["low", 0].uri)}, "other": {0: tmp_path / "other"}}
    assert measure_sweep("demo", arms, "student").prompts == PROMPTS * DOMAINS, "stores share prompts by id and text"
    with pytest.raises(MismatchError, match="no held-out prompt in common"):
        measure_sweep("demo", {**arms, "alone": {0: alone(tmp_path / "alone")}}, "student")


def alone(root: Path) -> Path:
    """A store with one prompt that no other store has."""
    store = create_store(str(root))
    store.add_prompts([Prompt(prompt_id="x-eval-0", domain="x", text="?", answer="", split="eval")])
    store.add_evals([
        {"policy": "student", "policy_version": 1, "prompt_id": "x-eval-0", "domain": "x", "reward": 1.0,
         "correct": True, "response": "x", "response_len": 1, "finish_reason": "stop"}
    ])  # fmt: skip
    return root


def test_policies_are_compared_at_equal_tokens(stores: dict[tuple[str, int], Store]) -> None:
    low, high = (stores[arm, 0].uri for arm in ("low", "high"))
    comparison = compare_policies(f"{low}#student", f"{high}#student", equal="tokens")
    assert comparison.a_spent.tokens == comparison.b_spent.tokens > 0
    assert comparison.a.endswith("#student@4")
    with pytest.raises(InputError, match="without @VERSION"):
        compare_policies(f"{low}#student@2", high, equal="tokens")
    done = CliRunner().invoke(app, ["compare", f"{low}#student", f"{high}#student", "--equal", "answers"])
    assert done.exit_code == 0, done.output
    assert "answers," in done.output


def test_the_nearest_version_is_the_older_of_two() -> None:
    spent = {version: Spent(answers=100 * version) for version in range(4)}
    assert nearest_version(spent, [1, 2, 3], "answers", 250) == 2
    assert nearest_version(spent, [1, 2, 3], "answers", 260) == 3
