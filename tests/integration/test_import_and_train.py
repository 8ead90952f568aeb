"""Rollouts of another framework, imported by the command line, are scored by a teacher and trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models.initial_weights import make_student

pytestmark = pytest.mark.slow

STAGE = """
[[stages]]
name = "imported"
data = "stored"
domains = ["sums"]
objective = "full-vocab"
"""


def with_stored_stage(job: Path, objective: str = "full-vocab") -> Path:
    """The tiny job's file, in which one stage trains on what was imported, with the initial student as the teacher."""
    text = job.read_text()
    head = text[: text.index("[[stages]]")].replace('"stage:sums"', '"student"').replace('"stage:words"', '"student"')
    job.write_text(head.replace("eval = 8", "eval = 1") + STAGE.replace("full-vocab", objective))
    return job


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A verl dump of 32 answers to 16 questions."""
    file = tmp_path / "dump" / "1.jsonl"
    file.parent.mkdir()
    rows = [{"input": f"{i} + 1 = ", "output": str(i + 1 + j), "gts": str(i + 1), "score": 1.0 - j, "step": 1}
            for i in range(16) for j in range(2)]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_imported_answers_are_scored_and_trained_on(
    write_job: Callable[..., Path], mopd: Callable, tmp_path: Path, dump: Path
) -> None:
    job = with_stored_stage(write_job(tmp_path))
    refused = mopd("run", job, check=False)
    assert refused.returncode == 2
    assert "mopd import FORMAT PATH --stage imported" in " ".join(refused.stderr.split())
    store = tmp_path / "store"
    student = make_student(load_job(job).student, tmp_path / "student", seed=7)
    import_args = ("--store", store, "--stage", "imported", "--domain", "sums", "--tokenizer", student)
    first = json.loads(mopd("import", "verl", dump, *import_args, "--json").stdout)
    again = json.loads(mopd("import", "verl", dump, *import_args, "--json").stdout)
    assert (first["inserted"], first["rewards"], again["inserted"], again["rewards"]) == (32, 32, 0, 0)
    mopd("run", job)
    opened = open_store(str(store))
    scores = opened.sql("select kind, count(*) as n from scores group by 1 order by 1").to_pylist()
    assert scores == [{"kind": "hidden", "n": 32}, {"kind": "logprob", "n": 32}]
    (steps,) = opened.sql("select count(*) as n, sum(samples) as samples from steps").to_pylist()
    assert (steps["n"], steps["samples"]) == (2, 32)
    assert (store / "policies" / "imported" / "v1" / "model.safetensors").is_file()
    out = tmp_path / "samples.jsonl"
    mopd("export", store, out, "--format", "jsonl", "--where", "stage = 'imported'")
    assert len(out.read_text().splitlines()) == 32


def test_imported_answers_are_trained_on_in_windows(
    write_job: Callable[..., Path], mopd: Callable, tmp_path: Path, dump: Path
) -> None:
    job = with_stored_stage(write_job(tmp_path))
    windows = ("--set", "stages.imported.window_samples=12", "--set", "stages.imported.iterations=4")
    refused = mopd("run", job, *windows, check=False)
    assert refused.returncode == 2
    assert "mopd import FORMAT PATH --stage imported" in " ".join(refused.stderr.split())
    store = tmp_path / "store"
    student = make_student(load_job(job).student, tmp_path / "student", seed=7)
    import_args = ("--store", store, "--stage", "imported", "--domain", "sums", "--tokenizer", student)
    mopd("import", "verl", dump, *import_args)
    mopd("run", job, *windows)
    opened = open_store(str(store))
    trained = opened.sql('select "window", sum(samples)::int as samples from steps group by 1 order by 1').to_pylist()
    assert [row["window"] for row in trained] == [0, 1, 2, 3]
    sizes = [row["samples"] for row in trained]
    assert sorted(sizes[:3]) == [8, 12, 12]
    assert sizes[3] in (8, 12), "the next pass begins"
    plans = [opened.plan("imported", window) for window in range(4)]
    passed = [row for plan in plans[:3] if plan is not None for row in plan.sample_rows.tolist()]
    assert sorted(passed) == list(range(32))
    assert (store / "policies" / "imported" / "v4" / "model.safetensors").is_file()
    planned = json.loads(mopd("plan", job, *windows, "--all", "--json").stdout)
    assert planned["windows"] == 0


def test_a_policy_gradient_needs_the_samplers_log_probs(
    write_job: Callable[..., Path], mopd: Callable, tmp_path: Path, dump: Path
) -> None:
    job = with_stored_stage(write_job(tmp_path), "sampled")
    store = tmp_path / "store"
    student = make_student(load_job(job).student, tmp_path / "student", seed=7)
    import_args = ("--store", store, "--stage", "imported", "--domain", "sums", "--tokenizer", student)
    mopd("import", "verl", dump, *import_args)
    refused = mopd("run", job, check=False)
    assert refused.returncode == 2
    assert "32 of 32 samples came without the sampler's log-probs" in " ".join(refused.stderr.split())


def test_a_policy_gradient_refuses_log_probs_of_a_cut_distribution(
    write_job: Callable[..., Path], mopd: Callable, tmp_path: Path
) -> None:
    job = with_stored_stage(write_job(tmp_path), "sampled")
    student = make_student(load_job(job).student, tmp_path / "student", seed=7)
    row = {"prompt_ids": [20, 21], "response_ids": [22, 23], "logprobs": [-0.5, -0.1], "prompt": "1 + 1 = "}
    file = tmp_path / "cut.jsonl"
    file.write_text("".join(json.dumps(row | {"top_p": top_p}) + "\n" for top_p in (1.0, 0.9, 0.9)))
    import_args = ("--store", tmp_path / "store", "--stage", "imported", "--domain", "sums", "--tokenizer", student)
    mopd("import", "plain", file, *import_args)
    refused = mopd("plan", job, "--stage", "imported", check=False)
    assert refused.returncode == 2
    assert "2 of 3 samples were drawn under top_p or top_k" in " ".join(refused.stderr.split())
