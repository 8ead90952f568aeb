"""A store belongs to one job: what was remembered is compared before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from advice import advises

from mopd_dataplane.base.sealed_json import seal, unseal
from mopd_dataplane.errors import DamagedError, MismatchError
from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.stage_prompts import training_slots

TINY = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


STAGE = {"name": "base", "data": "reference", "plan": {"batch_samples": 2}}


def job(store: Path, **changed: Any) -> Any:
    domain = {"source": "reasoning-gym", "dataset": "chain_sum", "train": 4, "eval": 2}
    raw = {"name": "small", "store": str(store), "student": {"config": TINY}, "domains": {"sums": domain}}
    return check_job({**raw, "stages": [STAGE], **changed}, where="job.toml")


def test_the_same_job_opens_again_and_another_seed_does_not(tmp_path: Path) -> None:
    open_run(job(tmp_path / "store"), Progress(None))
    open_run(job(tmp_path / "store"), Progress(None))
    with advises("; this key is fixed: ") as refused:
        open_run(job(tmp_path / "store", seed=3), Progress(None))
    assert "made with seed = 0, the job now says 3" in str(refused.value)
    assert str(refused.value).endswith("go back to that value, or give another store (--store runs/NAME)")
    open_run(job(tmp_path / "store"), Progress(None))
    open_run(job(tmp_path / "another", seed=3), Progress(None))


def test_a_domain_gets_more_prompts_for_later_windows(tmp_path: Path) -> None:
    raw = {"source": "reasoning-gym", "dataset": "chain_sum", "train": 4, "eval": 2}
    before = open_run(job(tmp_path / "store"), Progress(None))
    names = [prompt.prompt_id for prompt in training_slots(before, before.job.stage("base"))]
    (tmp_path / "store" / "policies" / "base" / "v1").mkdir(parents=True)
    more = job(tmp_path / "store", domains={"sums": {**raw, "train": 6}}, stages=[{**STAGE, "iterations": 2}])
    with pytest.raises(MismatchError, match=r"domains\.sums\.train: 4 → 6 \(from iteration 1 on\)"):
        open_run(more, Progress(None))
    run = open_run(more, Progress(None), accept=lambda description: True)
    pools = [training_slots(*run.at(run.job.stage("base"), window)) for window in (0, 1)]
    assert [prompt.prompt_id for prompt in pools[0]] == names
    assert [prompt.prompt_id for prompt in pools[1]] == [*names, "sums-train-4", "sums-train-5"]
    assert len(run.store.prompts(split="eval")) == 2


def test_other_prompts_under_the_same_names_are_refused(tmp_path: Path) -> None:
    open_run(job(tmp_path / "store"), Progress(None))
    raw = {"source": "reasoning-gym", "dataset": "chain_sum", "train": 4, "eval": 2}
    for key, value in (("seed", 5), ("eval", 3), ("dataset", "spell_backward")):
        with pytest.raises(MismatchError, match=rf"made with domains\.sums\.{key} = .* add others as a new domain"):
            open_run(job(tmp_path / "store", domains={"sums": {**raw, key: value}}), Progress(None))


def test_a_job_of_a_newer_version_is_named_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "store" / "job.json"
    open_run(job(tmp_path / "store"), Progress(None))
    file.write_bytes(seal({**unseal(file.read_bytes(), "job.json"), "warp": 9}))
    before = file.read_bytes()
    with advises("continue with the version that made the store, or give another store (--store runs/NAME)") as refused:
        open_run(job(tmp_path / "store"), Progress(None))
    assert "job.json holds a job that this version cannot read (warp: " in str(refused.value)
    open_run(job(tmp_path / "another"), Progress(None))
    assert file.read_bytes() == before


def test_a_damaged_store_is_left_as_it_is(tmp_path: Path) -> None:
    run = open_run(job(tmp_path / "store"), Progress(None))
    answer = {"policy": "base", "policy_version": 0, "prompt_id": "p", "domain": "sums", "response": "7"}
    run.store.add_evals([answer | {"response_len": 1, "finish_reason": "stop"}])
    [file] = (tmp_path / "store" / "evals" / "data").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    with pytest.raises(DamagedError, match=r"bytes, .* were written; nothing was changed"):
        open_run(job(tmp_path / "store", name="other"), Progress(None))
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before}
    assert after == before
