"""How a micro-batch is shared out over the ranks of a context-parallel group, and who is blamed when a rank dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from mopd_dataplane.errors import InputError, JobFileError, MismatchError
from mopd_dataplane.fields import FIELDS, value
from mopd_dataplane.job.load import check_job
from mopd_dataplane.job.scale import Scale
from mopd_dataplane.records import Pack
from mopd_dataplane.run.steps.trainer_process import ranks_here
from mopd_dataplane.train.context import MADE, check_heads, part_of, trained_token_fields
from mopd_dataplane.train.microbatch import MicroBatch, build
from mopd_dataplane.train.node_agent import report
from mopd_dataplane.train.ranks import Ranks

WHOLE = {"teacher", "tokens", "hidden_codec", "loss_counts", "advantages", "rewards", "sample_rows"}
ROWS = {field.pack for field in FIELDS if field.batch == "rows" and field.axis != "sample"}
CUT = {
    "input_ids",
    "position_ids",
    "sequence_lengths",
    "sequence_starts",
    "predictors",
    "experts",
    "extra",
    *MADE,
    *ROWS,
}


def test_every_field_is_known_to_be_shared_or_whole() -> None:
    """A new field of MicroBatch must be put on one of the two lists, or members would get rows that do not fit."""
    assert {field.name for field in fields(MicroBatch)} == WHOLE | CUT
    assert not WHOLE & CUT


@pytest.mark.parametrize("members", [1, 2, 3, 4, 7])
def test_the_parts_are_the_whole(members: int, pack: Callable[..., Pack]) -> None:
    packs = [pack([9, 6], seed=1), pack([7], seed=2)]
    for one in packs:
        one.extra["margin"] = np.arange(len(one.tokens), dtype=np.float32)
        one.experts = np.arange(4 * len(one.tokens), dtype=np.int16).reshape(-1, 4)
    whole = build(packs, "packed")
    parts = [part_of(whole, member, members) for member in range(members)]
    width = whole.input_ids.shape[1]
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(joined[:, :width], getattr(whole, name))
    assert len({part.input_ids.shape for part in parts}) == 1
    routed = torch.cat([part.experts for part in parts if part.experts is not None])
    assert torch.equal(routed[:width], whole.experts)
    assert (routed[width:] == -1).all()
    assert len(routed) == members * parts[0].input_ids.shape[1]
    for part in parts:
        assert sum(part.sequence_lengths) == members * part.input_ids.shape[1]
    share = parts[0].input_ids.shape[1]
    moved = [part.predictors + member * share for member, part in enumerate(parts)]
    assert torch.equal(torch.cat(moved), whole.predictors)
    assert "margin" in trained_token_fields(whole)
    for name in trained_token_fields(whole):
        own = value(whole, name)
        if own is not None:
            assert torch.equal(torch.cat([value(part, name) for part in parts]), own)


def test_heads_must_be_dealt_evenly() -> None:
    with pytest.raises(MismatchError, match=r"context_parallel = 4 does not divide the 6 attention heads of Tiny"):
        check_heads(6, 4, "Tiny")


def test_a_group_must_lie_on_one_node() -> None:
    environment = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(InputError, match=r"context_parallel = 2 does not divide the 1 ranks of a node"):
        Ranks.join("cpu", members=2, environment=environment)


def test_ranks_of_a_group_are_neighbours() -> None:
    places = [Ranks(rank, 4, torch.device("cpu"), members=2) for rank in range(4)]
    assert [(ranks.data_rank, ranks.member) for ranks in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {ranks.data_world for ranks in places} == {2}


@pytest.mark.parametrize(
    ("codes", "blamed", "exit_code"),
    [
        ({0: 6, 1: -9}, "rank 1 was killed by signal 9", 6),
        ({0: 6, 1: 6, 2: 3}, "rank 2 ended with exit code 3", 3),
        ({1: 6}, "rank 1 ended with exit code 6", 6),
    ],
)
def test_the_first_cause_is_reported(
    codes: dict[int, int], blamed: str, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(codes) == exit_code
    assert blamed in capsys.readouterr().err


def test_ranks_are_dealt_to_nodes_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "3")
    assert ranks_here(Scale(ranks=6)) == 2
    with pytest.raises(InputError, match=r"scale.ranks = 4 is no multiple of the 3 nodes"):
        ranks_here(Scale(ranks=4))


def job(**changes: Any) -> dict[str, Any]:
    return {
        "name": "j", "store": "runs/j", "student": {"path": "p"}, "domains": {"d": {"source": "x.jsonl"}},
        "teachers": {"t": {"source": "student"}}, "routing": {"d": "t"},
        "objectives": {"o": {"policy_gradient": {"discount": 0.9}}},
        "stages": [{"name": "s", "objective": "o", "plan": {"batch_samples": 4}}], **changes,
    }  # fmt: skip


def test_scale_is_checked() -> None:
    assert check_job(job(scale={"ranks": 4}), where="job").scale.data_parallel == 4
    with pytest.raises(JobFileError, match=r"context_parallel = 3 does not divide ranks = 4"):
        check_job(job(scale={"ranks": 4, "context_parallel": 3}), where="job")
    with pytest.raises(JobFileError, match=r"sums over later tokens \(discount = 0.9\)"):
        check_job(job(scale={"ranks": 4, "context_parallel": 2}), where="job")
