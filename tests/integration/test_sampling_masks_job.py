"""A job that samples under top-p and top-k and learns by policy gradient from the sampling masks it stored."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mopd_kernels import token_logprob

from mopd_dataplane.fields import PAYLOAD, RECORDED, column_names
from mopd_dataplane.job.objectives import Objective, PolicyGradientTerm
from mopd_dataplane.records import Pack
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.microbatch import build
from mopd_dataplane.train.objective import ObjectiveLoss
from mopd_dataplane.train.ranks import Ranks
from mopd_dataplane.train.student import load_student

MASKS = tuple(field for field in RECORDED if field.record == "sampling_mask")
TEMPERATURE = 0.9
CUT_STAGE = f"""
[[stages]]
name = "cut"
start = "base"
objective = "sampled"
iterations = 2
rollout = {{{{ temperature = {TEMPERATURE}, top_p = 0.7, top_k = 12, record = ["sampling_mask"] }}}}
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    finished_job: Path,
    mopd: Callable[..., object],
    write_job: Callable[..., Path],
) -> Store:
    """The tiny job, with one stage more that is sampled under a cut."""
    folder = tmp_path_factory.mktemp("kept")
    shutil.copytree(finished_job / "store", folder / "store", symlinks=True)
    mopd("run", write_job(folder, extra=CUT_STAGE), "--stage", "cut")
    return Store.open(str(folder / "store"))


def as_pack(store: Store, row: int) -> Pack:
    metadata = store.take_samples([row]).to_pylist()[0]
    payload = {
        name: np.array(v) for name, v in store.read_tokens([row], column_names(PAYLOAD + MASKS)).to_pylist()[0].items()
    }
    total, prompt = metadata["total_len"], metadata["prompt_len"]
    return Pack(
        index=0, teacher="", tokens=payload["tokens"], cu_seqlens=np.array([0, total]),
        loss_mask=np.concatenate([np.zeros(prompt, np.uint8), payload["loss_mask"]]),
        sampler_logprobs=np.concatenate([np.zeros(prompt), payload["logprobs"]]).astype(np.float32),
        sample_rows=np.array([row]), version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32),
        rewards=np.zeros(1, np.float32),
        advantages=np.zeros(1, np.float32), sampling_mask_sizes=payload["sampling_mask_sizes"],
        sampling_mask_ids=payload["sampling_mask_ids"].astype(np.int32),
    )  # fmt: skip


def test_on_policy_every_ratio_is_one_with_the_kept_sets_and_is_not_without(trained: Store) -> None:
    """The policy that wrote the samples, in the trainer; float32 through two layers moves log-probs by some 1e-6."""
    assert trained.root is not None
    rows = np.flatnonzero(
        [
            row["stage"] == "cut" and row["policy_version_first"] == 1
            for row in trained.samples(["stage", "policy_version_first"]).to_pylist()
        ]
    )
    student = load_student(trained.root / "policies" / "cut" / "v1", Ranks(0, 1, torch.device("cpu")))
    batch = build([as_pack(trained, row) for row in rows.tolist()])
    loss = ObjectiveLoss(Objective(policy_gradient=PolicyGradientTerm()), temperature=TEMPERATURE)
    with torch.no_grad():
        masked_logprobs = student(batch, lambda hidden, head: loss.logprob(hidden, head, batch))
        everything = dataclasses.replace(batch, sampling_mask=None)
        unaware = student(everything, lambda hidden, head: loss.logprob(hidden, head, everything))
        plain = student(batch, lambda h, head: token_logprob(h, head, batch.targets, temperature=TEMPERATURE))
    torch.testing.assert_close(
        (masked_logprobs - batch.sampler_logprobs).exp(), torch.ones_like(masked_logprobs), atol=1e-4, rtol=0
    )
    assert torch.equal(unaware, plain)
    ratio = (unaware - batch.sampler_logprobs).exp()
    assert float(ratio.max()) < 1.0001, "mass that was cut away lies in the trainer's normaliser"
    assert float(ratio.mean()) < 0.9


def test_the_first_step_of_an_iteration_sees_no_gap_to_its_sampler(trained: Store) -> None:
    steps = trained.table("steps", ["stage", "step", "window", "extra"]).to_pylist()
    own = [row for row in steps if row["stage"] == "cut"]
    assert {row["window"] for row in own} == {0, 1}
    for window in (0, 1):
        step = min((row for row in own if row["window"] == window), key=lambda row: row["step"])
        extra = json.loads(step["extra"])
        assert extra["logprob_gap"] < 1e-4
        assert extra["dropped"] == 0


def test_every_sample_of_the_stage_has_its_sets(trained: Store) -> None:
    rows = trained.sql(
        "select stage, count(sampling_mask_len) as n, count(*) as total from samples group by 1"
    ).to_pylist()
    counts = {row["stage"]: (row["n"], row["total"]) for row in rows}
    assert counts["cut"] == (64, 64)
    assert counts["base"][0] == 0
    assert trained.verify().ok
