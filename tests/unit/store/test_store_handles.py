"""A handle of a store: it pickles for workers, it belongs to one store, and it names a lack of file descriptors."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import store_builders as build

from mopd_dataplane.errors import MismatchError, UnknownNameError
from mopd_dataplane.store.dataset import Store


@pytest.fixture
def used(store: Store) -> Store:
    """A store whose tables, keys and readers are open."""
    samples = [build.sample(number) for number in range(4)]
    store.commit_samples(samples)
    store.add_teacher(build.teacher("t", head_file=""))
    store.commit_signals("t", "hidden", [build.signal(one, row, "hidden") for row, one in enumerate(samples)])
    store.read_signal("t", "hidden", [0])
    store.snapshot()
    return store


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_used_store_is_sent_to_workers(used: Store, method: str) -> None:
    with multiprocessing.get_context(method).Pool(2) as pool:
        read = pool.starmap(Store.read_tokens, [(used, [row], ["tokens"]) for row in range(4)])
        states = pool.starmap(Store.read_signal, [(used, "t", "hidden", [row]) for row in range(4)])
    assert [rows["tokens"][0].as_py() for rows in read] == [build.sample(row).tokens.tolist() for row in range(4)]
    assert [len(state[0]) for state in states] == [build.sample(row).loss_tokens for row in range(4)]


@pytest.mark.slow
def test_a_data_loader_reads_a_used_store_in_workers(used: Store) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(Lengths(used), batch_size=None, num_workers=2, multiprocessing_context="forkserver")  # type: ignore[arg-type,var-annotated]
    assert [*loader] == [25] * 4


class Lengths:
    """A map-style dataset over a store: the length of each sample."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        return len(self.store.read_tokens([row], ["tokens"])["tokens"][0].as_py())


def test_a_pickle_of_a_store_that_is_gone_or_replaced_is_refused(used: Store) -> None:
    pickled = ForkingPickler.dumps(used)
    shutil.rmtree(used.uri)
    with pytest.raises(UnknownNameError, match="no store at"):
        ForkingPickler.loads(pickled)
    Store.create(used.uri)
    with pytest.raises(MismatchError, match="open it again"):
        ForkingPickler.loads(pickled)


READS: list[Callable[[Store], object]] = [
    lambda store: store.samples(),
    lambda store: store.read_tokens([0]),
    lambda store: store.read_signal("t", "hidden", [0]),
    lambda store: store.sql("select count(*) from samples"),
    lambda store: store.commit_samples([build.sample(9)]),
    lambda store: store.snapshot(),
]


@pytest.mark.parametrize("read", READS)
def test_an_old_handle_does_not_read_another_store_made_at_the_same_path(
    used: Store, read: Callable[[Store], object]
) -> None:
    shutil.rmtree(used.uri)
    other = Store.create(used.uri)
    other.commit_samples([build.sample(number, stage="other") for number in range(4)])
    with pytest.raises(MismatchError, match=f"another store is there now .{other.uuid}"):
        read(used)
    assert other.samples(["stage"])["stage"].to_pylist() == ["other"] * 4


@pytest.mark.slow
def test_two_processes_that_make_a_store_at_once_have_the_same_one(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        uuids = {store.uuid for store in pool.map(Store.create, [tmp_path / "store"] * 8, chunksize=1)}
    assert len(uuids) == 1


WITHOUT_DESCRIPTORS = """
import os, resource, sys
from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.dataset import Store
uri, use = sys.argv[1:]
store = Store.open(uri)
store.samples(); store.read_tokens([0]); store.read_signal("t", "hidden", [0]); store.verify()
uses = {
    "open": lambda: Store.open(uri).samples(),
    "samples": lambda: store.samples(),
    "tokens": lambda: store.read_tokens([1, 2], verify=True),
    "hidden": lambda: store.read_signal("t", "hidden", [1, 2], verify=True),
    "verify": lambda: store.verify(),
    "names": lambda: store.names(),
}
limit = len(os.listdir("/proc/self/fd")) + 3
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for left in range(3):
    try:
        uses[use]()
        print("done")
    except ResourceError as error:
        print("refused", error)
    os.close(taken.pop())
"""


@pytest.mark.slow
@pytest.mark.parametrize("use", ["open", "samples", "tokens", "hidden", "verify", "names"])
def test_running_out_of_file_descriptors_is_not_reported_as_damage(used: Store, use: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS, used.uri, use], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    first, *others = child.stdout.splitlines()
    assert first.startswith("refused")
    assert "may open no more files (ulimit -n is" in first
    assert {line.split()[0] for line in others} <= {"refused", "done"}
