"""Next steps that messages of planning and loading name: each is taken, and works."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from advice import advises

from mopd_dataplane import Store
from mopd_dataplane.job import sections
from mopd_dataplane.load import launch
from mopd_dataplane.load.ring import Ring
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.load.stream import socket_of
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, Columns, collect_columns
from mopd_dataplane.plan.draw import draw
from mopd_dataplane.plan.follow import Decision, next_window
from mopd_dataplane.plan.mixture import plan_mixture
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.records import PlanWindow, Snapshot

RULE: dict[str, Any] = {"pack_tokens": 100, "batch_samples": 4}


def columns_of(n: int, **changes: Any) -> Columns:
    columns = Columns(
        sample_rows=np.arange(n, dtype=np.int64), total_len=np.full(n, 10, np.int32),
        loss_tokens=np.full(n, 5, np.int32), version_first=np.zeros(n, np.int32), domains=np.zeros(n, np.int16),
        groups=np.arange(n, dtype=np.int64), teachers=np.zeros(n, np.int16), has_signals=np.ones(n, bool),
        has_reward=np.ones(n, bool), abandoned=np.zeros(n, bool), domain_names=("sums",),
    )  # fmt: skip
    return replace(columns, **changes)


def window(columns: Columns, *, group_size: int = 1, **settings: Any) -> PlanWindow:
    return build_window(
        columns, sections.Plan(**(RULE | settings)), seed=0, stage="s", window=0,
        snapshot=Snapshot(uri="", versions={}), teachers=["t"], training=Training(group_size=group_size),
    )  # fmt: skip


def follow(columns: Columns, admission: np.ndarray | None = None, **settings: Any) -> Decision:
    return next_window(
        columns, np.empty(0, np.int64), sections.Plan(**(RULE | settings)), admission=admission, finished=True, seed=0,
        stage="s", window=0, snapshot=Snapshot(uri="", versions={}), teachers=["t"],
        training=Training(policy_version=0),
    )  # fmt: skip


def test_batches_that_are_not_filled() -> None:
    with advises(" samples do not fill one batch and plan.drop_last is set; set plan.drop_last = false"):
        window(columns_of(3), drop_last=True)
    with advises(" samples do not fill one step and plan.drop_last is set; set plan.drop_last = false"):
        window(columns_of(3), pack_tokens=10, strict_batches=False, drop_last=True)
    for strict in (True, False):
        assert len(window(columns_of(3), pack_tokens=10, drop_last=False, strict_batches=strict).sample_rows) == 3


def test_a_sample_over_a_batch_or_a_pack() -> None:
    with advises("; one sample or group has ") as refused:
        window(columns_of(8), batch_samples=0, batch_tokens=7)
    assert str(refused.value).endswith("has 10: set at least that")
    assert len(window(columns_of(8), batch_samples=0, batch_tokens=10).sample_rows) == 8
    long = columns_of(8, total_len=np.array([10] * 7 + [140], np.int32))
    with advises('or plan.overlong = "drop" to leave them out on record'):
        window(long, overlong="error")
    assert len(window(long, overlong="error", pack_tokens=140).sample_rows) == 8
    assert len(window(long, overlong="drop").sample_rows) == 7


def test_columns_and_routes() -> None:
    with advises("; give one value per sample in each"):
        columns_of(3, loss_tokens=np.ones(2, np.int32))
    columns_of(3, loss_tokens=np.ones(3, np.int32))
    values: dict[str, Any] = {name: [0, 0] for name in SAMPLE_COLUMNS}
    values |= {"domain": ["sums"] * 2, "stage": ["s"] * 2, "group_id": ["a", "b"], "writer": ["w"] * 2}
    values |= {"writer_seq": [0, 1], "finish_reason": ["stop"] * 2, "uid": ["a", "b"]}
    rows = pa.table({name: values[name] for name in SAMPLE_COLUMNS})

    def collected(teachers: list[str]) -> Columns:
        return collect_columns([(np.arange(2), rows)], 2, route=lambda domain, effort: "expert", teachers=teachers)

    with advises(": give that one too"):
        collected(["other"])
    assert collected(["other", "expert"]).teachers.tolist() == [1, 1]


def test_draws() -> None:
    weightless = columns_of(8, weights=np.zeros(8))
    with advises(": raise plan.limit, or give some sample a weight above 0"):
        draw(weightless, sections.Plan(**RULE, limit=4, weight="kl"), 1, 0)
    some = columns_of(8, weights=np.array([1.0] + [0.0] * 7))
    assert len(draw(some, sections.Plan(**RULE, limit=4, weight="kl"), 1, 0).columns) == 1
    grouped = columns_of(8, groups=np.repeat([0, 1], 4), weights=np.ones(8))
    with advises(": raise plan.limit, or give some sample a weight above 0"):
        draw(grouped, sections.Plan(**RULE, limit=2, weight="kl"), 4, 0)
    assert len(draw(grouped, sections.Plan(**RULE, limit=4, weight="kl"), 4, 0).columns) == 4
    with advises("; give weights from 0 on, such as greatest(kl, 0)"):
        draw(columns_of(2, weights=np.array([-1.0, 1.0])), sections.Plan(**RULE, limit=1, weight="kl"), 1, 0)
    draw(columns_of(2, weights=np.array([0.0, 1.0])), sections.Plan(**RULE, limit=1, weight="kl"), 1, 0)


def test_following_and_mixtures() -> None:
    with advises(" samples; give one per sample"):
        follow(columns_of(8), admission=np.arange(7))
    assert follow(columns_of(8), admission=np.arange(8)).window is not None
    two = columns_of(8, domains=np.repeat([0, 1], 4).astype(np.int16), domain_names=("sums", "words"))
    with advises(" has no weight: give it one"):
        follow(two, mixture={"sums": 1.0})
    assert follow(two, mixture={"sums": 1.0, "words": 1.0}).window is not None
    domains, tokens = np.array([0] * 7 + [1]), np.ones(8, np.int64)

    def mixed(**weights: float) -> list[int]:
        return plan_mixture(domains, tokens, ("sums", "words"), weights, step_units=1).quota.tolist()

    with advises("; raise its weight, or set it to 0"):
        mixed(sums=1.0, words=0.01)
    assert mixed(sums=1.0, words=0.2)[1] == 1
    assert mixed(sums=1.0, words=0.0) == [7, 0]
    with advises("give every one of them a weight (0 leaves a domain out) and weigh no domain without samples"):
        mixed(sums=1.0)


def test_groups_need_strict_batches() -> None:
    grouped = columns_of(8, groups=np.repeat(np.arange(4), 2))
    with advises(" samples must stay in one step, which plan.strict_batches = false cannot keep; set it to true"):
        window(grouped, group_size=2, strict_batches=False)
    assert len(window(grouped, group_size=2, strict_batches=True).sample_rows) == 8


def test_a_pack_beyond_the_ring() -> None:
    ring = Ring(max_bytes=4096)
    with advises("; set load.ring_bytes to at least ") as refused:
        ring.acquire(10_000)
    needed = int(str(refused.value).partition("to at least ")[2].partition(" ")[0])
    ring.close()
    larger = Ring(max_bytes=needed)
    assert larger.acquire(10_000) is not None
    larger.close()


@pytest.mark.slow
def test_a_loader_that_needs_longer(make_store: Any, tmp_path: Path) -> None:
    store: Store = make_store(tmp_path / "store", prompts=2)
    spec = LoadSpec(stage="student", deadline_s=1e-3)
    with advises(": a busy machine or slow disk; raise it or run again, nothing is lost"):
        launch.start_server(store.uri, tmp_path / "socket", spec)
    loader = launch.start_server(store.uri, tmp_path / "socket", spec.model_copy(update={"deadline_s": 120.0}))
    loader.stop()


def test_a_folder_of_sockets_that_others_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    spec = LoadSpec(stage="student")
    folder = socket_of(tmp_path / "store", spec).parent
    folder.chmod(0o777)
    with advises("; remove it, or set XDG_RUNTIME_DIR to a folder of yours"):
        socket_of(tmp_path / "store", spec)
    folder.rmdir()
    assert stat.S_IMODE(socket_of(tmp_path / "store", spec).parent.stat().st_mode) == 0o700
    folder.chmod(0o777)
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "mine"))
    socket_of(tmp_path / "store", spec)
