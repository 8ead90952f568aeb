"""A whole job of chats with thoughts and tools whose reward raises, hangs, or cannot score some answers.

What was rewarded stays when the reward raises; the job goes on once it is mended, also after a SIGKILL. Answers that
cannot be scored are counted, left out of their group, and scored again on request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_templates import chat_tokenizer

from mopd_dataplane import open_store
from mopd_dataplane.models.tiny import from_config

REWARD = """
import pathlib, time, zlib

HERE = pathlib.Path(__file__).parent

def judge(prompt, response):
    kind = zlib.crc32(response.encode()) % 8
    if kind == 0 and (HERE / "raises").exists():
        raise KeyError("no parser for this answer")
    if kind == 1 and not (HERE / "mended").exists():
        time.sleep(600)
    if kind == 2 and not (HERE / "mended").exists():
        return None
    return kind / 8
"""
JOB = """
name = "chats"
store = "{folder}/store"

[student]
path = "{folder}/student"
prompt_template = "chat"

[domains.sums]
source = "{folder}/sums.jsonl"
train = 8
reward = "failing_judge:judge"
reward_timeout_s = 1.0
max_unscorable = 0.9
environment = "command"
environment_args = {{ call = "(?s)(?P<a>.)", argv = ["echo", "{{a}}"], turns = 1 }}

[teachers.expert]
source = "{folder}/teacher"

[routing]
sums = "expert"

[rollout]
group_size = 4
prompts_per_iteration = 4
max_prompt_tokens = 256
max_new_tokens = 64

[plan]
pack_tokens = 1024
batch_samples = 16

[objectives.sampled.policy_gradient]
reward_coef = 1.0

[[stages]]
name = "student"
objective = "sampled"
iterations = 2
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "mopd_dataplane", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job of a tiny student and teacher with a template that opens a thought."""
    tokenizer = chat_tokenizer("qwen3.5")
    settings = {
        "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 16, "max_position_embeddings": 1024,
    }  # fmt: skip
    for seed, name in enumerate(("student", "teacher")):
        from_config(settings, tokenizer, tmp_path / name, seed=seed, dtype="float32")
    rows = [{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "failing_judge.py").write_text(REWARD)
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_job_goes_on_beside_a_reward_that_raises_hangs_and_gives_up(folder: Path) -> None:
    job = str(folder / "job.toml")
    (folder / "raises").touch()
    refused = run(folder, "run", job)
    assert refused.returncode == 2, refused.stderr
    assert "raised KeyError: 'no parser for this answer'" in refused.stderr
    assert "failing_judge.py:9" in refused.stderr
    assert "defect of mopd" not in refused.stderr
    store = open_store(str(folder / "store"))
    rewards_before = store.table("rewards").num_rows
    assert store.table("samples", ["uid"]).num_rows == 16

    (folder / "raises").unlink()
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "mopd_dataplane", "run", job]
    attempt = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while open_store(str(folder / "store")).table("rewards").num_rows <= rewards_before and time.monotonic() < deadline:
        time.sleep(0.5)
    assert attempt.poll() is None, "the kill meets a run that is still on its way"
    attempt.kill()
    attempt.wait()
    done = run(folder, "run", job)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if " reward " in line]
    assert any("unscorable" in line for line in told), done.stderr

    store = open_store(str(folder / "store"))
    rewards, samples = store.table("rewards", ["uid"])["uid"].to_pylist(), store.table("samples", ["uid"]).num_rows
    said = store.sql("select uid, reward, unscorable from responses").to_pylist()
    reasons = {row["unscorable"] for row in said if row["reward"] is None}
    unscorable = [row["uid"] for row in said if row["unscorable"]]
    assert samples == len(rewards) + len(unscorable) == 32
    assert len(rewards) >= rewards_before
    assert reasons <= {"the function returned None", "no result after 1 s"}
    assert unscorable, "the seed gives some of either"
    plans = store.table("plans", ["stats", "sample_rows"]).to_pylist()
    planned = {row for plan in plans for row in plan["sample_rows"]}
    dropped = sum(json.loads(plan["stats"]).get("dropped_unscorable", 0) for plan in plans)
    assert len(planned) + dropped == 32
    assert dropped == len(unscorable)
    shown = run(folder, "show", str(folder / "store"), unscorable[0])
    assert "cannot be scored" in shown.stdout

    (folder / "mended").touch()
    again = run(folder, "reward", job, "--stage", "student", "--missing", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["rewards"] == len(unscorable)
    assert open_store(str(folder / "store")).table("rewards").num_rows == 32


@pytest.mark.slow
def test_a_stage_that_learns_nothing_says_why(folder: Path) -> None:
    job = folder / "job.toml"
    job.write_text(
        job.read_text().replace("failing_judge:judge", "flat:judge")
        .replace("reward_timeout_s = 1.0", "")
        .replace("reward_coef = 1.0", "reward_coef = 1.0\nteacher_coef = 0.0")
        .replace("iterations = 2", "iterations = 1")
    )  # fmt: skip
    (folder / "flat.py").write_text("def judge(prompt, response):\n    return 0.5\n")
    done = run(folder, "run", str(job))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "the gradient was exactly 0 at all 1 steps of window 0: nothing was learned" in said
    assert "In every group all answers have the same reward" in said
    events = open_store(str(folder / "store")).table("events", filter="kind = 'warning'").to_pylist()
    assert [event["event_id"] for event in events] == ["zero_gradient/student/0"]


TERMS = """
from mopd_dataplane import Term

