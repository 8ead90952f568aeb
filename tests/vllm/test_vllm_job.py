"""`mopd rollout` and `mopd run` with vLLM: killed or interrupted in the middle, then the same command again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from commandline import ENVIRONMENT, command, run_mopd
from decoding import TOLERANCE, decode, make_requests

from mopd_dataplane import Store
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.rollout.engines.vllm import VllmEngine
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.run.open_engine import Engines

SLOTS = 4
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
train = 192
eval = 6
[teachers]
itself = {{ source = "student" }}
[routing]
sums = "itself"

[engine]
kind = "{engine}"
slots = {slots}
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


def write_job(home: Path, engine: str, more: str = "") -> Path:
    """A job file with its store beside it."""
    home.mkdir()
    file = home / "job.toml"
    file.write_text(JOB.format(store=home / "store", engine=engine, slots=SLOTS) + more)
    return file


LISTEN = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
"""Tests that a shell runs in the background ignore Ctrl-C, and so would their children."""


@dataclass(frozen=True)
class Ended:
    """A command that a signal ended."""

    code: int
    said: str
    left: list[psutil.Process]
    """Of its processes, half a minute later."""
    shared: set[Path]
    """Shared memory it had, and that is still there."""
    cut: set[str]
    """uids of the samples that its log holds in the middle of their text: at most one for each slot, fewer where a slot
    was between two samples."""


def interrupt(job: Path, number: int, *, group: bool, verb: str = "rollout", after: str = "") -> Ended:
    """A signal to mopd, or to it and every process of its group, when some tokens are logged.

    after: a file of the store that must be there first.
    """

    def due() -> bool:
        logged = 0
        for file in job.parent.glob("store/wal/**/*.wal"):
            with contextlib.suppress(FileNotFoundError):  # deleted when all of it is committed
                logged += file.stat().st_size
        return logged >= 20_000 and (job.parent / "store" / after).exists()

    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, *command(verb, job)], start_new_session=True, env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as running:  # fmt: skip
        deadline = time.monotonic() + 600
        while not due():
            assert running.poll() is None, f"ended with code {running.returncode} before anything was logged"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        family = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
        assert len(family) > 1, "vLLM is not a process of its own"
        for process in family:  # nothing is sampled while its memory is listed, which takes a while
            process.suspend()
        shared = {Path(part.path) for process in family for part in process.memory_maps() if "/dev/shm/" in part.path}
        if group:
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        said, _ = running.communicate(timeout=300)
        _, left = psutil.wait_procs(family, timeout=30)
        log = recover(job.parent / "store" / "wal" / "student" / "engine-0").ledger
        cut = {partial.spec.uid for partial in log.unfinished().values() if not partial.ended}
        assert 0 < len(cut) <= SLOTS
        return Ended(running.returncode, said, left, {file for file in shared if file.exists()}, cut)


Rollout = tuple[list[int], np.ndarray, int]


def rollouts(job: Path) -> dict[str, Rollout]:
    """uid -> tokens, log-probs and interruptions of every stored sample."""
    store = Store.open(str(job.parent / "store"))
    samples = store.table("samples", columns=["uid", "interruptions"])
    rows = np.arange(len(samples))
    payload = store.read_tokens(rows, columns=["tokens", "logprobs"])
    return {
        uid: (payload["tokens"][i].as_py(), np.array(payload["logprobs"][i].as_py()), interruptions)
        for i, (uid, interruptions) in enumerate(zip(*samples.to_pydict().values(), strict=True))
    }


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rollout]:
    """The samples of an uninterrupted job in transformers."""
    job = write_job(tmp_path_factory.mktemp("calm") / "hf", "hf")
    run_mopd("rollout", job, timeout=900)
    return rollouts(job)


@pytest.mark.parametrize(
    ("number", "group", "verb"),
    [(signal.SIGKILL, True, "run"), (signal.SIGINT, True, "rollout"), (signal.SIGTERM, False, "rollout")],
    ids=["killed", "ctrl-c", "terminated"],
)
def test_an_interrupted_job_ends_with_the_samples_of_an_uninterrupted_one(
    calm: dict[str, Rollout], tmp_path: Path, number: int, group: bool, verb: str
) -> None:
    """Uninterrupted in transformers, interrupted in vLLM: the same tokens. Ctrl-C reaches vLLM's processes too."""
    job = write_job(tmp_path / "vllm", "vllm")
    ended = interrupt(job, number, group=group)
    assert not ended.left
    if number != signal.SIGKILL:
        assert ended.code == 130, ended.said
        assert "Traceback" not in ended.said
        assert "run the same command again to continue" in ended.said
        assert not ended.shared
    assert "resumed" in run_mopd(verb, job, timeout=900).stderr
    ours = rollouts(job)
    assert ours.keys() == calm.keys()
    assert len(ours) == 384
    assert {uid for uid, (_, _, interruptions) in ours.items() if interruptions} == ended.cut
    for uid, (tokens, logprobs, _) in ours.items():
        assert tokens == calm[uid][0]
        np.testing.assert_allclose(logprobs, calm[uid][1], atol=TOLERANCE)


