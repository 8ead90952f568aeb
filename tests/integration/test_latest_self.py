"""A teacher that follows the student: a chain of stages, each scored by the policy of the one before, which reads the
answer (docs/objectives.md, "A teacher that follows the student")."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane import open_store
from mopd_dataplane.job.load import load_job
from mopd_dataplane.run.pipeline import run_job

OPSD = Path(__file__).parents[2] / "jobs" / "opsd"


def chain(store: Path) -> dict[str, Any]:
    """The last stage of jobs/opsd twice, made small: `first` is scored by its own start, `second` by `first`."""
    job = load_job(OPSD).model_dump(mode="json")
    job["store"] = str(store)
    job["student"]["config"] |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    job["student"]["config"] |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    job["domains"] = {"sorting": {**job["domains"]["sorting"], "train": 32, "eval": 2}}
    template = job["teachers"]["with-answer"]
    job["teachers"] = {"itself": template, "itself-later": {**template, "source": "stage:first"}}
    small = {"iterations": 1, "plan": {**job["stages"][-1]["plan"], "batch_samples": 8}}
    small["rollout"] = {**job["stages"][-1]["rollout"], "prompts_per_iteration": 16, "max_new_tokens": 8}
    stages = [
        {**job["stages"][-1], **small, "name": name, "start": start, "routing": {"sorting": teacher}}
        for name, start, teacher in (("first", "init", "itself"), ("second", "first", "itself-later"))
    ]
    return job | {"stages": stages, "routing": {"sorting": "itself"}}


@pytest.mark.slow
def test_each_stage_of_a_chain_is_scored_by_the_policy_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(chain(tmp_path / "store")))
    run_job(load_job(tmp_path / "job.json"))
    store = open_store(str(tmp_path / "store"))
    digests = {row["name"]: row["weights_digest"] for row in store.table("teachers").to_pylist()}
    assert digests.keys() == {"itself", "itself-later"}
    assert digests["itself"] != digests["itself-later"]
    scored = store.sql("select distinct s.stage, c.teacher from samples s join scores c using (uid) order by all")
    assert scored.to_pylist() == [
        {"stage": "first", "teacher": "itself"},
        {"stage": "second", "teacher": "itself-later"},
    ]
    assert not store.verify().findings