class Rise(Term):
    def token_loss(self, hidden, head, batch, *, temperature, teacher_head):
        logprobs = (hidden.float() @ head.weight.float().T / temperature).log_softmax(-1)
        return -logprobs.gather(-1, batch.targets[:, None]).squeeze(-1), {}

class Fall(Rise):
    weight: float = -1.0
"""


@pytest.mark.slow
def test_terms_that_cancel_are_named(folder: Path) -> None:
    job = folder / "job.toml"
    terms = '[objectives.sampled.terms]\n"opposite:Rise" = {}\n"opposite:Fall" = {}\n'
    job.write_text(
        job.read_text().replace("[objectives.sampled.policy_gradient]\nreward_coef = 1.0\n", terms)
        .replace("group_size = 4", "group_size = 1").replace("batch_samples = 16", "batch_samples = 4")
        .replace("iterations = 2", "iterations = 1")
    )  # fmt: skip
    (folder / "opposite.py").write_text(TERMS)
    done = run(folder, "run", str(job))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "the gradient was exactly 0 at all 1 steps of window 0: nothing was learned" in said
    assert "cancel (their weights: opposite:Rise 1, opposite:Fall -1)" in said


@pytest.mark.slow
def test_a_stage_with_too_many_unscorable_answers_stops_with_examples(folder: Path) -> None:
    job = folder / "job.toml"
    job.write_text(job.read_text().replace("max_unscorable = 0.9", "max_unscorable = 0.0").replace(
        "failing_judge:judge", "no_judge:judge"
    ).replace("reward_timeout_s = 1.0", ""))  # fmt: skip
    (folder / "no_judge.py").write_text("def judge(prompt, response):\n    return None\n")
    refused = run(folder, "run", str(job))
    assert refused.returncode == 2
    assert "16 of 16 answers of domain 'sums' cannot be scored by 'no_judge:judge'" in refused.stderr
    assert " ".join(refused.stderr.split()).count("(the function returned None)") == 3
    assert "mopd reward JOB --stage student --missing" in refused.stderr
    again = run(folder, "run", str(job))
    assert again.returncode == 2
    assert " ".join(again.stderr.split()).count("(the function returned None)") == 3
    (folder / "no_judge.py").write_text("def judge(prompt, response):\n    return len(response) % 2 == 0\n")
    assert run(folder, "reward", str(job), "--stage", "student", "--missing").returncode == 0
    assert run(folder, "run", str(job)).returncode == 0


@pytest.mark.slow
def test_an_evaluation_that_cannot_be_scored_stops_and_stores_nothing(folder: Path) -> None:
    job = folder / "job.toml"
    job.write_text(job.read_text().replace("train = 8", "train = 8\neval = 6").replace(
        "failing_judge:judge", "no_judge:judge"
    ).replace("max_unscorable = 0.9", "").replace("reward_timeout_s = 1.0", ""))  # fmt: skip
    with (folder / "sums.jsonl").open("a") as lines:
        lines.writelines(json.dumps({"question": f"{n}+{n}?", "answer": str(2 * n)}) + "\n" for n in range(8, 14))
    (folder / "no_judge.py").write_text("def judge(prompt, response):\n    return None\n")
    refused = run(folder, "run", str(job))
    assert refused.returncode == 2, refused.stderr
    said = " ".join(refused.stderr.split())
    assert "evaluation of 'init': 6 of 6 answers of domain 'sums' cannot be scored by 'no_judge:judge'" in said
    assert "max_unscorable = 0.2 allows" in said
    assert open_store(str(folder / "store")).table("evals").num_rows == 0


@pytest.mark.slow
def test_held_out_answers_are_scored_again_as_they_were_given(folder: Path) -> None:
    job = folder / "job.toml"
    job.write_text(job.read_text().replace("train = 8", "train = 8\neval = 6").replace(
        "failing_judge:judge", "half_judge:judge"
    ).replace("reward_timeout_s = 1.0", "").replace("iterations = 2", "iterations = 1"))  # fmt: skip
    with (folder / "sums.jsonl").open("a") as lines:
        lines.writelines(json.dumps({"question": f"{n}+{n}?", "answer": str(2 * n)}) + "\n" for n in range(8, 14))
    judge = "def judge(prompt, response):\n    return {} if int(prompt.split('+')[0]) % 2 else len(response)\n"
    (folder / "half_judge.py").write_text(judge.format(None))
    done = run(folder, "run", str(job))
    assert done.returncode == 0, done.stderr
    assert any(" evaluate " in line and "unscorable 3" in line for line in done.stderr.splitlines()), done.stderr
    store = open_store(str(folder / "store"))
    assert store.table("evals", filter="policy_version = 1").num_rows == 3
    assert run(folder, "run", str(job)).returncode == 0, "a run that has ended answers none of them again"
    assert store.table("events", filter="kind = 'unscorable_eval'").num_rows == 6

    still = run(folder, "reward", str(job), "--stage", "student", "--missing", "--json")
    assert json.loads(still.stdout)["unscorable_evaluations"] == 6
    (folder / "half_judge.py").write_text(judge.format("len(response)"))
    again = run(folder, "reward", str(job), "--stage", "student", "--missing", "--json")
    assert again.returncode == 0, again.stderr
    counts = json.loads(again.stdout)
    assert (counts["evaluations"], counts["unscorable_evaluations"]) == (6, 0)
    store = open_store(str(folder / "store"))
    rows = store.table("evals", filter="policy_version = 1").to_pylist()
    assert len(rows) == 6
    assert all(row["response"] and row["reward"] is not None for row in rows)
