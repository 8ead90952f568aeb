"""`mopd load serve` ends at once where it would wait for what nobody writes."""

from __future__ import annotations

import pytest

from mopd_dataplane import Store
from mopd_dataplane.cli.load import serve
from mopd_dataplane.errors import UnknownNameError


def test_a_stage_that_the_store_does_not_have_is_named_with_those_it_has(demo_store: Store) -> None:
    with pytest.raises(UnknownNameError, match=r"no stage 'studnt': known: .*student.*; did you mean 'student'\?"):
        serve(demo_store.uri, stage="studnt", slots=4)


def test_a_signal_without_a_table_is_named_with_those_that_are_there(demo_store: Store) -> None:
    there = {name.rpartition("/")[2] for name in demo_store.names() if name.startswith("signals/")}
    assert "topk" not in there
    with pytest.raises(
        UnknownNameError, match=r"--signal topk: .* has no table signals/TEACHER/topk.*; there: .*logprob"
    ):
        serve(demo_store.uri, stage="student", signal=["topk"], slots=4)
    with pytest.raises(UnknownNameError, match="--signal 'nothing': known"):
        serve(demo_store.uri, stage="student", signal=["nothing"], slots=4)


def test_a_store_that_does_not_exist_is_named(tmp_path: object) -> None:
    with pytest.raises(UnknownNameError, match="no store at"):
        serve(f"{tmp_path}/nowhere", stage="student", slots=4)
