"""A teacher of which only text is visible: the discriminator's rewards are what is trained on, and survive any kill."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane import open_store

STAGES = """
[objectives.gad.policy_gradient]
teacher_coef = 0.0
reward_coef = 1.0
reward_std = true

[[stages]]
name = "text"
start = "base"
rollout = {{ policy = "routed", prompts_per_iteration = 96 }}

[[stages]]
name = "gad"
start = "text"
objective = "gad"
iterations = 2
rollout = {{ prompts_per_iteration = 8, group_size = 4 }}
discriminator = {{ text = "text", learning_rate = 1e-3, batch_pairs = 8 }}
"""
DIES = """
import os, signal, sys
from mopd_dataplane.base import fault_points
place, count = sys.argv[1], int(sys.argv[2])
seen = 0
def observe(name):
    global seen
    seen += name == place
    if seen == count:
        os.kill(os.getpid(), signal.SIGKILL)
fault_points.observe(observe)
from mopd_dataplane.job.load import load_job
from mopd_dataplane.run.pipeline import run_job
run_job(load_job(sys.argv[3]), only="gad")
"""
KILLS = [
    ("discriminator.step", 6),  # in the second window: its first version is on disk
    ("discriminator.written", 1),
    ("discriminator.published", 2),  # a version without the rewards it is there for
]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def warmed(finished_job: Path, tmp_path_factory: pytest.TempPathFactory, write_job: Callable, mopd: Callable) -> Path:
    """Folder of a job whose teachers have written their text."""
    folder = tmp_path_factory.mktemp("warmed")
    shutil.copytree(finished_job / "store", folder / "store")
    mopd("run", write_job(folder, extra=STAGES), "--stage", "text")
    return folder


@pytest.fixture
def copy(warmed: Path, tmp_path: Path, write_job: Callable) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        shutil.copytree(warmed / "store", tmp_path / name / "store")
        return write_job(tmp_path / name, extra=STAGES)

    return copied


def outcome(folder: Path) -> dict[str, Any]:
    """Rewards, policies and discriminators that a run left."""
    store = open_store(str(folder / "store"))
    rewards = store.sql(
        "select r.uid, verifier, verifier_version, reward from rewards r join samples s on s.uid = r.uid "
        "where s.stage = 'gad' order by r.uid, verifier"
    )
    files = sorted((folder / "store").glob("*/gad/v*/*.safetensors"))
    return {"rewards": rewards.to_pylist()} | {
        str(file.relative_to(folder)): file.read_bytes() for file in files if "checkpoints" not in file.parts
    }


def test_rewards_are_the_discriminators_and_a_killed_run_ends_with_the_same_bits(
    copy: Callable, mopd: Callable
) -> None:
    whole = copy("whole")
    mopd("run", whole, "--stage", "gad")
    expected = outcome(whole.parent)
    versions = {
        row["verifier_version"].split("@")[0] for row in expected["rewards"] if row["verifier"] == "discriminator"
    }
    assert versions == {"v1", "v2"}
    assert len(expected["rewards"]) == 2 * 64, "a verifier's and the discriminator's for each sample"
    assert [name for name in expected if "discriminators/gad/v2" in name]
    trained = open_store(str(whole.parent / "store")).sql("select extra from steps where stage = 'gad'").to_pylist()
    scores = [row["reward"] for row in expected["rewards"] if row["verifier"] == "discriminator"]
    assert len(set(scores)) > 10
    assert all('"reward"' in step["extra"] for step in trained)

    for kill_point, count in KILLS:
        job = copy(kill_point)
        command = [sys.executable, "-c", DIES, kill_point, str(count), str(job)]
        died = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
        assert died.returncode == -9, died.stderr.decode()
        assert outcome(job.parent) != expected
        mopd("run", job, "--stage", "gad")
        assert outcome(job.parent) == expected, kill_point


def test_only_prompts_that_the_teacher_answered_are_asked(copy: Callable, mopd: Callable) -> None:
    job = copy("few")
    few = job.read_text().replace(
        "prompts_per_iteration = 8, group_size = 4", "prompts_per_iteration = 0, group_size = 1"
    )
    job.write_text(few.replace('text = "text"', 'text = "sums"'))  # the reference answers of one domain
    mopd("rollout", job, "--stage", "gad")
    store = open_store(str(job.parent / "store"))
    counts = store.sql("select distinct domain, count(*) n from samples where stage = 'gad' group by 1").to_pylist()
    assert counts == [{"domain": "sums", "n": 48}]
