"""Whole jobs whose sampler is right, or not: what the store, the report and a rehearsal say of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from mopd_dataplane import open_store
from mopd_dataplane.errors import MismatchError, MopdError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models import self_check
from mopd_dataplane.models.self_check import SelfCheck
from mopd_dataplane.query.measures import measure
from mopd_dataplane.records import PlanWindow
from mopd_dataplane.rollout.engines import decoder
from mopd_dataplane.rollout.engines.decoder import Decoder
from mopd_dataplane.rollout.engines.engine import Request
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.run import pipeline
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.pipeline import run_job
from mopd_dataplane.run.steps.plan import plan_window

Requests = Sequence[tuple[int, Request]]
MADE_UP = 24
"""Length in tokens of the text that every teacher and trainer reads when it is loaded."""


def one_stage(write_job: Callable[..., Path], folder: Path, dtype: str = "float32") -> Job:
    """The tiny job with its last stage alone, started from the random student, whose teachers are that student."""
    text = write_job(folder).read_text()
    head, *stages = text.split("[[stages]]")
    student = stages[-1].replace('"base"', '"init"')
    teachers = head.replace('"stage:sums"', '"student"').replace('"stage:words"', '"student"')
    file = folder / "job.toml"
    file.write_text(teachers.replace("[student]", f'[student]\ndtype = "{dtype}"') + "[[stages]]" + student)
    return load_job(file)


def until_trained(run: Run, stage: Stage, window: int, **how: int) -> PlanWindow:
    """Plan a window, and return when a running trainer has trained it."""
    plan = plan_window(run, stage, window, **how)
    deadline = time.monotonic() + 60
    while window and run.policies.latest(stage) <= window and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not window or run.policies.latest(stage) > window, "the trainer did not go on by itself"
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_job_records_every_part_and_warns_of_nothing(
    dtype: str, tmp_path: Path, write_job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = one_stage(write_job, tmp_path, dtype)
    if dtype == "float32":  # the trainer, which runs already, ends the second window before the job looks
        monkeypatch.setattr(pipeline, "plan_window", until_trained)
    run_job(job, console=Console(quiet=True))
    measures = measure(open_store(job.store))
    parts = {(row["part"], row["teacher"], row["stage"]) for row in measures.self_checks}
    teachers = {("teacher", name, "student") for name in ("sums", "words")}
    assert parts == {("sampler", "", "student"), ("trainer", "", "student")} | teachers
    assert all(0 <= row["gap"] <= row["band"] for row in measures.self_checks)
    warned = open_store(job.store).table("events", ["detail"], filter="kind = 'signal_warning'")["detail"].to_pylist()
    checks = {json.loads(detail)["check"] for detail in warned}
    assert "base" not in checks, "that the teachers are the student is what the job says"
    rollout = job.stage("student").rollout
    assert {row["tokens"] for row in measures.self_checks} == {rollout.max_prompt_tokens + rollout.max_new_tokens}
    assert [(row["window"], row["policy_version"], row["warning"]) for row in measures.sampler_gaps] == [
        (0, 0, ""), (1, 1, ""),
    ]  # fmt: skip
    assert all(0 < row["mean"] <= row["p99"] for row in measures.sampler_gaps)
    assert all(row["mean"] <= row["band"] for row in measures.sampler_gaps)


@pytest.mark.slow
def test_a_sampler_with_shifted_positions_stops_the_stage_before_its_first_step(
    tmp_path: Path, write_job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = one_stage(write_job, tmp_path)
    admit, forward = HfEngine.admit, Decoder.forward

    def shift_then_admit(self: HfEngine, requests: Requests) -> None:
        own = self._decoders[0]
        own.forward = lambda last, columns: 1.5 * forward(own, last, columns + 1)
        admit(self, requests)

    monkeypatch.setattr(HfEngine, "admit", shift_then_admit)
    with pytest.raises(MopdError, match="the trainer stopped with the error above"):
        run_job(job, console=Console(quiet=True))
    text = capfd.readouterr().err
    assert "Window 0 was not trained" in text
    assert "a shifted position" in text
    store = open_store(job.store)
    assert store.table("steps", ["step"]).num_rows == 0
    assert not (tmp_path / "store" / "policies" / "student").exists()


@pytest.mark.parametrize("part", ["sampler", "teacher", "trainer"])
def test_a_wrong_model_is_refused_before_anything_is_sampled(
    part: str, tmp_path: Path, write_job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teachers and trainer have a fault that only the texts of the job show, since the made-up one is shorter."""
    job = one_stage(write_job, tmp_path)
    named = {"sampler": "The built-in sampler", "teacher": "Scoring with init", "trainer": "Training"}[part]
    compare = self_check.require_same_logits

    def wrongly(ours: Tensor, plain: Tensor, **of: Any) -> SelfCheck:
        is_wrong = of["part"] == named and (part == "sampler" or len(plain) > MADE_UP)
        return compare(ours.flip(-1) if is_wrong else ours, plain, **of)

    for module in (self_check, decoder):
        monkeypatch.setattr(module, "require_same_logits", wrongly)
    with pytest.raises(MismatchError, match=rf"{named} does not compute what .*Nothing was written"):
        run_job(job, console=Console(quiet=True))
    store = open_store(job.store)
    for table in ("samples", "evals", "plans"):
        assert store.table(table).num_rows == 0
    assert not list((tmp_path / "store").glob("wal/*/*"))


@pytest.mark.slow
def test_a_slightly_wrong_sampler_is_warned_of_and_shown(
    tmp_path: Path, write_job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = one_stage(write_job, tmp_path)
    admit, scaled = HfEngine.admit, []

    def scale_then_admit(self: HfEngine, requests: Requests) -> None:
        if self._decoders[0] not in scaled:
            self._decoders[0]._logit_scale *= 1.02
            scaled.append(self._decoders[0])
        admit(self, requests)

    monkeypatch.setattr(HfEngine, "admit", scale_then_admit)
    with Console(file=(tmp_path / "progress.txt").open("w"), width=400) as console:
        run_job(job, console=console)
    shown = (tmp_path / "progress.txt").read_text()
    assert "warning  stage 'student', policy version 0: the trainer's log-probs" in shown
    first = measure(open_store(job.store)).sampler_gaps[0]
    assert first["band"] < first["mean"] < 10 * first["band"]
    assert first["warning"] in (tmp_path / "store" / "report.html").read_text().replace("&#39;", "'")


@pytest.mark.slow
def test_a_rehearsal_prints_the_self_checks(
    tmp_path: Path, write_job: Callable[..., Path], mopd: Callable[..., object]
) -> None:
    one_stage(write_job, tmp_path)
    printed = json.loads(mopd("check", tmp_path / "job.toml", "--rehearse", "--json").stdout)["rehearsal"]["exactness"]
    names = {"sampler", "trainer", "teacher sums", "teacher words", "trainer against sampler"}
    assert set(printed) == {f"student.{name}" for name in names}
    assert "tokens, 0.001 is allowed" in printed["student.sampler"]