ADAPTER = "train = { lora = { r = 4 }, learning_rate = 5e-3 }\n"


def test_a_killed_job_that_trains_an_adapter_goes_on_with_it(tmp_path: Path) -> None:
    """Killed while its first adapter samples, then run to the end with evaluation, beside what transformers says."""
    job = write_job(tmp_path / "lora", "vllm", ADAPTER)
    job.write_text(job.read_text().replace("iterations = 1", "iterations = 2"))
    first = "policies/student/v1/adapter_model.safetensors"
    ended = interrupt(job, signal.SIGKILL, group=True, verb="run", after=first)
    assert not ended.left
    said = run_mopd("run", job, timeout=900).stderr
    assert "resumed" in said
    policies = tmp_path / "lora" / "store" / "policies"
    store = Store.open(str(job.parent / "store"))
    samples = store.table("samples", columns=["uid", "iteration", "policy_version_last", "prompt_len", "interruptions"])
    payload = store.read_tokens(np.arange(len(samples)), columns=["tokens", "logprobs"])
    rows = [row for row in enumerate(samples.to_pylist()) if row[1]["iteration"] == 1]
    assert len(rows) == 384
    assert {row["uid"] for _, row in rows if row["interruptions"]} == ended.cut
    model = load_model(policies / "student" / "v1")
    for index, row in rows[::8]:
        assert row["policy_version_last"] == 1
        tokens = torch.tensor(payload["tokens"][index].as_py())
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        due = logprobs[row["prompt_len"] - 1 : -1].gather(1, tokens[row["prompt_len"] :, None])[:, 0]
        np.testing.assert_allclose(payload["logprobs"][index].as_py(), due.numpy(), atol=TOLERANCE)
    evaluated = store.table("evals", columns=["policy_version"])["policy_version"].to_pylist()
    assert set(evaluated) >= {0, 2}


@pytest.mark.parametrize("keep", [True, False])
def test_vllm_stays_between_two_rollouts_or_leaves_its_memory(
    models: tuple[Path, Path], tmp_path: Path, keep: bool
) -> None:
    job = load_job(write_job(tmp_path / "job", "vllm"), overrides=[f"engine.keep={str(keep).lower()}"])
    engines, used = Engines(job), []
    for version, folder in enumerate(models):
        with engines.use(folder, version) as engine:
            assert isinstance(engine, VllmEngine)
            assert len(decode(engine, make_requests(4))) == 4
            used.append(psutil.Process(engine._engine.engine_core.resources.engine_manager.processes[0].pid))
        _, alive = psutil.wait_procs(used[-1:], timeout=0 if keep else 30)  # vLLM does not wait for what it kills
        assert bool(alive) == keep
    assert (used[0] == used[1]) == keep
    engines.close()
    assert not psutil.wait_procs(used, timeout=30)[1]
