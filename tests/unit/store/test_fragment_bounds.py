"""Rows within bounds are those of a whole scan, from the files that may have them alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import store_builders as build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.delete_samples import choose, remove
from mopd_dataplane.store.read.fragment_bounds import ColumnRange, fragments_within

ITERATIONS, EACH = 30, 4


@pytest.fixture(scope="module", params=["many files", "merged", "some deleted"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store.create(tmp_path_factory.mktemp("bounds") / "store")
    for iteration in range(ITERATIONS):
        some = range(iteration * EACH, (iteration + 1) * EACH)
        store.commit_samples([build.sample(number, iteration=iteration) for number in some])
        store.add_rewards(
            [{"uid": build.sample(n, iteration=iteration).uid, "sample_row": n, "verifier": "v", "reward": 1.0,
              "verifier_version": "1", "detail": None, "correct": None} for n in some]
        )  # fmt: skip
    if request.param == "merged":
        store.compact(now=True)
    elif request.param == "some deleted":
        where = "prompt_id in ('p0', 'p5', 'p37', 'p80')"
        deletion = choose(store, where).record(store, where)
        for _ in remove(store, deletion):
            pass
        store.deletions.close(deletion)
    return store


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(low=st.integers(-2, ITERATIONS + 2), count=st.integers(1, 12))
def test_rows_are_those_of_a_whole_scan(store: Store, low: int, count: int) -> None:
    high = low + count - 1
    every = [(int(row), at) for rows, batch in store.scan_samples(["iteration"])
             for row, at in zip(rows, batch["iteration"].to_pylist(), strict=True)]  # fmt: skip
    expected = [row for row, iteration in every if low <= iteration <= high]
    within = ColumnRange("iteration", low, high)
    scanned = [(int(row), at) for rows, batch in store.scan_samples(["iteration"], within=within)
               for row, at in zip(rows, batch["iteration"].to_pylist(), strict=True)]  # fmt: skip
    assert set(scanned) <= set(every)
    assert [row for row, iteration in scanned if low <= iteration <= high] == expected
    rewards = store.rows_within("rewards", ["sample_row"], ColumnRange("sample_row", low, high))[
        "sample_row"
    ].to_pylist()
    whole = store.table("rewards", ["sample_row"])["sample_row"].to_pylist()
    assert sorted(rewards) == sorted(row for row in whole if low <= row <= high)


def test_other_files_are_not_read(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    for iteration in range(10):
        store.commit_samples([build.sample(iteration * EACH + n, iteration=iteration) for n in range(EACH)])
    dataset = store.dataset("samples")
    assert len(dataset.get_fragments()) == 10
    assert len(fragments_within(dataset, ColumnRange("iteration", 7, 7))) == 1
    assert len(fragments_within(dataset, ColumnRange("iteration", 7, 20))) == 3
    assert fragments_within(dataset, ColumnRange("iteration", 11, 20)) == []
    rows = [rows for rows, _ in store.scan_samples(["uid"], within=ColumnRange("iteration", 7, 7))]
    assert np.concatenate(rows).tolist() == list(range(28, 32))
