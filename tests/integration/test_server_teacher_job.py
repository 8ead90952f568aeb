"""A job whose teacher exists only behind a URL: scored from a server, recognised at each start, and ended at once by a
signal while that server is silent."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commandline import ENVIRONMENT, command, run_mopd
from model_server import Handler, Misbehave, ModelServer, fails, is_silent, never_ends, sends, serve_model

from mopd_dataplane import Store, open_store
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.rollout.engines.vllm_server import ServerEngine
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.steps.server_identity import check_policy_server

TINY = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.2,
}  # fmt: skip
JOB = """
name = "served"
store = "{folder}/store"

[student]
path = "{folder}/student"

[domains.sums]
source = "reasoning-gym"
dataset = "chain_sum"
train = 4

[teachers]
large = {{ url = "{url}" }}
[routing]
sums = "large"

[rollout]
max_new_tokens = 6
[score]
engine = "vllm"
reads = "prompt_logprobs"
[plan]
pack_tokens = 256
batch_samples = 4
[objectives.sampled.policy_gradient]
[[stages]]
name = "student"
objective = "sampled"
iterations = 1
"""
PROMPT_S = 20.0
"""Ten minutes would be waited without the signal; the rest is the start of Python."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models with one tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "large", "other")):
        make_student(sections.Student(config=TINY, tokenizer="characters"), folder / name, seed=seed)
    return folder


@pytest.fixture
def server(models: Path) -> Iterator[ModelServer]:
    with serve_model(models / "large", name="large") as running:
        yield running


@pytest.fixture
def job(tmp_path: Path, models: Path, server: ModelServer) -> Path:
    """A job whose prompts are answered and not scored yet."""
    (tmp_path / "student").symlink_to(models / "student")
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(folder=tmp_path, url=server.url))
    run_mopd("rollout", file)
    return file


def signals(job: Path) -> int:
    """Number of stored log-prob signals of the teacher."""
    store = open_store(str(job.parent / "store"))
    return store.table("signals/large/logprob").num_rows if "signals/large/logprob" in store.names() else 0


def scored(job: Path) -> Store:
    """The store once every answer has a signal."""
    run_mopd("score", job)
    assert signals(job) == 4
    return open_store(str(job.parent / "store"))


@pytest.mark.slow
def test_signals_are_the_log_probs_of_the_model_behind_the_url(job: Path, server: ModelServer) -> None:
    store = scored(job)
    teacher = store.teachers()["large"]
    assert (teacher.source, teacher.head_file, teacher.hidden_size) == (server.url, "", 0)
    rows = np.arange(4)
    tokens = store.read_tokens(rows, columns=["tokens"])["tokens"].to_pylist()
    lengths = store.take_samples(rows, ["prompt_len"])["prompt_len"].to_pylist()
    logprobs = store.read_signal("large", "logprob", rows)
    for ids, length, own in zip(tokens, lengths, logprobs, strict=True):
        values = server.logprobs(ids)
        np.testing.assert_allclose(own, [values[i - 1, ids[i]] for i in range(length, len(ids))], atol=1e-5)
    run_mopd("run", job)
    assert store.table("steps").num_rows == 1, "the trainer learns from them"
    run_mopd("store", "verify", job.parent / "store")


def test_a_sampling_server_with_other_weights_is_refused(tmp_path: Path, models: Path) -> None:
    (tmp_path / "student").symlink_to(models / "student")
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path, url="http://127.0.0.1:1/v1"))
    run = open_run(load_job(tmp_path / "job.toml"), Progress(None))
    stage = run.job.stages[0]
    with serve_model(models / "student") as server:
        engine = ServerEngine(models / "student", url=server.url, slots=1, noise="seeded")
        check_policy_server(run, stage, engine)
        check_policy_server(run, stage, engine)
        events = run.store.table("events", filter="kind = 'server_identity'")["event_id"].to_pylist()
        assert events == [f"server/policy/{engine.policy_digest}"]
        server.exchange_weights(models / "other")
        with pytest.raises(
            MismatchError, match=f"has samples of the latter as the policy with digest {engine.policy_digest}"
        ):
            check_policy_server(run, stage, engine)
        engine.close()


@pytest.mark.slow
def test_log_probs_of_the_completions_api_are_the_same(job: Path, server: ModelServer) -> None:
    job.write_text(job.read_text().replace('reads = "prompt_logprobs"', 'reads = "echo"\nprobe = 0'))
    server.refused_fields = {"max_tokens": 0}
    server.misbehave = on_scoring(fails(2, sends(b"slow down", status=429)))
    ran = run_mopd("score", job)
    store = open_store(str(job.parent / "store"))
    rows = np.arange(4)
    tokens = store.read_tokens(rows, columns=["tokens"])["tokens"].to_pylist()
    lengths = store.take_samples(rows, ["prompt_len"])["prompt_len"].to_pylist()
    for ids, length, own in zip(tokens, lengths, store.read_signal("large", "logprob", rows), strict=True):
        values = server.logprobs(ids)
        np.testing.assert_allclose(own, [values[i - 1, ids[i]] for i in range(length, len(ids))], atol=1e-5)
    line = next(line for line in ran.stderr.splitlines() if " score " in line)
    assert f"large 4 requests, 2 retries, {sum(map(len, tokens))} prompt tokens" in line
    assert not any("prompt_logprobs" in (body or {}) for _, body in server.asked)
    job.write_text(job.read_text().replace('reads = "echo"', 'reads = "prompt_logprobs"'))
    run_mopd("score", job)


