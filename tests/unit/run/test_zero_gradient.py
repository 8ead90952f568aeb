"""Windows from which nothing can be learned: a masked domain, a rate of zero."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.records import StepMetrics
from mopd_dataplane.run.steps.plan import masked_domains
from mopd_dataplane.run.steps.zero_gradient import learning_rate_warning

STEP = StepMetrics(
    stage="s", step=3, window=1, plan_digest="", policy_version=1, loss=0.5, grad_norm=2.0, learning_rate=0.0,
    samples=4, tokens=40, loss_tokens=20, reverse_kl=0.1, staleness_mean=0.0, staleness_max=0, step_time_s=1.0,
    data_wait_s=0.0,
)  # fmt: skip


def test_a_rate_of_zero_for_a_whole_window_is_named() -> None:
    assert "the learning rate was 0 at all 2 steps of window 1" in learning_rate_warning("linear", [STEP, STEP])
    assert learning_rate_warning("linear", [STEP, replace(STEP, learning_rate=1e-9)]) == ""
    assert learning_rate_warning("linear", []) == ""


def test_a_domain_of_which_every_sample_is_masked_is_named() -> None:
    columns = Columns(
        sample_rows=np.arange(6), total_len=np.full(6, 9, np.int32), loss_tokens=np.array([3, 0, 3, 0, 0, 0], np.int32),
        version_first=np.zeros(6, np.int32), domains=np.array([0, 0, 1, 1, 2, 2], np.int16), groups=np.arange(6),
        teachers=np.zeros(6, np.int16), has_signals=np.ones(6, bool), has_reward=np.ones(6, bool),
        abandoned=np.zeros(6, bool), domain_names=("words", "sums", "tools"),
    )  # fmt: skip
    assert masked_domains(columns) == ["tools"]
