"""Older samples join a window in their share, under the staleness bound, the same however the store was made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane import Store, plan_stage
from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.bench.synthetic import bench_teacher
from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.records import PlanWindow, Sample, Signal, sample_uid

ITERATIONS, PROMPTS, GROUP = 4, 12, 2
FRESH = PROMPTS * GROUP


def job_of(folder: Path, plan: dict[str, Any], **changes: Any) -> Job:
    """A job whose stage samples groups of two in two domains with a teacher each."""
    stage = {
        "name": "student", "objective": "sampled", "iterations": ITERATIONS,
        "rollout": {"group_size": GROUP, "prompts_per_iteration": PROMPTS},
        "plan": {"pack_tokens": 128, "batch_samples": 8, **plan}, **changes.pop("stage", {}),
    }  # fmt: skip
    return check_job(
        {
            "name": "again", "store": str(folder), "seed": 3, "stages": [stage],
            "student": {"tokenizer": "characters", "config": {
                "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}},
            "domains": {name: {"source": "store"} for name in ("sums", "words")},
            "teachers": {name: {"source": str(folder / name)} for name in ("adder", "speller")},
            "routing": {"sums": "adder", "words": "speller"},
            "objectives": {"sampled": {"policy_gradient": {}}}, **changes,
        },
        where="job.toml",
    )  # fmt: skip


def sample_of(iteration: int, index: int) -> Sample:
    prompt, member = divmod(index, GROUP)
    plain = bench_sample(index, 24 + index % 7)
    return replace(
        plain, uid=sample_uid(3, "student", f"p{prompt}", member, iteration), prompt_id=f"p{prompt}",
        group_id=f"p{prompt}#{iteration}", group_index=member, iteration=iteration, stage="student", policy="student",
        tokenizer="0" * 16,
        domain=("sums", "words")[prompt % 2], writer="engine-0", writer_seq=index,
        version_starts=np.zeros(1, np.int32), versions=np.full(1, iteration, np.int32),
    )  # fmt: skip


def fill(folder: Path, *, batch: int = 512, scored_by: dict[str, str] | None = None) -> Store:
    """Samples of every iteration with the signal of their teacher. scored_by: another teacher for some domains."""
    teachers = {"sums": "adder", "words": "speller", **(scored_by or {})}
    store = Store.create(str(folder))
    for name in ("adder", "speller"):
        store.add_teacher(bench_teacher(name, 8))
    samples = [sample_of(iteration, index) for iteration in range(ITERATIONS) for index in range(FRESH)]
    for first in range(0, len(samples), batch):
        store.commit_samples(samples[first : first + batch])
    uids = store.table("samples", ["uid"])["uid"].to_pylist()
    by_uid = {sample.uid: sample for sample in samples}
    for teacher in ("adder", "speller"):
        store.commit_signals(teacher, "logprob", [
            Signal(uid=uid, sample_row=row, kind="logprob", mean_reverse_kl=_kl(by_uid[uid]),
                   logprob=np.zeros(by_uid[uid].response_len, np.float32))
            for row, uid in enumerate(uids)
            if teachers[by_uid[uid].domain] == teacher
        ])  # fmt: skip
    for version in range(1, ITERATIONS):
        (folder / "policies" / "student" / f"v{version}").mkdir(parents=True)
    return store


def _kl(sample: Sample) -> float:
    """A divergence by uid, the same for both members of a group, 0 for some groups."""
    return (int(sample.group_id.partition("#")[0][1:]) + sample.iteration) % 3 / 2


def planned(folder: Path, plan: dict[str, Any], **changes: Any) -> tuple[PlanWindow, list[dict[str, Any]]]:
    """The plan of the last iteration's window, and its samples in the order they are trained on."""
    job = job_of(folder, plan, **changes)
    plan_stage(job, job.stage("student"))
    store = Store.open(str(folder))
    window = store.plan("student", ITERATIONS - 1)
    assert window is not None
    columns = ["uid", "iteration", "group_id", "domain"]
    return window, store.take_samples(window.sample_rows, columns).to_pylist()


def older_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [sample for sample in samples if sample["iteration"] < ITERATIONS - 1]


