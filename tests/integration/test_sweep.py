"""`mopd sweep` on a tiny job: two settings with two seeds, killed once and continued; the table and the page."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane.base.files import file_digest

DEADLINE_S = 1200.0

JOB = """
name = "tiny"
store = "{store}"

[student]
tokenizer = "characters"
[student.config]
model_type = "qwen3"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
max_position_embeddings = 128
tie_word_embeddings = false

[domains.sums]
source = "reasoning-gym"
dataset = "chain_sum"
args = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
template = "{{expression}} = "
train = 8
eval = 4

[rollout]
max_prompt_tokens = 32
max_new_tokens = 4

[plan]
pack_tokens = 128
batch_samples = 8

[[stages]]
name = "base"
data = "reference"
"""
FURTHER = """
[[stages]]
name = "aside"
start = "base"
data = "reference"

[[stages]]
name = "further"
start = "base"
data = "reference"
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command line of the sweep."""
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(store=tmp_path / "store"))
    settings = ["--set", "train.learning_rate=1e-3,1e-2", "--seeds", "0,1", "--folder", str(tmp_path / "sweep")]
    return ["sweep", str(job), *settings]


@pytest.mark.slow
def test_a_killed_sweep_continues_without_running_again_what_has_ended(
    words: list[str], tmp_path: Path, start_mopd: Callable[..., subprocess.Popen[bytes]],
    mopd: Callable[..., subprocess.CompletedProcess[str]],
) -> None:  # fmt: skip
    first, second = (tmp_path / "sweep" / "learning_rate=1e-3" / f"seed-{seed}.log" for seed in (0, 1))
    sweep = start_mopd(*words)
    deadline = time.monotonic() + DEADLINE_S
    while not second.exists():
        assert time.monotonic() < deadline, "the second run never started"
        assert sweep.poll() is None, sweep.communicate()[1].decode()
        time.sleep(0.1)
    sweep.kill()
    sweep.communicate(timeout=DEADLINE_S)
    log = first.read_bytes()

    done = mopd(*words, timeout=DEADLINE_S)
    assert "1 of 4 runs have ended before" in done.stderr
    assert first.read_bytes() == log, "the finished run was not started again"
    rows = [line for line in done.stdout.splitlines() if "learning_rate=1e-" in line]
    assert rows
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    assert [path.is_dir() for path in sorted((tmp_path / "sweep").glob("*/seed-?"))] == [True] * 4

    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "accuracy against trained tokens" in page
    said = json.loads(mopd(*words, "--report", "--json").stdout)
    arms = {arm["name"]: arm for arm in said["measures"]["arms"]}
    assert list(arms) == ["learning_rate=1e-3", "learning_rate=1e-2"]
    assert arms["learning_rate=1e-2"]["differences"].keys() == {"0", "1"}
    assert all(len(arm["by_seed"]) == 2 for arm in arms.values())


@pytest.mark.slow
def test_stages_that_arms_have_in_common_are_run_once_a_seed(
    tmp_path: Path, mopd: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    job, folder = tmp_path / "job.toml", tmp_path / "sweep"
    job.write_text((JOB + FURTHER).format(store=tmp_path / "store"))
    rates = "stages.further.train.learning_rate=1e-3,1e-2"
    words = ["sweep", job, "--set", rates, "--seeds", "0,1", "--folder", folder, "--stage", "further", "--json"]
    done = mopd(*words, timeout=DEADLINE_S)
    assert "shared, seed 1: done" in done.stderr
    for seed in (0, 1):
        stores = [folder / arm / f"seed-{seed}" for arm in ("shared", "learning_rate=1e-3", "learning_rate=1e-2")]
        start, low, high = (store / "policies" for store in stores)
        weights = {(policies / "base" / "v1" / "model.safetensors").stat().st_ino for policies in (start, low, high)}
        assert len(weights) == 1, "trained once, and linked"
        assert not (start / "further").exists()
        assert not [policies for policies in (start, low, high) if (policies / "aside").exists()], "nothing needs it"
        ends = [file_digest(policies / "further" / "v1" / "model.safetensors") for policies in (low, high)]
        assert ends[0] != ends[1]
    again = mopd(*words, timeout=DEADLINE_S)
    assert "4 of 4 runs have ended before" in again.stderr
    report = json.loads(again.stdout)
    assert [arm["name"] for arm in report["measures"]["arms"]] == ["learning_rate=1e-3", "learning_rate=1e-2"]
