"""`rollout.until`: an iteration samples further prompts until enough groups have different rewards, after any kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from advice import advises

from mopd_dataplane import open_store
from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.pipeline import rollout_stage
from mopd_dataplane.run.steps.plan import plan_stage

JUDGE = """
import zlib

def coin(prompt, response):
    return float(zlib.crc32(response.encode()) % 4 == 0)

def never(prompt, response):
    return 0.0
"""
DIES = """
import os, signal, sys
from mopd_dataplane.base import fault_points
point, count = sys.argv[2], int(sys.argv[3])
seen = 0
def observe(name):
    global seen
    seen += name == point
    if seen == count:
        os.kill(os.getpid(), signal.SIGKILL)
fault_points.observe(observe)
from mopd_dataplane.job.load import load_job
from mopd_dataplane.run.pipeline import rollout_stage
job = load_job(sys.argv[1])
rollout_stage(job, job.stage("student"))
"""
GROUPS, PROMPTS, AT_MOST, SIZE = 4, 3, 6, 2


@pytest.fixture(autouse=True)
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with the rewards of these jobs."""
    (tmp_path / "coin_judge.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def raw_job(folder: Path, reward: str = "coin") -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    prompts = folder / "sums.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"{n} + {n} = ", "answer": str(2 * n)}) + "\n" for n in range(40)))
    return {
        "name": "until", "store": str(folder / "store"), "seed": 5,
        "student": {"tokenizer": "characters", "config": {
            "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}},
        "domains": {"sums": {"source": str(prompts), "train": 30, "reward": f"coin_judge:{reward}"}},
        "engine": {"slots": 8},
        "objectives": {"grpo": {"policy_gradient": {"teacher_coef": 0.0, "reward_coef": 1.0}}},
        "stages": [{
            "name": "student", "objective": "grpo", "iterations": 2,
            "rollout": {"prompts_per_iteration": PROMPTS, "group_size": SIZE, "max_new_tokens": 8,
                        "until": {"groups": GROUPS, "at_most": AT_MOST}},
            "plan": {"pack_tokens": 128, "batch_samples": 8, "groups": "spread"},
        }],
    }  # fmt: skip


def job_of(raw: dict[str, Any]) -> Job:
    return check_job(raw, where="job.toml")


def samples_of(job: Job) -> list[dict[str, Any]]:
    statement = (
        "select uid, group_id, iteration, writer_seq, group_spread from rollouts "
        "join (select uid, writer_seq from samples) using (uid) order by iteration, writer_seq"
    )
    return open_store(job.store).sql(statement).to_pylist()


def expected_groups(samples: list[dict[str, Any]]) -> tuple[list[str], int]:
    """(groups that are trained on, rounds), of one iteration by a plain walk over its groups in admission order."""
    spreads = {sample["group_id"]: sample["group_spread"] for sample in samples}
    informative = [group for group, spread in spreads.items() if spread > 0]
    for rounds in range(1, AT_MOST + 1):
        first = list(spreads)[: rounds * PROMPTS]
        if len([group for group in first if group in informative]) >= GROUPS:
            break
    return informative[:GROUPS], rounds


def test_an_iteration_samples_until_enough_groups_have_different_rewards(tmp_path: Path) -> None:
    job = job_of(raw_job(tmp_path / "whole"))
    stage = job.stage("student")
    summary = rollout_stage(job, stage)
    samples = samples_of(job)
    groups, rounds = expected_groups(samples)
    assert rounds > 1, "the case is about further prompts"
    assert len(summary["rollouts"]) == rounds
    assert len({sample["group_id"] for sample in samples}) == rounds * PROMPTS, "not one round more than needed"
    plan_stage(job, stage)
    store = open_store(job.store)
    window = store.plan("student", 0)
    assert window is not None
    planned = store.take_samples(window.sample_rows, ["group_id"])["group_id"].to_pylist()
    assert len(groups) == GROUPS
    assert sorted(planned) == sorted(groups * SIZE)
    unused = sum(count for name, count in window.stats.items() if name.startswith("dropped_"))
    assert unused == len(samples) - GROUPS * SIZE
    events = {row["event_id"]: row for row in store.table("events").to_pylist()}
    assert json.loads(events["until/student/0"]["detail"])["unused_samples"] == unused
    assert f"time/student/0/rollout/{rounds}" in events, "the time of every round counts"


@pytest.mark.slow
@pytest.mark.parametrize(("point", "count"), [("rollout.step", 30), ("rollout.committed", 2)])
def test_a_killed_iteration_ends_with_the_same_samples(tmp_path: Path, point: str, count: int) -> None:
    whole, killed = job_of(raw_job(tmp_path / "whole")), job_of(raw_job(tmp_path / "killed"))
    rollout_stage(whole, whole.stage("student"))
    (tmp_path / "killed.json").write_text(killed.model_dump_json())
    command = [sys.executable, "-c", DIES, str(tmp_path / "killed.json"), point, str(count)]
    died = subprocess.run(command, check=False, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    rollout_stage(killed, killed.stage("student"))
    assert samples_of(killed) == samples_of(whole)
    plans = [plan_stage(job, job.stage("student")) for job in (whole, killed)]
    assert plans[0]["samples"] == plans[1]["samples"] == GROUPS * SIZE
    before = samples_of(killed)
    rollout_stage(killed, killed.stage("student"))
    assert samples_of(killed) == before, "what is sampled is not sampled again"


@pytest.mark.slow
def test_an_iteration_without_an_informative_group_is_refused_with_what_to_do(tmp_path: Path) -> None:
    job = job_of(raw_job(tmp_path / "flat", reward="never"))
    with advises(
        "answers with mopd view, raise rollout.group_size, or give the stage prompts that it answers"
    ) as refused:
        rollout_stage(job, job.stage("student"))
    assert "each of the 18 groups of iteration 0 are equal" in str(refused.value)
    mended = job_of(raw_job(tmp_path / "mended"))
    rollout_stage(mended, mended.stage("student"))
    assert len(samples_of(mended)) >= SIZE
    assert len(samples_of(job)) == PROMPTS * AT_MOST * SIZE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrent": True}, r"student.rollout.until: a concurrent stage .*concurrent = false"),
        ({"rollout": {"group_size": 1}}, r"rollout.until: rollout.group_size = 1, .*2 or more"),
        ({"plan": {"groups": "all"}}, r"rollout.until: plan.groups = 'all' .*\"spread\""),
        ({"objective": "likelihood"}, r"rollout.until: objective 'likelihood' trains on no rewards"),
        ({"rollout": {"prompts_per_iteration": 9}}, r"at_most = 6 times .* = 9 are more than the 30 training prompts"),
        ({"rollout": {"prompts_per_iteration": 0}}, r"rollout.prompts_per_iteration = 30 are more than the 30"),
        ({"discriminator": {}}, r"rollout.until: a discriminator rewards"),
    ],
)
def test_until_is_refused_where_it_makes_no_sense(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    raw = raw_job(tmp_path / "refused")
    raw["objectives"]["likelihood"] = {"cross_entropy": {}}
    stage = raw["stages"][0]
    for key, value in change.items():
        stage[key] = {**stage[key], **value} if isinstance(value, dict) and key in stage else value
    if change.get("concurrent"):
        stage["plan"].pop("groups")
    with pytest.raises(JobFileError, match=message):
        job_of(raw)
