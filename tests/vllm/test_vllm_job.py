"""`mopd rollout` and `mopd run` with vLLM: killed outright in the middle, then the same command again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mopd_dataplane import Store

JOB = """
name = "tiny"
store = "{store}"
seed = 7

[student]
tokenizer = "characters"
[student.config]
model_type = "qwen3"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 32
max_position_embeddings = 256
initializer_range = 0.2

[domains.sums]
source = "reasoning-gym"
dataset = "chain_sum"
train = 64
eval = 6
[teachers]
itself = {{ source = "student" }}
[routing]
sums = "itself"

[engine]
kind = "{engine}"
slots = 4
[rollout]
max_new_tokens = 60
group_size = 2
[plan]
pack_tokens = 256
batch_samples = 32
[objectives.sampled.policy_gradient]
[[stages]]
name = "student"
objective = "sampled"
iterations = 1
"""
TOLERANCE = 2e-5
"""As in test_vllm_engine.py."""


def command(job: Path, verb: str) -> list[str]:
    """A command line for this interpreter."""
    return [sys.executable, "-m", "mopd_dataplane", verb, str(job)]


def mopd(job: Path, verb: str) -> str:
    """Run a command to its end; what it printed."""
    done = subprocess.run(
        command(job, verb), capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_job(home: Path, engine: str) -> Path:
    """A job file with its store beside it."""
    home.mkdir()
    file = home / "job.toml"
    file.write_text(JOB.format(store=home / "store", engine=engine))
    return file


def kill_in_the_middle(job: Path) -> None:
    """SIGKILL to mopd and to vLLM, when some tokens are logged."""
    with subprocess.Popen(
        command(job, "rollout"), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        deadline = time.monotonic() + 600
        while sum(file.stat().st_size for file in job.parent.glob("store/wal/**/*.wal")) < 30_000:
            assert running.poll() is None, f"ended with code {running.returncode} before anything was logged"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(running.pid, signal.SIGKILL)


def rollouts(job: Path) -> dict[str, tuple[list[int], np.ndarray, int]]:
    """uid -> tokens, log-probs and interruptions of every stored sample."""
    store = Store.open(str(job.parent / "store"))
    samples = store.table("samples", columns=["uid", "interruptions"])
    rows = np.arange(len(samples))
    payload = store.read_tokens(rows, columns=["tokens", "logprobs"])
    return {
        uid: (payload["tokens"][i].as_py(), np.array(payload["logprobs"][i].as_py()), interruptions)
        for i, (uid, interruptions) in enumerate(zip(*samples.to_pydict().values(), strict=True))
    }


def test_a_killed_job_ends_with_the_samples_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """Uninterrupted in transformers, killed in vLLM: the same tokens."""
    calm, killed = write_job(tmp_path / "hf", "hf"), write_job(tmp_path / "vllm", "vllm")
    mopd(calm, "rollout")
    kill_in_the_middle(killed)
    said = mopd(killed, "run")
    assert "resumed" in said
    ours, theirs = rollouts(killed), rollouts(calm)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 128
    assert sum(interruptions > 0 for _, _, interruptions in ours.values()) == 4
    for uid, (tokens, logprobs, _) in ours.items():
        assert tokens == theirs[uid][0]
        np.testing.assert_allclose(logprobs, theirs[uid][1], atol=TOLERANCE)
