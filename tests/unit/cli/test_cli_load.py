"""`mopd load serve` ends at once where it would wait for what nobody writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoding import TINY

from mopd_dataplane import Store
from mopd_dataplane.cli.load import serve
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.job.load import check_job
from mopd_dataplane.run.context import open_run
from mopd_dataplane.run.progress import Progress


@pytest.fixture
def begun(tmp_path: Path) -> Store:
    """A store whose job has one stage, which needs hidden states and has none yet."""
    raw = {
        "name": "begun", "store": str(tmp_path / "store"), "student": {"config": TINY},
        "domains": {"sums": {"source": "reasoning-gym", "dataset": "chain_sum", "train": 4}},
        "teachers": {"t": {"source": "student"}}, "routing": {"sums": "t"},
        "objectives": {"o": {"divergence": {"kind": "reverse", "signal": "hidden"}}},
        "plan": {"batch_samples": 2}, "stages": [{"name": "student", "objective": "o"}],
    }  # fmt: skip
    return open_run(check_job(raw, where="test"), Progress(quiet=True)).store


def test_a_stage_that_the_store_does_not_have_is_named_with_those_it_has(begun: Store) -> None:
    with pytest.raises(UnknownNameError, match=r"no stage 'studnt': known: student; did you mean 'student'\?"):
        serve(begun.uri, stage="studnt", slots=4)


def test_a_signal_that_nobody_writes_is_named_with_those_that_are_there(begun: Store) -> None:
    with pytest.raises(
        UnknownNameError, match=r"--signal topk: .* has no table signals/TEACHER/topk.*; the store has none"
    ):
        serve(begun.uri, stage="student", signal=["topk"], slots=4)
    with pytest.raises(UnknownNameError, match="--signal 'nothing': known"):
        serve(begun.uri, stage="student", signal=["nothing"], slots=4)


def test_a_store_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no store at"):
        serve(f"{tmp_path}/nowhere", stage="student", slots=4)
