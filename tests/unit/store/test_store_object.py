"""The same store through Lance's object-store path (file-object-store://): no lock, no folder, no fsync to lean on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import store_builders as build

from mopd_dataplane.errors import InputError, UnknownNameError
from mopd_dataplane.store.dataset import Store


@pytest.fixture
def remote(tmp_path: Path) -> Store:
    return Store.create(f"file-object-store://{tmp_path}/bucket/run")


def test_everything_a_run_does(remote: Store) -> None:
    assert remote.root is None
    samples = [build.sample(i) for i in range(6)]
    assert remote.commit_samples(samples).inserted == 6
    remote.add_teacher(build.teacher("t"))
    for kind in ("logprob", "hidden"):
        assert remote.commit_signals("t", kind, [build.signal(s, i, kind) for i, s in enumerate(samples)]) == 6
    assert remote.names()[-2:] == ["signals/t/hidden", "signals/t/logprob"]
    snapshot = remote.snapshot(tag="plan-0")
    again = Store.open(remote.uri)
    assert again.commit_samples(samples).inserted == 0
    assert again.snapshot(tag="plan-0") == snapshot
    assert again.read_tokens(np.arange(6), verify=True, snapshot=snapshot).num_rows == 6
    assert np.array_equal(again.read_signal("t", "hidden", [4])[0], build.signal(samples[4], 4, "hidden").hidden)
    assert again.sql("select count(*) as n from samples join scores using (uid)").to_pylist() == [{"n": 12}]
    assert again.info()["snapshots"] == ["plan-0"]
    again.compact()
    again.release("plan-0")
    assert again.info()["snapshots"] == []
    assert [f.table for f in again.verify().findings] == ["teachers"], "its head file was never written"


def test_two_committers_without_a_lock(remote: Store) -> None:
    other = Store.open(remote.uri)
    mine, theirs = [build.sample(i) for i in range(8)], [build.sample(i) for i in range(4, 12)]
    inserted = remote.commit_samples(mine).inserted + other.commit_samples(theirs).inserted
    assert inserted == remote.samples(["uid"]).num_rows == 12


def test_what_needs_a_folder_says_so(remote: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a store in a local folder"):
        remote.path("wal")
    with pytest.raises(UnknownNameError, match="no store"):
        Store.open(f"file-object-store://{tmp_path}/nothing")
