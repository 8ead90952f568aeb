"""Planned steps under torch's DataLoader: every pack once, at any number of workers and ranks, from any position."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from mopd_dataplane import BatchStream, LoadSpec, Store
from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.integrations.torch_dataset import StoreDataset
from mopd_dataplane.job import sections
from mopd_dataplane.plan.plan import build_window

TEACHERS = ["adder", "speller"]
SPEC = LoadSpec(stage=STAGE)
WINDOWS = [0, 1]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two planned windows of three steps."""
    planned_store = make_store(tmp_path_factory.mktemp("dataset") / "store",
                               lengths_of(24, mean_log=4, shortest=8, longest=100), teachers=TEACHERS)  # fmt: skip
    columns, snapshot = plan_columns(planned_store, TEACHERS), planned_store.snapshot()
    for window in WINDOWS:
        plan = sections.Plan(pack_tokens=256, batch_samples=8)
        planned_store.add_plan(build_window(columns, plan, seed=window, stage=STAGE, window=window, snapshot=snapshot,
                                            teachers=TEACHERS))  # fmt: skip
    return planned_store


@pytest.fixture(autouse=True)
def own_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def packs_of(item: dict[str, Any]) -> list[tuple[int, list[int], list[int]]]:
    return [(pack["index"], pack["tokens"].tolist(), pack["position_ids"].tolist()) for pack in item["packs"]]


def whole(store: Store) -> list[tuple[int, int, list[Any]]]:
    """The same from the stream itself."""
    batches = []
    with BatchStream(store.uri, SPEC, windows=WINDOWS) as stream:
        for batch in stream:
            packs = [(pack.index, pack.tokens.tolist(), pack.position_ids.tolist()) for pack in batch.packs]
            batches.append((batch.step, batch.loss_tokens, packs))
    return batches


def read(items: Iterator[dict[str, Any]]) -> list[tuple[int, int, list[Any]]]:
    return [(item["step"], item["loss_tokens"], packs_of(item)) for item in items]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_every_step_once(store: Store, workers: int) -> None:
    loader = DataLoader(StoreDataset(store.uri, SPEC, windows=WINDOWS), batch_size=None, num_workers=workers)
    assert read(iter(loader)) == whole(store)
    assert len(read(iter(loader))) == len(WINDOWS) * 3, "a second pass begins at the first step"


@pytest.mark.slow
def test_a_saved_position_goes_on_with_the_next_step(store: Store) -> None:
    expected = whole(store)
    for done in (1, 3, 5):
        dataset = StoreDataset(store.uri, SPEC, windows=WINDOWS)
        items = iter(DataLoader(dataset, batch_size=None))
        position = [next(items) for _ in range(done)][-1]["next"]
        assert dataset.state_dict() == position
        items._dataset_fetcher.dataset_iter.close()  # type: ignore[attr-defined]
        later = StoreDataset(store.uri, SPEC, windows=WINDOWS)
        later.load_state_dict(position)
        assert read(iter(later)) == expected[done:]


@pytest.mark.slow
def test_the_shares_of_two_ranks_are_the_whole(store: Store) -> None:
    shares = [iter(StoreDataset(store.uri, SPEC, windows=WINDOWS, rank=rank, world_size=2)) for rank in (0, 1)]
    joined = []
    for first, second in zip(*shares, strict=True):
        assert first["loss_tokens"] == second["loss_tokens"]
        joined.append((first["step"], first["loss_tokens"], sorted(packs_of(first) + packs_of(second))))
    assert joined == [(step, tokens, sorted(packs)) for step, tokens, packs in whole(store)]
