"""A job whose specialists and student are adapters on one base: run, killed, run again, and read by its other tools."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nodes import answers, killed_in, on_node, run

from mopd_dataplane import open_store
from mopd_dataplane.models import hf
from mopd_dataplane.models.adapter_files import ADAPTER_CONFIG, BASE, is_adapter

pytestmark = pytest.mark.slow
LORA = ("sums", "words", "student")
SETTINGS = [f"stages.{name}.train={{lora={{r=4}}, learning_rate=5e-3}}" for name in LORA]


def arguments(*more: str) -> list[str]:
    return [part for setting in (*SETTINGS, *more) for part in ("--set", setting)]


@pytest.fixture(scope="module")
def adapter_job(tmp_path_factory: pytest.TempPathFactory, write_job: Callable, mopd: Callable) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    mopd("run", write_job(folder), *arguments('stages.student.train.lora={r=4, merge="end"}'))
    return folder


def test_specialists_and_student_are_adapters_on_the_stage_they_start_from(adapter_job: Path) -> None:
    policies = adapter_job / "store" / "policies"
    store = open_store(str(adapter_job / "store"))
    base = policies / "base" / "v1"
    assert not is_adapter(base)
    for name in LORA:
        folder = policies / name / "v1"
        assert json.loads((folder / BASE).read_text())["place"] == "../../base/v1"
        size = sum(file.stat().st_size for file in folder.rglob("*"))
        assert size < sum(file.stat().st_size for file in base.rglob("*.safetensors")) / 4
    teachers = store.teachers()
    assert {name: one.weights_digest for name, one in teachers.items()} == {
        name: hf.weights_digest(policies / name / "v1") for name in teachers
    }
    assert len({one.weights_digest for one in teachers.values()} | {hf.weights_digest(base)}) == 3
    assert len({one.head_file for one in teachers.values()}) == 1  # the base's
    assert {row["policy"] for row in store.table("evals", ["policy"]).to_pylist()} == {"base", *LORA}
    assert store.verify().ok


def test_the_student_is_left_as_an_adapter_and_merged(adapter_job: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policies = adapter_job / "store" / "policies"
    ids = torch.arange(4, 30)[None]
    with torch.no_grad():
        whole = policies / "student" / "merged-v2"
        merged = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(policies / "base" / "v1", dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, policies / "student" / "v2")(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    named = json.loads((policies / "student" / "v2" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    assert Path(named) == policies / "base" / "v1"


def test_a_job_killed_while_it_trains_an_adapter_ends_with_the_same_samples(
    adapter_job: Path, tmp_path: Path, write_job: Callable, start_mopd: Callable, mopd: Callable
) -> None:
    job = write_job(tmp_path)
    lora_args = arguments('stages.student.train.lora={r=4, merge="end"}')
    attempt = start_mopd("run", job, *lora_args)
    latest = tmp_path / "store" / "checkpoints" / "student" / "latest"
    while not latest.exists():  # in the first window of the student's adapter
        assert attempt.poll() is None
        time.sleep(0.01)
    attempt.kill()
    attempt.wait()
    mopd("run", job, *lora_args)
    query = "select uid, response_len from samples order by uid"
    assert open_store(str(tmp_path / "store")).sql(query) == open_store(str(adapter_job / "store")).sql(query)
    for version in ("v1", "v2"):
        digests = {hf.weights_digest(root / "store/policies/student" / version) for root in (tmp_path, adapter_job)}
        assert len(digests) == 1


def test_a_job_of_adapters_killed_in_every_action_ends_with_the_same_samples_and_weights(
    adapter_job: Path, tmp_path: Path, write_job: Callable, mopd: Callable
) -> None:
    """Killed each time another action has ended, so within the first moments of the next one."""

    def ended(store: Path) -> int:
        times = "select distinct event_id from events where kind = 'stage_time'"
        return open_store(str(store)).sql(times).num_rows if (store / "store.json").exists() else 0

    job, store = write_job(tmp_path), tmp_path / "store"
    lora_args = arguments('stages.student.train.lora={r=4, merge="end"}')
    actions, kills = ended(adapter_job / "store"), 0
    while (before := ended(store)) < actions - 1:
        killed_in(["run", str(job), *lora_args], lambda before=before: ended(store) > before, signal.SIGKILL)
        kills += 1
    assert kills > len(LORA) * 3
    mopd("run", job, *lora_args)
    for query in (
        "select uid, response_len from samples order by uid",
        "select policy, policy_version, prompt_id, response from evals order by all",
    ):
        assert open_store(str(store)).sql(query) == open_store(str(adapter_job / "store")).sql(query)
    for version in ("base/v1", "sums/v1", "words/v1", "student/v1", "student/v2"):
        assert len({hf.weights_digest(root / "policies" / version) for root in (store, adapter_job / "store")}) == 1
    assert open_store(str(store)).verify().ok


FOLLOWED = """
[[stages]]
name = "later"
start = "base"
objective = "sampled"
iterations = 3
rollout = {{ prompts_per_iteration = 24 }}
plan = {{ batch_samples = 12, max_staleness = 3 }}
train = {{ lora = {{ r = 4 }}, learning_rate = 5e-3 }}
"""


def test_an_adapter_is_trained_while_it_samples(
    adapter_job: Path, tmp_path: Path, write_job: Callable, start_mopd: Callable, mopd: Callable
) -> None:
    job = write_job(tmp_path, extra=FOLLOWED)
    shutil.copytree(adapter_job / "store", tmp_path / "store", symlinks=True)
    lora_args = arguments('stages.student.train.lora={r=4, merge="end"}')
    producers = [
        start_mopd(command, job, "--stage", "later", "--follow", *lora_args) for command in ("rollout", "score")
    ]
    mopd("train", job, "--stage", "later", "--follow", *lora_args, timeout=400)
    for process in producers:
        assert process.wait(60) == 0, process.stderr.read().decode()
    store = open_store(str(tmp_path / "store"))
    versions = sorted((tmp_path / "store" / "policies" / "later").glob("v*"))
    assert versions
    assert all(map(is_adapter, versions))
    assert len({hf.weights_digest(folder) for folder in versions}) == len(versions)
    counts = store.sql("select count(*) n, count(distinct uid) uids from samples where stage = 'later'").to_pylist()
    assert counts == [{"n": 3 * 24, "uids": 3 * 24}]
    sampled_by = store.sql("select distinct policy_version_last v from samples where stage = 'later'")["v"].to_pylist()
    assert len(sampled_by) > 1, "rollouts picked up an adapter that was published while they ran"


def test_another_node_goes_on_with_an_adapter_whose_store_is_on_s3(
    s3: str, adapter_job: Path, tmp_path: Path, write_job: Callable
) -> None:
    job = write_job(tmp_path)
    lora_args = arguments('stages.student.train.lora={r=4, merge="end"}')
    killed_in(
        [*on_node(tmp_path / "a", s3, job=job), *lora_args],
        lambda: (tmp_path / "a" / "policies" / "student" / "v1").exists(),
        signal.SIGKILL,
    )
    run([*on_node(tmp_path / "b", s3, job=job), *lora_args])
    assert answers(s3) == answers(str(adapter_job / "store"))
    store = open_store(s3)
    assert store.verify().findings == []
    ours, theirs = tmp_path / "b" / "policies", adapter_job / "store" / "policies"
    for version in ("student/v2", "student/merged-v2"):
        assert hf.weights_digest(ours / version) == hf.weights_digest(theirs / version)
