"""Group-relative advantages."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.plan.group_advantages import group_outcomes

ROWS = np.arange(6)
GROUPS = pa.chunked_array([["a", "b", "a"], ["a", "b", "c"]])


def rewards(rows: list[int], values: list[float], verifier: str = "v") -> pa.Table:
    return pa.table({"sample_row": pa.array(rows, pa.int64()), "verifier": [verifier] * len(rows), "reward": values})


def test_centred_within_the_group_over_rewarded_samples_only():
    outcomes = group_outcomes(rewards([0, 2, 1, 5], [1.0, 0.0, 1.0, 0.5]), ROWS, GROUPS, np.array([5, 0, 1, 2, 3]))
    assert outcomes.rewards.tolist()[:4] == [0.5, 1.0, 1.0, 0.0]
    assert np.isnan(outcomes.rewards[4])
    assert outcomes.advantages.tolist() == [0.0, 0.5, 0.0, -0.5, 0.0]


def test_divided_by_the_sample_standard_deviation():
    outcomes = group_outcomes(
        rewards([0, 2, 3, 1], [1.0, 0.0, 0.5, 1.0]), ROWS, GROUPS, np.arange(4), divide_by_std=True
    )
    assert outcomes.advantages == pytest.approx([1.0, 0.0, -1.0, 0.0], abs=1e-4)


def test_equal_rewards_give_no_advantage():
    outcomes = group_outcomes(rewards([0, 2, 3], [1.0, 1.0, 1.0]), ROWS, GROUPS, np.arange(4), divide_by_std=True)
    assert outcomes.advantages.tolist() == [0.0] * 4


def test_two_verifiers_must_be_told_apart():
    both = pa.concat_tables([rewards([0], [1.0], "exact"), rewards([0], [0.0], "style")])
    with pytest.raises(MismatchError, match="exact, style; name one of them"):
        group_outcomes(both, ROWS, GROUPS, np.arange(2))
    assert group_outcomes(both, ROWS, GROUPS, np.arange(1), verifier="style").rewards.tolist() == [0.0]
    with pytest.raises(MismatchError, match="did you mean 'exact'"):
        group_outcomes(both, ROWS, GROUPS, np.arange(1), verifier="exakt")


def test_verifiers_of_other_groups_do_not_matter():
    """A store holds many stages; only the planned samples' groups must agree, and each sample on its own."""
    mixed = pa.concat_tables([rewards([0, 2], [1.0, 0.0], "exact"), rewards([5], [0.3], "style"), rewards([5], [1.0])])
    assert group_outcomes(mixed, ROWS, GROUPS, np.array([0, 2])).advantages.tolist() == [0.5, -0.5]
    with pytest.raises(MismatchError, match="style, v; name one of them"):
        group_outcomes(mixed, ROWS, GROUPS, np.array([0, 5]))
    two_domains = pa.concat_tables([rewards([0, 2], [1.0, 0.0], "exact"), rewards([1, 4], [0.0, 1.0], "style")])
    outcomes = group_outcomes(two_domains, ROWS, GROUPS, np.array([0, 1, 2, 4]))
    assert outcomes.advantages.tolist() == [0.5, -0.5, -0.5, 0.5]
