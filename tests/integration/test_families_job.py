"""Whole jobs of exact distillation on models with windows, chunks, sinks, softcaps, latent attention and states.

Each runs once without interruption and once with a SIGKILL in the middle; both end with the same samples.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES

from mopd_dataplane import open_store

NAMES = ("gemma3", "gpt-oss", "qwen3.5", "mistral, window", "llama4", "deepseek-v3")
KILL_AFTER_S = 12.0


def of_family(job: Path, family: str) -> Path:
    """Give a tiny job a student of a family, which learns by full-vocabulary reverse KL."""
    settings = {key: value for key, value in FAMILIES[family].items() if value is not None}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    text = job.read_text()
    text = re.sub(r"(\[student\.config\]\n).*?(\n\[domains)", rf"\g<1>{lines}\g<2>", text, flags=re.DOTALL, count=1)
    job.write_text(text.replace('objective = "sampled"', 'objective = "full-vocab"'))
    return job


def samples_of(store: Path) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """uid -> (tokens [L], log-probs [R] or None) of every sample."""
    return {
        row["uid"]: (np.array(row["tokens"]), None if row["logprobs"] is None else np.array(row["logprobs"]))
        for row in open_store(str(store)).table("tokens", ["uid", "tokens", "logprobs"]).to_pylist()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_a_job_on_a_family_ends_with_the_same_samples_after_a_kill(
    family: str, tmp_path: Path, write_job: Callable, start_mopd: Callable, mopd: Callable
) -> None:
    mopd("run", of_family(write_job(tmp_path / "whole"), family))
    job = of_family(write_job(tmp_path / "killed"), family)
    attempt = start_mopd("run", job)
    time.sleep(KILL_AFTER_S)
    attempt.kill()
    attempt.wait()
    mopd("run", job)

    expected, samples = (samples_of(tmp_path / name / "store") for name in ("whole", "killed"))
    assert sorted(samples) == sorted(expected)
    for uid, (tokens, logprobs) in expected.items():
        assert samples[uid][0].tolist() == tokens.tolist(), uid
        if logprobs is not None:
            np.testing.assert_allclose(samples[uid][1], logprobs, rtol=0, atol=2e-4, err_msg=uid)
    steps = open_store(str(tmp_path / "whole" / "store")).sql("select loss from steps where stage = 'student'")
    losses = [row["loss"] for row in steps.to_pylist()]
    assert len(losses) == 4
    assert all(np.isfinite(losses))
    assert max(losses) > 0
