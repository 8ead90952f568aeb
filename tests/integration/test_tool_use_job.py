"""A job with a tool is killed in the middle of a call and run again: every command ran once, and no loss fell on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane import Store, load_job, open_store, run_job
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models.initial_weights import make_student

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"
STAGES = """
[[stages]]
name = "student"
objective = "sampled"
domains = ["sums"]
iterations = 1
rollout = { prompts_per_iteration = 16, max_new_tokens = 200 }
"""
DEADLINE_S = 300


def check_masks(store: Store, teacher: str, replies: set[int]) -> None:
    """No loss and no signal falls on what the tool said, which has one of these lengths."""
    samples = store.samples(["loss_tokens"])["loss_tokens"].to_pylist()
    rows = np.arange(len(samples))
    logprob = store.read_signal(teacher, "logprob", rows)
    for row, payload in enumerate(store.read_tokens(rows).to_pylist()):
        mask = np.array(payload["loss_mask"], bool)
        scored = np.asarray(logprob[row])
        assert samples[row] == mask.sum()
        assert not np.any(scored[~mask])
        assert np.all(scored[mask] < 0)
        assert (~mask).sum() in replies


def test_the_recipe_rolls_out_rewards_evaluates_and_trains_through_its_tool(tmp_path: Path) -> None:
    """Its last stage from an untrained policy, so whatever that says is a call; scored by log-probs, so that the signal
    of each token can be looked at."""
    raw = load_job(JOBS / "tool-use").model_dump(mode="json")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    raw["student"]["config"] |= {"hidden_size": 64, "num_hidden_layers": 1, **heads}
    teacher = make_student(Student.model_validate(raw["student"]), tmp_path / "teacher", seed=5)
    sums = raw["domains"]["sums"] | {"train": 8, "eval": 8, "source": str(JOBS / "tool-use" / "sums.jsonl")}
    sums["environment_args"] = {"call": "(?s).*", "argv": ["echo", "7"], "turns": 1}
    raw["eval"] = {"temperature": 1.0}  # the likeliest token of an untrained policy may never end its turn
    raw["objectives"]["sampled"] = {"policy_gradient": {"correction": "icepop"}}
    stage = raw["stages"][-1] | {"start": "init", "iterations": 1, "objective": "sampled"}
    stage["rollout"] |= {"prompts_per_iteration": 8, "max_new_tokens": 100}
    stage["plan"] |= {"batch_samples": 8}
    raw |= {
        "store": str(tmp_path / "store"), "domains": {"sums": sums}, "stages": [stage],
        "teachers": {"expert": raw["teachers"]["expert"] | {"source": str(teacher)}},
    }  # fmt: skip
    file = tmp_path / "job.json"
    file.write_text(json.dumps(raw))
    run_job(load_job(file))
    store = open_store(str(tmp_path / "store"))
    turns = store.samples(["turns"])["turns"].to_pylist()
    assert len(turns) == 8
    assert 2 in turns
    assert set(turns) <= {1, 2}
    check_masks(store, "expert", {0, len("\n7\n")})
    answers = store.table("evals", ["response", "finish_reason"]).to_pylist()
    assert len(answers) == 16
    assert any("\n7\n" in answer["response"] for answer in answers)
    assert len(store.table("rewards")) == 8
    assert store.sql("select count(*) as n from steps")["n"][0].as_py() == 1


def test_a_job_killed_in_a_tool_call_runs_every_command_once(
    write_job: Callable[..., Path], start_mopd: Callable, mopd: Callable, tmp_path: Path
) -> None:
    """An untrained policy ends its turn somewhere in 200 tokens; whatever it said is a call here."""
    ran = tmp_path / "ran"
    job = write_job(tmp_path)
    text = job.read_text()
    text = text[: text.index("[[stages]]")].replace('"stage:sums"', '"student"').replace('"stage:words"', '"student"')
    tool = f'argv = ["sh", "-c", "echo $HOME >> {ran}; sleep 0.3; echo 7"]'
    keys = f'environment = "command"\nenvironment_args = {{ call = "(?s).*", turns = 1, {tool} }}\n'
    text = text.replace("[domains.words]", keys + "[domains.words]").replace("eval = 8", "eval = 0")
    text = text.replace("pack_tokens = 128", "pack_tokens = 512")
    job.write_text(text + STAGES)

    first = start_mopd("run", job)
    deadline = time.monotonic() + DEADLINE_S
    while not ran.is_file():
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.kill()
    first.wait()
    before = ran.read_text().split()
    mopd("run", job)

    calls = ran.read_text().split()
    assert len(calls) > len(before)
    assert len(calls) == len(set(calls)), "a sample's command ran twice"
    store = open_store(str(tmp_path / "store"))
    assert store.verify().findings == []
    samples = store.samples(["uid", "turns", "prompt_len", "finish_reason", "loss_tokens", "response_len"]).to_pylist()
    answered = [sample for sample in samples if sample["turns"] == 2]
    assert {Path(home).name for home in calls} >= {sample["uid"] for sample in answered}
    assert answered
    assert not any(sample["finish_reason"] == "abandoned" for sample in samples)
    check_masks(store, "sums", {0, len("\n7\n")})
    assert store.sql("select count(*) as n from steps")["n"][0].as_py() == 1
    assert not list((tmp_path / "store" / "sandbox").rglob("*.claim"))
