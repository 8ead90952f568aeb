"""`mopd compare`: two policies on the same prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mopd_dataplane import Prompt, Store, create_store
from mopd_dataplane.cli.app import app
from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.query.compare import compare_policies, plot_comparison

N = 40


def small_store(root: Path, right: dict[str, int], *, text: str = "ask", verified: bool = True) -> str:
    """A store of one domain in which each policy answers its first so many prompts right."""
    store = create_store(str(root))
    store.add_prompts(
        [Prompt(prompt_id=f"d-eval-{i}", domain="d", text=f"{text} {i}", answer="", split="eval") for i in range(N)]
    )
    for policy, count in right.items():
        name, _, version = policy.partition("@")
        store.add_evals(
            {"policy": name, "policy_version": int(version), "prompt_id": f"d-eval-{i}", "domain": "d",
             "reward": 1.0 if i < count else 0.5, "correct": i < count if verified else None, "response": "x",
             "response_len": 1, "finish_reason": "stop"}
            for i in range(N)
        )  # fmt: skip
    return store.uri


def test_a_policy_against_itself_has_no_difference(demo_store: Store) -> None:
    comparison = compare_policies(demo_store.uri, demo_store.uri)
    assert comparison.left_out == 0
    for row in comparison.rows:
        assert row.accuracy is not None
        assert row.reward is not None
        assert (row.accuracy.value, row.accuracy.p, row.reward.value) == (0.0, 1.0, 0.0)
        assert row.verdict == "no difference found"
    assert comparison.a == comparison.b == f"{demo_store.uri}#student@4"


def test_versions_of_a_stage_and_stages_of_a_store(demo_store: Store) -> None:
    comparison = compare_policies(f"{demo_store.uri}#student@1", f"{demo_store.uri}#student")
    whole = comparison.rows[-1]
    assert (whole.domain, whole.prompts, whole.verdict) == ("mean", 24, "B better")
    assert whole.accuracy is not None
    assert (whole.accuracy.only_a, whole.accuracy.only_b) == (0, 12)
    assert whole.accuracy.p == pytest.approx(2 / 2**12)
    back = compare_policies(f"{demo_store.uri}#student", f"{demo_store.uri}#base")
    assert back.rows[-1].verdict == "A better"


def test_two_stores_are_paired_by_prompt(tmp_path: Path) -> None:
    a = small_store(tmp_path / "a", {"s@1": 10})
    b = small_store(tmp_path / "b", {"s@1": 18})
    (row,) = compare_policies(a, b).rows
    assert row.accuracy is not None
    assert row.accuracy.value == pytest.approx(8 / N)
    assert (row.accuracy.only_a, row.accuracy.only_b, row.verdict) == (0, 8, "B better")
    assert row.reward is not None
    assert row.reward.value == pytest.approx(4 / N), "mean reward counts half of what was wrong"


def test_prompts_that_read_differently_are_not_paired(tmp_path: Path) -> None:
    a = small_store(tmp_path / "a", {"s@1": 10})
    b = small_store(tmp_path / "b", {"s@1": 10}, text="say")
    with pytest.raises(MismatchError, match="no held-out prompt in common"):
        compare_policies(a, b)


def test_rewards_that_verify_nothing_are_compared_as_rewards(tmp_path: Path) -> None:
    uri = small_store(tmp_path / "a", {"s@1": 10, "s@2": 20}, verified=False)
    (row,) = compare_policies(f"{uri}#s@1", f"{uri}#s@2").rows
    assert (row.a, row.b, row.accuracy) == (None, None, None)
    assert row.verdict == "B better"


def test_five_prompts_that_the_bootstrap_alone_would_believe_are_no_difference(tmp_path: Path) -> None:
    uri = small_store(tmp_path / "a", {"s@1": 10, "s@2": 15})
    (row,) = compare_policies(f"{uri}#s@1", f"{uri}#s@2").rows
    assert row.accuracy is not None
    assert row.accuracy.low > 0
    assert row.accuracy.p == pytest.approx(2 / 2**5)
    assert row.verdict == "no difference found"


def test_what_is_not_there_is_named(demo_store: Store) -> None:
    with pytest.raises(UnknownNameError, match=r"'studnt' was evaluated.*student"):
        compare_policies(f"{demo_store.uri}#studnt", demo_store.uri)
    with pytest.raises(UnknownNameError, match="versions are 1, 2, 3, 4"):
        compare_policies(f"{demo_store.uri}#student@9", demo_store.uri)
    with pytest.raises(UnknownNameError, match="STORE#STAGE@VERSION"):
        compare_policies(f"{demo_store.uri}@student", demo_store.uri)


def test_the_command_prints_and_plots(make_store: Callable[..., Store], demo_store: Store, tmp_path: Path) -> None:
    drawn = tmp_path / "deep" / "d.svg"
    arguments = ["compare", f"{demo_store.uri}#student@1", demo_store.uri, "--plot", str(drawn)]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    assert "+50.0 (+29.2 to" in shown.stdout
    assert "B better" in shown.stdout
    assert drawn.read_text().startswith("<?xml")
    numbers = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert numbers["rows"][-1]["accuracy"]["value"] == pytest.approx(0.5)
    plot_comparison(compare_policies(demo_store.uri, demo_store.uri), tmp_path / "same.png")
    assert (tmp_path / "same.png").read_bytes().startswith(b"\x89PNG")