TOPK = """
reads = "sglang"
probe = 0
topk = 8
topk_source = "student"
"""


@pytest.mark.slow
def test_the_students_top_k_is_read_from_an_sglang_server(tmp_path: Path, models: Path, server: ModelServer) -> None:
    """A stand-in answers as SGLang's source computes. The trainer reads what it would read of a teacher here."""
    (tmp_path / "student").symlink_to(models / "student")
    job = tmp_path / "job.toml"
    text = JOB.format(folder=tmp_path, url=server.url).replace('reads = "prompt_logprobs"', TOPK)
    divergence = 'divergence]\nkind = "reverse"\nsignal = "topk"\ntopk_mode = "renormalised"'
    job.write_text(text.replace("policy_gradient]", divergence))
    slow = fails(2, sends(b"slow down", status=429, Retry_After="1"))
    server.misbehave = lambda connection, reply: (
        "token_ids_logprob" in (server.asked[-1][1] or {}) and slow(connection, reply)
    )
    run_mopd("rollout", job)
    ran = run_mopd("score", job)
    store = open_store(str(tmp_path / "store"))
    rows = np.arange(4)
    tokens = store.read_tokens(rows, columns=["tokens"])["tokens"].to_pylist()
    lengths = store.take_samples(rows, ["prompt_len"])["prompt_len"].to_pylist()
    student = load_model(models / "student", dtype="float32")
    for ids, length, (topk_ids, logprobs), own in zip(
        tokens, lengths, store.read_signal("large", "topk", rows), store.read_signal("large", "logprob", rows),
        strict=True,
    ):  # fmt: skip
        with torch.no_grad():
            likeliest = student(torch.tensor([ids])).logits[0, length - 1 : -1].topk(8).indices.numpy()
        np.testing.assert_array_equal(topk_ids, likeliest)
        values = server.logprobs(ids)[length - 1 : -1]
        np.testing.assert_allclose(logprobs, np.take_along_axis(values, likeliest, 1), atol=1e-5)
        np.testing.assert_allclose(
            own, [row[token] for row, token in zip(values, ids[length:], strict=True)], atol=1e-5
        )
    assert set(store.table("signals/large/topk", ["topk_source"])["topk_source"].to_pylist()) == {"student"}
    line = next(line for line in ran.stderr.splitlines() if " score " in line)
    assert f"large 4 requests, 2 retries, {sum(map(len, tokens))} prompt tokens" in line
    run_mopd("run", job)
    assert store.table("steps").num_rows == 1, "the trainer learns from them"


def on_scoring(behaviour: Misbehave) -> Misbehave:
    """Misbehave once the teacher has been recognised: the fixed texts are the only ones in the first requests."""
    texts = 7

    def misbehave(connection: Handler, reply: Any) -> bool:
        echoes = sum(1 for path, _ in connection.server.asked if path == "/v1/completions")
        return "choices" in (reply or {}) and echoes > texts + 1 and behaviour(connection, reply)

    return misbehave


@pytest.mark.slow
def test_another_model_under_the_same_name_is_refused(job: Path, server: ModelServer, models: Path) -> None:
    identity = scored(job).table("events", filter="kind = 'server_identity'").to_pylist()
    assert [row["event_id"] for row in identity] == ["server/large"]
    job.write_text(job.read_text().replace("iterations = 1", "iterations = 2"))
    server.exchange_weights(models / "other")
    refused = run_mopd("run", job, check=False)
    assert refused.returncode == 2, refused.stderr
    assert "nat a token from those of 'large'" in " ".join(refused.stderr.split())
    assert signals(job) == 4
    server.exchange_weights(models / "large")
    run_mopd("run", job)
    assert signals(job) == 8


@pytest.mark.slow
def test_another_tokenizer_is_refused(job: Path, server: ModelServer) -> None:
    server.misbehave = lambda connection, reply: (
        "tokens" in (reply or {}) and sends(b'{"tokens": [1, 2, 3]}')(connection, reply)
    )
    refused = run_mopd("score", job, check=False)
    assert refused.returncode == 2, refused.stderr
    assert "as [1, 2, 3] (3 ids), the student as" in " ".join(refused.stderr.split())
    assert signals(job) == 0


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_teacher(job: Path, server: ModelServer) -> None:
    for behaviour, number in ((is_silent, signal.SIGTERM), (never_ends, signal.SIGINT), (never_ends, signal.SIGTERM)):
        server.misbehave = partial(on_completions, behaviour)
        server.asked.clear()
        process = subprocess.Popen(command("score", job), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while not any(path == "/v1/completions" for path, _ in server.asked):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        began = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - began < PROMPT_S
        assert process.returncode == 130, said
    server.misbehave = None
    scored(job)


def on_completions(behaviour: Misbehave, connection: Handler, reply: Any) -> bool:
    """Misbehave where log-probs are asked for, and nowhere else."""
    return "choices" in (reply or {}) and behaviour(connection, reply)
