"""SIGKILL at random moments of a whole job: run again, and it ends with the samples of an uninterrupted run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane import open_store

RUN_S = (3.0, 14.0)
"""Life of a killed attempt: long enough to get somewhere, short enough to die everywhere."""


@pytest.mark.parametrize("kills", [2, 8])
@pytest.mark.slow
def test_a_job_killed_again_and_again_ends_with_the_same_samples(
    kills: int, finished_job: Path, tmp_path: Path, write_job: Callable, start_mopd: Callable, mopd: Callable
):
    job = write_job(tmp_path)
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    for _ in range(kills):
        attempt = start_mopd("run", job)
        time.sleep(chance.uniform(*RUN_S))
        attempt.kill()
        attempt.wait()
    mopd("run", job)

    expected, samples = samples_of(finished_job / "store"), samples_of(tmp_path / "store")
    assert sorted(samples) == sorted(expected), f"seed {seed}"
    for uid, (tokens, logprobs) in expected.items():
        assert samples[uid][0].tolist() == tokens.tolist(), f"seed {seed}: sample {uid}"
        if logprobs is not None:
            # Log-probs from before a kill are the logged bits. Behind it the prefix was prefilled in one pass instead
            # of token by token: float32 rounding of a 2-layer model, three orders below what sampling could notice.
            np.testing.assert_allclose(samples[uid][1], logprobs, atol=2e-4, err_msg=f"seed {seed}: sample {uid}")
    (counts,) = (
        open_store(str(tmp_path / "store")).sql("select count(*) a, count(distinct uid) b from samples").to_pylist()
    )
    assert counts["a"] == counts["b"]


def samples_of(store: Path) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """uid -> (tokens [L], log-probs [R] or None) of every sample."""
    payload = open_store(str(store)).table("tokens", ["uid", "tokens", "logprobs"])
    return {
        row["uid"]: (np.array(row["tokens"]), None if row["logprobs"] is None else np.array(row["logprobs"]))
        for row in payload.to_pylist()
    }