def test_older_samples_are_a_share_of_the_window(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    window, samples = planned(tmp_path / "s", {"replay": {"iterations": 2, "share": 0.25}})
    older = older_of(samples)
    assert len({sample["uid"] for sample in samples}) == len(samples) == FRESH + FRESH // 3
    assert len(older) / len(samples) == 0.25
    assert {sample["iteration"] for sample in older} == {ITERATIONS - 2, ITERATIONS - 3}
    assert window.stats["replayed"] == len(older)
    assert window.stats["replay_pool"] == 2 * FRESH
    assert window.settings["replay"] == {"iterations": 2, "share": 0.25}
    groups = [sample["group_id"] for sample in samples]
    for first, end in zip(window.step_starts[:-1], window.step_starts[1:], strict=True):
        step = groups[window.pack_starts[first] : window.pack_starts[end]]
        assert all(step.count(group) == GROUP for group in step), "groups stay whole and in one step"


@pytest.mark.parametrize(
    "plan",
    [
        {"replay": {"iterations": 3, "share": 0.5}},
        {"replay": {"iterations": 3, "share": 0.4}, "weight": "kl", "limit": 20},
    ],
)
def test_the_plan_is_the_same_for_any_ranks_and_after_a_kill(tmp_path: Path, plan: dict[str, Any]) -> None:
    fill(tmp_path / "whole")
    fill(tmp_path / "resumed", batch=37)
    fill(tmp_path / "ranks")
    whole, samples = planned(tmp_path / "whole", plan)
    resumed, after_kill = planned(tmp_path / "resumed", plan)
    ranks, on_many = planned(tmp_path / "ranks", plan, scale={"ranks": 64})
    assert samples == after_kill == on_many
    assert older_of(samples)
    assert whole.settings == resumed.settings == ranks.settings
    assert whole.pack_starts.tolist() == resumed.pack_starts.tolist() == ranks.pack_starts.tolist()


def test_older_samples_are_drawn_by_weight_and_have_importance(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    plan = {"replay": {"iterations": 3, "share": 0.25}, "weight": "kl"}
    window, samples = planned(tmp_path / "s", plan)
    older = older_of(samples)
    assert len(older) == FRESH // 3
    every = [sample_of(iteration, index) for iteration in range(ITERATIONS) for index in range(FRESH)]
    kl = {sample.uid: _kl(sample) for sample in every}
    assert all(kl[sample["uid"]] > 0 for sample in older)
    assert window.stats["dropped_replay_weight"] == 3 * FRESH // 3, "a third of the groups have weight 0"
    importance = window.settings["importance"]
    for sample, weight in zip(samples, importance, strict=True):
        assert (weight == 1.0) == (sample["iteration"] == ITERATIONS - 1)
    by_kl = {kl[s["uid"]]: w for s, w in zip(samples, importance, strict=True) if s in older}
    assert by_kl.get(0.5, np.inf) > by_kl.get(1.0, 0.0), "what is drawn more often counts less"


def test_the_limit_covers_older_samples_too(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    _, samples = planned(tmp_path / "s", {"replay": {"iterations": 3, "share": 0.25}, "limit": 16})
    assert (len(samples), len(older_of(samples))) == (16, 4)


def test_the_staleness_bound_and_conditions_hold_for_older_samples(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    plan = {"replay": {"iterations": 3, "share": 0.2}, "max_staleness": 1, "where": "domain = 'sums' or iteration = 3"}
    window, samples = planned(tmp_path / "s", plan)
    older = older_of(samples)
    assert {(sample["iteration"], sample["domain"]) for sample in older} == {(ITERATIONS - 2, "sums")}
    assert window.stats["dropped_replay_stale"] == 2 * FRESH
    [unmet] = [count for name, count in window.stats.items() if name.startswith("dropped_replay_where")]
    assert unmet == window.stats["replay_pool"] == FRESH // 2
    assert not [name for name in window.stats if name.startswith("dropped_where")], "the window's own meet it"


def test_signals_of_another_teacher_are_left_out_and_counted(tmp_path: Path) -> None:
    """The route of a domain changed: its older samples have the signals of the teacher before."""
    store = fill(tmp_path / "s", scored_by={"words": "adder"})
    rows, table = zip(*store.scan_samples(["uid", "iteration", "domain"]), strict=True)
    samples = [one for part in table for one in part.to_pylist()]
    lengths = {sample.uid: sample.response_len for index in range(FRESH) for sample in [sample_of(3, index)]}
    store.commit_signals("speller", "logprob", [
        Signal(uid=one["uid"], sample_row=int(row), kind="logprob", mean_reverse_kl=0.1,
               logprob=np.zeros(lengths[one["uid"]], np.float32))
        for row, one in zip(np.concatenate(rows), samples, strict=True)
        if one["iteration"] == 3 and one["domain"] == "words"
    ])  # fmt: skip
    window, chosen = planned(tmp_path / "s", {"replay": {"iterations": 3, "share": 0.25}})
    assert {sample["domain"] for sample in older_of(chosen)} == {"sums"}
    assert window.stats["dropped_replay_missing_signal"] == 3 * FRESH // 2
    assert len(chosen) == FRESH + FRESH // 3


def test_the_first_window_has_nothing_older(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    for version in range(1, ITERATIONS):
        (tmp_path / "s" / "policies" / "student" / f"v{version}").rmdir()
    job = job_of(tmp_path / "s", {"replay": {"iterations": 2, "share": 0.25}})
    plan_stage(job, job.stage("student"))
    window = Store.open(str(tmp_path / "s")).plan("student", 0)
    assert window is not None
    assert len(window.sample_rows) == FRESH
    assert window.stats["replayed"] == 0


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        ({}, {"stage": {"concurrent": True}}, r"student.plan.replay: a concurrent stage .*concurrent = false"),
        ({}, {"retain": {"hidden_versions": 2}}, r"plan.replay: samples of 2 .*hidden_versions to 0 or above 2"),
        ({}, {"retain": {"hidden_passes": 1}}, r"plan.replay: .*hidden_passes = 1.*set hidden_passes = 0"),
        ({"replay": {"iterations": 2, "share": 1.0}}, {}, r"share.*less than 1"),
    ],
)
def test_replay_is_refused_where_it_cannot_be_done(
    tmp_path: Path, plan: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    if "retain" in changes:
        changes = {**changes, "objectives": {"sampled": {"divergence": {"kind": "reverse"}}}}
    with pytest.raises(JobFileError, match=message):
        job_of(tmp_path / "s", {"replay": {"iterations": 2, "share": 0.25}, **plan}, **changes)
