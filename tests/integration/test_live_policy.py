"""A policy published while an iteration is being sampled, by the job's own rollout on a real store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from mopd_dataplane import Prompt, Sample, create_store
from mopd_dataplane.base import fault_points
from mopd_dataplane.job import sections
from mopd_dataplane.job.load import load_job
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.rollout.tools.sandbox import Command, Result, Turn
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.rollout import record_abandoned, rollout
from mopd_dataplane.testing.toy_engine import ToyEngine

LIVE_STAGE = """
[[stages]]
name = "live"
start = "base"
objective = "sampled"
rollout = {{ prompts_per_iteration = 40, weight_change = "{rule}" }}
"""


@pytest.fixture(params=["pin", "span"])
def live(request: pytest.FixtureRequest, finished_job: Path, tmp_path: Path, write_job: Callable) -> Iterator[Run]:
    """A job whose stage `live` gets its version 1 at the fifth decode step of its first iteration."""
    job = write_job(tmp_path, extra=LIVE_STAGE.replace("{rule}", request.param))
    shutil.copytree(finished_job / "store", tmp_path / "store", symlinks=True)
    policies = tmp_path / "store" / "policies"
    (policies / "live").mkdir()
    shutil.copytree(policies / "student" / "v2", policies / ".v1")
    steps = 0

    def publish(name: str) -> None:
        nonlocal steps
        steps += name == "rollout.step"
        if name == "rollout.step" and steps == 5:
            (policies / ".v1").rename(policies / "live" / "v1")

    fault_points.observe(publish)
    yield open_run(load_job(str(job)), Progress(Console(quiet=True)))
    fault_points.observe(None)


def test_a_follower_takes_up_a_policy_published_in_the_middle(live: Run) -> None:
    stage = live.job.stage("live")
    (report,) = rollout(live, stage, 0, follow=True)
    assert (report.samples, report.weight_changes) == (40, 1)
    spans = live.store.sql(
        "select policy_version_first a, policy_version_last b, count(*) n from samples "
        "where stage = 'live' group by all"
    )
    kinds = {(row["a"], row["b"]) for row in spans.to_pylist()}
    assert {(0, 0), (1, 1)} <= kinds
    assert ((0, 1) in kinds) == (stage.rollout.weight_change == "span")


class NeverSure:
    """A sandbox that cannot tell what became of a command."""

    def run(self, sandbox: str, key: str, command: Command) -> Result | None:
        return None


def test_a_sample_that_was_given_up_is_recorded_with_its_reason(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "store"))

    def commit(samples: list[Sample]) -> None:
        for _ in range(2):  # a commit may be repeated after a crash
            record_abandoned(store, samples)
            store.commit_samples(samples)

    def environment(turn: Turn) -> None:
        if turn.prompt.prompt_id == "p1":
            turn.run(["true"])

    report = run_rollout(
        ToyEngine(slots=4),
        [Prompt(prompt_id=f"p{i}", domain="toy", text=f"{i}") for i in range(4)],
        RolloutTask(
            stage="agent",
            iteration=2,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=500),
            wal=sections.Wal(),
            wal_dir=tmp_path / "wal",
            render=lambda prompt: [ord(c) % 12 for c in prompt.text],
        ),
        commit=commit,
        environment=environment,
        sandbox=NeverSure(),
    )
    assert report.abandoned == {"tool_in_doubt": 1}
    (event,) = store.sql("select * from events").to_pylist()
    (sample,) = store.sql("select * from samples where finish_reason = 'abandoned'").to_pylist()
    assert (event["kind"], event["stage"], event["iteration"]) == ("abandon", "agent", 2)
    assert json.loads(event["detail"]) == {"reason": "tool_in_doubt", "uid": sample["uid"]}
    assert event["value"] == sample["response_len"]
