"""A plan takes what its condition chooses, counts the others, and is the same however its store was made."""

from __future__ import annotations

import re
import sqlite3
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane import Store, plan_stage
from mopd_dataplane.bench.synthetic import lengths_of, make_store
from mopd_dataplane.errors import InputError, JobFileError, MismatchError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.records import PlanWindow, Signal
from mopd_dataplane.run.conditions import condition_problems

COUNT = 240


def job_of(folder: Path, plan: dict[str, Any], questions: dict[str, str] | None = None, **changes: Any) -> Job:
    """A job with one stage over the samples that its store holds."""
    stage = {"name": "student", "data": "stored", "plan": {"pack_tokens": 512, "batch_samples": 16, **plan}, **changes}
    return check_job(
        {
            "name": "picked", "store": str(folder), "seed": 3, "questions": questions or {}, "stages": [stage],
            "student": {"tokenizer": "characters", "config": {
                "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}},
            "domains": {name: {"source": "store"} for name in ("domain-0", "domain-1")},
        },
        where="job.toml",
    )  # fmt: skip


def fill(folder: Path, *, batch: int = 512, seed: int = 0) -> Store:
    """Samples in groups of four with rewards 0 and 1 and a divergence; both follow from the uid, however many samples a
    commit has."""
    store = make_store(folder, lengths_of(COUNT, mean_log=4, longest=256, seed=seed), group_size=4, batch=batch)
    samples = store.samples(["uid", "response_len"]).to_pylist()
    store.add_rewards([
        {"uid": one["uid"], "sample_row": row, "verifier": "bit", "verifier_version": "1", "reward": _digit(one) % 2.0}
        for row, one in enumerate(samples)
    ])  # fmt: skip
    store.commit_signals("adder", "logprob", [
        Signal(uid=one["uid"], sample_row=row, kind="logprob", logprob=np.zeros(one["response_len"], np.float32),
               mean_reverse_kl=_digit(one) / 1000)
        for row, one in enumerate(samples)
    ])  # fmt: skip
    return store


def _digit(sample: dict[str, Any]) -> int:
    return int(sample["uid"][:3], 16)


def planned(folder: Path, plan: dict[str, Any], questions: dict[str, str] | None = None) -> PlanWindow:
    job = job_of(folder, plan, questions)
    plan_stage(job, job.stage("student"))
    window = Store.open(folder).plan("student", 0)
    assert window is not None
    return window


def uids(folder: Path, plan: PlanWindow) -> list[str]:
    return list(Store.open(folder).take_samples(plan.sample_rows, ["uid"])["uid"].to_pylist())


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_takes_what_plain_sql_takes(tmp_path: Path, seed: int) -> None:
    noise = np.random.default_rng(seed)
    longest, least = int(noise.integers(60, 200)), round(float(noise.random()) / 2, 3)
    where = f"reward > {least} and response_len < {longest} and domain = 'domain-{seed % 2}'"
    store = fill(tmp_path / "s", seed=seed)
    plain = sqlite3.connect(":memory:")
    plain.execute("create table rollouts (uid, reward, response_len, domain)")
    rewards = {row["uid"]: row["reward"] for row in store.table("rewards").to_pylist()}
    plain.executemany("insert into rollouts values (?, ?, ?, ?)", [
        (row["uid"], rewards[row["uid"]], row["response_len"], row["domain"])
        for row in store.table("samples").to_pylist()
    ])  # fmt: skip
    plan = planned(tmp_path / "s", {"where": where})
    chosen = {uid for (uid,) in plain.execute(f"select uid from rollouts where {where}")}
    assert sorted(uids(tmp_path / "s", plan)) == sorted(chosen)
    left = {name: int(count) for name, count in plan.stats.items() if name.startswith("dropped_")}
    first = [f"reward > {least}", f"response_len < {longest}", f"\"domain\" = 'domain-{seed % 2}'"]  # as DuckDB writes
    for number, condition in enumerate(first):
        before = " and ".join(first[:number]) or "true"
        lost = f"select count(*) from rollouts where ({before}) and not ({condition})"
        assert left.get(f"dropped_where {condition}", 0) == plain.execute(lost).fetchone()[0], condition
    assert len(plan.sample_rows) + sum(left.values()) == COUNT


def test_a_store_that_was_killed_and_continued_gives_the_same_plan(tmp_path: Path) -> None:
    """Other commits, so other row numbers: what a condition leaves is shuffled and packed alike."""
    plan = {"where": "reward > 0.2 and group_spread > 0.3 and kl > 0.7 or response_len < 40"}
    whole, resumed = fill(tmp_path / "whole"), tmp_path / "resumed"
    fill(resumed, batch=100)
    assert whole.dataset("samples").version != Store.open(resumed).dataset("samples").version
    first, second = planned(tmp_path / "whole", plan), planned(resumed, plan)
    assert uids(tmp_path / "whole", first) == uids(resumed, second)
    assert first.stats == second.stats


def test_a_weighted_draw_follows_from_snapshot_seed_and_settings(tmp_path: Path) -> None:
    plan = {"weight": "kl + step", "limit": 60, "order": "response_len - iteration", "where": "kl < 3.5"}
    fill(tmp_path / "whole")
    fill(tmp_path / "resumed", batch=100)
    first, second = planned(tmp_path / "whole", plan), planned(tmp_path / "resumed", plan)
    assert len(first.sample_rows) == 60
    assert uids(tmp_path / "whole", first) == uids(tmp_path / "resumed", second)
    assert first.settings["importance"] == second.settings["importance"]
    lengths = (
        Store.open(tmp_path / "whole").take_samples(first.sample_rows, ["response_len"])["response_len"].to_numpy()
    )
    longest = [lengths[first.pack_starts[step] : first.pack_starts[end]].max()
               for step, end in zip(first.step_starts[:-1], first.step_starts[1:], strict=True)]  # fmt: skip
    assert longest == sorted(longest), "short ones first"


def test_groups_whose_rewards_are_all_equal_teach_nothing(tmp_path: Path) -> None:
    store = fill(tmp_path / "s")
    groups = {row["uid"]: row["group_id"] for row in store.table("samples", ["uid", "group_id"]).to_pylist()}
    rewards: dict[str, set[float]] = {}
    for row in store.table("rewards").to_pylist():
        rewards.setdefault(groups[row["uid"]], set()).add(row["reward"])
    flat = {name for name, values in rewards.items() if len(values) == 1}
    assert 0 < len(flat) < len(rewards)
    plan = planned(tmp_path / "s", {"groups": "spread"})
    assert {groups[uid] for uid in uids(tmp_path / "s", plan)} == rewards.keys() - flat
    assert plan.stats["dropped_no_spread"] == sum(name in flat for name in groups.values())


def test_an_explained_plan_says_what_each_condition_takes(tmp_path: Path) -> None:
    store = fill(tmp_path / "s")
    job = job_of(tmp_path / "s", {"where": "reward > 0 and response_len < 60"})
    told = plan_stage(job, job.stage("student"), explain=True)
    rewards = {row["uid"]: row["reward"] for row in store.table("rewards").to_pylist()}
    samples = store.table("samples").to_pylist()
    long = [row["response_len"] >= 60 for row in samples]
    wrong = [rewards[row["uid"]] == 0 for row in samples]
    assert told["conditions"] == {
        "where reward > 0": {"alone": sum(wrong), "in_order": sum(wrong)},
        "where response_len < 60": {
            "alone": sum(long),
            "in_order": sum(a and not b for a, b in zip(long, wrong, strict=True)),
        },
    }
    assert set(told["histograms"]) == {"response_len", "reward", "kl"}
    for bars in told["histograms"].values():
        assert sum(before for before, _ in bars.values()) == COUNT
        assert sum(after for _, after in bars.values()) == told["samples"]
        assert all(after <= before for before, after in bars.values())
    assert next(after for _, after in told["histograms"]["reward"].values()) == 0


def test_the_questions_that_the_page_opens_with_can_be_trained_on(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text().partition("How samples become")[0]
    blocks = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    assert len(blocks) == 5
    for number, block in enumerate(blocks):
        folder = tmp_path / str(number)
        store = fill(folder)
        heard = store.samples(["uid", "response_len"]).to_pylist()[:100]
        store.commit_signals("speller", "logprob", [
            Signal(uid=one["uid"], sample_row=row, kind="logprob", logprob=np.zeros(one["response_len"], np.float32),
                   mean_reverse_kl=0.0)
            for row, one in enumerate(heard)
        ])  # fmt: skip
        assert not list(condition_problems(job_of(folder, block["plan"])))
        assert 0 < len(planned(folder, block["plan"]).sample_rows) < COUNT, block


def test_questions_count_in_the_digest_and_an_absent_condition_does_not(tmp_path: Path) -> None:
    digests = {}
    for name, plan, questions in (
        ("plain", {}, None),
        ("unused question", {}, {"hard": "reward > 0.5"}),
        ("condition", {"where": "reward > 0.5"}, None),
        ("question", {"where": "hard"}, {"hard": "reward > 0.5"}),
        ("other question", {"where": "hard"}, {"hard": "reward > 0.50001"}),
    ):
        fill(tmp_path / "s")
        window = planned(tmp_path / "s", plan, questions)
        digests[name] = window.digest
        assert ("where" in window.settings) == bool(plan)
        assert window.settings.get("questions", {}) == (questions if plan and questions else {})
        (tmp_path / "s").rename(tmp_path / name)
    assert digests["plain"] == digests["unused question"]
    assert len(set(digests.values())) == 4


def test_a_condition_that_leaves_nothing_is_refused_with_what_it_took(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    with pytest.raises(InputError, match=r"nothing to train on: 240 samples, of which where reward > 5 240.*where"):
        planned(tmp_path / "s", {"where": "reward > 5"})
    assert len(planned(tmp_path / "s", {"where": "reward > 0.1"}).sample_rows)


def test_a_condition_of_a_stage_that_has_begun_may_not_change(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    first = job_of(tmp_path / "s", {"where": "hard"}, {"hard": "reward > 0.5"})
    plan_stage(first, first.stage("student"))
    policy = tmp_path / "s" / "policies" / "student" / "v1"
    policy.mkdir(parents=True)
    for changed in (job_of(tmp_path / "s", {"where": "reward > 0.5"}),
                    job_of(tmp_path / "s", {"where": "hard"}, {"hard": "reward > 0.6"})):  # fmt: skip
        with pytest.raises(MismatchError, match=r"student: (plan.where|questions): .*hard"):
            plan_stage(changed, changed.stage("student"))


@pytest.mark.parametrize(
    ("key", "expression"),
    [("weight", "case when hard then 2.0 else 1.0 end"), ("order", "case when harder then 1.0 else 0.0 end")],
)
def test_a_question_may_not_change_under_any_expression_that_names_it(
    tmp_path: Path, key: str, expression: str
) -> None:
    """`order` names it through another question; a question that nobody names may change."""
    fill(tmp_path / "s")
    plan, names = {"limit": 8, key: expression}, {"hard": "reward > 0.5", "harder": "hard and kl > 0"}
    first = job_of(tmp_path / "s", plan, names)
    plan_stage(first, first.stage("student"))
    (tmp_path / "s" / "policies" / "student" / "v1").mkdir(parents=True)
    changed = job_of(tmp_path / "s", plan, {**names, "hard": "reward > 0.6"})
    with pytest.raises(MismatchError, match=r"student: questions: .*0\.6"):
        plan_stage(changed, changed.stage("student"))
    other = job_of(tmp_path / "s", plan, {**names, "unused": "kl < 1"})
    plan_stage(other, other.stage("student"))


def test_the_check_names_what_no_store_could_answer(tmp_path: Path) -> None:
    job = job_of(
        tmp_path / "s",
        {"where": "easy and rewrd > 0"},
        {"easy": "kl < 1", "late": "created_at < now() and nothing > 1", "kl": "true", "number": "response_len"},
    )
    problems = dict(condition_problems(job))
    assert problems.keys() == {"questions.late", "questions.kl", "questions.number", "stages.student.plan.where"}
    assert "did you mean 'reward'?" in problems["stages.student.plan.where"]
    assert "no column 'nothing'" in problems["questions.late"]
    assert "is a column of the table of rollouts already" in problems["questions.kl"]
    assert "not true or false" in problems["questions.number"]
    timed = job_of(tmp_path / "s", {"where": "recent"}, {"recent": "created_at > now()"})
    assert "time of day" in dict(condition_problems(timed))["stages.student.plan.where"]
    assert not list(condition_problems(job_of(tmp_path / "s", {"where": "step > 2 and fine"}, {"fine": "kl < 1"})))


def test_a_concurrent_stage_takes_no_condition(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"stages.student.plan.where: a concurrent stage .*concurrent = false"):
        job_of(tmp_path / "s", {"where": "reward > 0"}, data="rollout", concurrent=True)
