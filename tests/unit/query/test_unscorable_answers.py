"""Answers that could not be scored: counted by reason, left out of means, and found again in a copy of the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mopd_dataplane import Sample, Store, open_store
from mopd_dataplane.query.measures import measure
from mopd_dataplane.query.report import write_report
from mopd_dataplane.records import sample_uid
from mopd_dataplane.run.delete import delete, preview
from mopd_dataplane.run.stage_rows import UNSCORABLE, event_rows
from mopd_dataplane.store.maintain.copy_samples import copy_samples

TIMED_OUT, GAVE_UP = "no result after 30 s", "the function returned None"


def answer(number: int) -> Sample:
    ids = np.array([1, 2, 3, 4], np.int32)
    return Sample(
        uid=sample_uid(0, "student", "chain_sum-train-0", number, 9), prompt_id="chain_sum-train-0", group_id="g",
        group_index=number, iteration=9, domain="chain_sum", stage="student", writer="w", writer_seq=number,
        policy="student", temperature=1.0, top_p=1.0, top_k=0, prompt_len=1, tokens=ids,
        logprobs=np.array([-0.5, -0.25, -1.0], np.float32), loss_mask=np.ones(3, np.uint8),
        version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32), finish_reason="stop",
        tokenizer="0123456789abcdef",
    )  # fmt: skip


@pytest.fixture
def store(make_store: Callable[..., Store], tmp_path: Path) -> Store:
    """A group of five of which one is rewarded and one was rewarded later; a policy with an eval without a reward."""
    store = make_store(tmp_path / "store", prompts=4)
    samples = [answer(number) for number in range(5)]
    rows = store.commit_samples(samples).rows
    verifier = {"verifier": "judge:score", "verifier_version": "1"}
    store.add_rewards([
        {"uid": samples[n].uid, "sample_row": int(rows[n]), "reward": 0.5, "correct": None, **verifier} for n in (0, 4)
    ])  # fmt: skip
    store.add_events([
        {
            "event_id": f"unscorable/judge:score/{samples[n].uid}", "stage": "student", "kind": UNSCORABLE,
            "iteration": 9, "value": None,
            "detail": {"uid": samples[n].uid, "prompt_id": samples[n].prompt_id, "reason": reason, **verifier},
        }
        for n, reason in ((1, TIMED_OUT), (2, GAVE_UP), (3, GAVE_UP), (4, TIMED_OUT))
    ])  # fmt: skip
    evals = store.table("evals", filter="policy = 'student' AND policy_version = 4 AND domain = 'chain_sum'")
    store.add_evals([
        {**row, "policy_version": 5, "reward": None if n == 0 else 0.5, "correct": None if n == 0 else n == 1}
        for n, row in enumerate(evals.drop_columns(["created_at", "row_crc"]).to_pylist())
    ])  # fmt: skip
    return store


def unscorable_eval(prompt_id: str) -> dict[str, Any]:
    row = {"policy": "student", "policy_version": 5, "prompt_id": prompt_id, "domain": "chain_sum"}
    return {
        "event_id": f"unscorable_eval/student/5/{prompt_id}", "stage": "student", "kind": "unscorable_eval",
        "iteration": 5, "value": None, "detail": {"prompt_id": prompt_id, "reason": GAVE_UP, "row": row},
    }  # fmt: skip


def test_recorded_held_out_answers_count_until_they_are_scored(store: Store) -> None:
    scored = store.table("evals", filter="policy_version = 5 AND reward IS NOT NULL")["prompt_id"].to_pylist()
    store.add_events([unscorable_eval("held-out-9"), unscorable_eval(scored[0])])
    counts = [(row["policy"], row["policy_version"], row["answers"]) for row in measure(store).unscorable_evals]
    assert counts == [("student", 5, 2)], "the row without a reward, and the event that no row answers"


def test_a_deleted_prompt_takes_its_recorded_answers_along(store: Store) -> None:
    sample_prompt, other_prompt = "chain_sum-train-0", "chain_sum-eval-0"
    store.add_events([unscorable_eval(sample_prompt), unscorable_eval(other_prompt)])
    where = f"prompt_id = '{sample_prompt}'"
    list(delete(store, preview(store, where)[0], where))
    left = store.table("events", ["event_id"], filter="kind = 'unscorable_eval'")["event_id"].to_pylist()
    assert left == [f"unscorable_eval/student/5/{other_prompt}"]
    store.add_events([unscorable_eval(sample_prompt)])
    assert store.table("events", filter="kind = 'unscorable_eval'").num_rows == 1, "it does not come back"
    assert store.verify().ok


def test_the_report_counts_unscorable_answers_by_reason(store: Store, tmp_path: Path) -> None:
    measures = measure(store)
    assert measures.unscorable == [
        {"stage": "student", "domain": "chain_sum", "reason": TIMED_OUT, "samples": 1},
        {"stage": "student", "domain": "chain_sum", "reason": GAVE_UP, "samples": 2},
    ]
    page = write_report(store, tmp_path / "report.html", measures=measures).read_text()
    assert "could not be scored because" in page
    assert GAVE_UP in page
    assert "Left out, because they could not be scored: 1 of student." in page


def test_a_held_out_answer_without_a_reward_leaves_its_domain_the_others(store: Store) -> None:
    newest = {(row["policy"], row["domain"]): row for row in measure(store).accuracy}["student", "chain_sum"]
    assert (newest["policy_version"], newest["answers"]) == (5, 3)
    assert newest["accuracy"] == pytest.approx(1 / 3)
    assert newest["reward"] == 0.5


def test_a_query_shows_why_an_answer_has_no_reward(store: Store) -> None:
    rows = store.sql("select reward, unscorable from responses where iteration = 9 order by uid").to_pylist()
    reasons = sorted((row["reward"] or 0.0, row["unscorable"] or "") for row in rows)
    assert reasons == [(0.0, TIMED_OUT), (0.0, GAVE_UP), (0.0, GAVE_UP), (0.5, ""), (0.5, "")]


def test_a_copy_names_the_same_answers(store: Store, tmp_path: Path) -> None:
    stage = SimpleNamespace(name="student", sources=(), window_samples=0)
    list(copy_samples(store, str(tmp_path / "copy"), "iteration = 9"))
    copy = open_store(str(tmp_path / "copy"))
    for answer_store in (store, copy):
        uids = answer_store.take_samples(event_rows(answer_store, stage, UNSCORABLE), ["uid"])["uid"].to_pylist()
        named = answer_store.table("events", ["detail"], filter="kind = 'unscorable'")["detail"].to_pylist()
        assert sorted(uids) == sorted(json.loads(detail)["uid"] for detail in named)
        assert len(uids) == 4
