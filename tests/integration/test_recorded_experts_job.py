"""A job whose student is a mixture of experts: what the sampler chose is stored, and the trainer follows it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.store.dataset import Store

MIXTURE = 'model_type = "qwen3_moe"\nnum_experts = 6\nnum_experts_per_tok = 2\nmoe_intermediate_size = 48'
SPECIALISTS = re.compile(r'\n\[\[stages\]\]\nname = "(sums|words)"[^\[]*?domains = \[[^\n]*\n')
SHARED = "\n[scale]\nranks = 2\ncontext_parallel = 2\n"


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["", SHARED], ids=["one rank", "two"])
def trained(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    mopd: Callable[..., object],
    write_job: Callable[..., Path],
) -> Store:
    """A student that is a mixture of experts, sampled under a cut: everything is recorded. Its teacher is its base."""
    folder = tmp_path_factory.mktemp("experts")
    job = write_job(folder)
    text = SPECIALISTS.sub("", job.read_text()).replace('model_type = "qwen3"', MIXTURE)
    text = text.replace("stage:sums", "stage:base").replace("stage:words", "stage:base")
    record = '[stages.rollout]\ntop_p = 0.9\ntop_k = 20\nrecord = ["sampling_mask", "experts"]\n'
    job.write_text(text.replace("iterations = 2\n", f"iterations = 2\n{record}") + request.param)
    mopd("run", job)
    return Store.open(str(folder / "store"))


def test_every_sample_of_the_stage_has_the_experts_of_every_token_that_was_read(trained: Store) -> None:
    columns = ["stage", "total_len", "experts_width", "sampling_mask_len"]
    for row, sample in enumerate(trained.samples(columns).to_pylist()):
        if sample["stage"] != "student":
            assert sample["experts_width"] is None
            continue
        assert sample["experts_width"] == 2 * 2
        ids = np.array(trained.read_tokens([row], ["experts"])["experts"][0].as_py())
        assert len(ids) == (sample["total_len"] - 1) * 4
        pairs = np.sort(ids.reshape(-1, 2))
        assert 0 <= ids.min() <= ids.max() < 6
        assert (pairs[:, 0] < pairs[:, 1]).all(), "two experts of a layer are two"
    assert trained.verify().ok


def test_the_first_step_of_an_iteration_sees_no_gap_to_its_sampler(trained: Store) -> None:
    steps = [s for s in trained.table("steps").to_pylist() if s["stage"] == "student"]
    assert {step["window"] for step in steps} == {0, 1}
    for window in (0, 1):
        first = min((s for s in steps if s["window"] == window), key=lambda s: s["step"])
        assert json.loads(first["extra"])["logprob_gap"] < 1e-4
