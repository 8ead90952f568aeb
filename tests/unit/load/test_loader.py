"""Batches from a real loader process equal what the store holds, on any number of ranks."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from load_builders import SPEC, TEACHERS, add_window, connect, expect_pack

from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store
from mopd_dataplane.errors import (
    DeadlineError,
    InputError,
    MismatchError,
    ResourceError,
    UnknownNameError,
)
from mopd_dataplane.load.client import LoaderClient
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.loader import Loader
from mopd_dataplane.load.protocol import VERSION, Channel
from mopd_dataplane.load.ring import Ring
from mopd_dataplane.load.server import Server, listen
from mopd_dataplane.load.spec import LoadSpec


def test_every_field_equals_the_store(store, loader):
    plan = store.plan(STAGE, 0)
    with connect(loader) as client:
        seen = []
        for batch in client.batches(STAGE, 0):
            first, last = plan.pack_starts[plan.step_starts[batch.step : batch.step + 2]]
            rows = plan.sample_rows[first:last]
            pack_summaries = list(zip(batch.teachers, batch.lengths, strict=True))  # before a pack is fetched
            assert pack_summaries == [(pack.teacher, np.diff(pack.cu_seqlens).tolist()) for pack in batch.packs]
            assert batch.sequences == len(rows) == sum(len(pack.sample_rows) for pack in batch.packs)
            assert batch.loss_tokens == sum(int(pack.loss_mask.sum()) for pack in batch.packs)
            for pack in batch.packs:
                expect_pack(store, plan, pack)
            seen.append(batch.step)
        assert seen == list(range(len(plan.step_starts) - 1))


def test_advantages_are_relative_to_the_group(store, loader):
    rewards = store.table("rewards", ["sample_row", "reward"]).to_pydict()
    of_row = dict(zip(rewards["sample_row"], rewards["reward"], strict=True))
    with connect(loader) as client:
        for batch in client.batches(STAGE, 0):
            for pack in batch.packs:
                for row, reward, advantage in zip(pack.sample_rows, pack.rewards, pack.advantages, strict=True):
                    group = [of_row[row // 4 * 4 + i] for i in range(4)]
                    assert reward == np.float32(of_row[int(row)])
                    assert advantage == pytest.approx(reward - np.mean(group), abs=1e-6)


def test_torch_views_have_the_same_values_and_no_copy(loader):
    import torch

    with connect(loader) as client:
        expected = {
            pack.index: {name: getattr(pack, name).tolist() for name in ("tokens", "hidden", "rewards", "sample_rows")}
            for batch in client.batches(STAGE, 0)
            for pack in batch.packs
        }
    with LoaderClient(loader.socket, deadline_s=20) as client:
        for pack in (pack for batch in client.batches(STAGE, 0) for pack in batch.packs):
            assert pack.tokens.dtype == torch.int32
            assert pack.sampler_logprobs.dtype == torch.float32
            assert pack.hidden.shape == (int(pack.loss_mask.sum()), 16)
            storages = {view.untyped_storage().data_ptr() for view in (pack.tokens, pack.hidden, pack.rewards)}
            assert len(storages) == 1, "all fields are views of one mapping"
            for name, values in expected.pop(pack.index).items():
                assert getattr(pack, name).tolist() == values
    assert not expected


def test_views_are_read_only(loader):
    with connect(loader) as client:
        pack = next(client.batches(STAGE, 0)).packs[0]
        with pytest.raises(ValueError, match="read-only"):
            pack.tokens[0] = 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_a_step_without_overlap(store, loader, ranks):
    plan = store.plan(STAGE, 0)
    clients = [connect(loader, rank, ranks) for rank in range(ranks)]
    streams = [client.batches(STAGE, 0) for client in clients]
    for step, batches in enumerate(zip(*streams, strict=True)):
        packs = sorted(pack.index for batch in batches for pack in batch.packs)
        assert packs == list(range(plan.step_starts[step], plan.step_starts[step + 1]))
        assert len({(batch.step, batch.loss_tokens, batch.sequences) for batch in batches}) == 1
        for batch in batches:
            teachers = [pack.teacher for pack in batch.packs]
            assert sum(a != b for a, b in pairwise(teachers)) == max(len(set(teachers)) - 1, 0)
            batch.release()
    for client in clients:
        client.close()


def packs_of(client: LoaderClient, window: int, start: int) -> list[tuple[int, list[int], list[int]]]:
    stream = client.batches(STAGE, window, start)
    return [(b.step, [p.index for p in b.packs], b.packs[0].tokens.tolist()) for b in stream]


def test_resume_by_integer_gives_the_same_batches(store, loader):
    with connect(loader) as client:
        whole = packs_of(client, 0, 0)
        assert packs_of(client, 0, 2) == whole[2:]
        assert packs_of(client, 0, len(whole)) == []
        later = packs_of(client, 1, 0)
    assert [step for step, _, _ in whole + later] == list(range(len(whole) + len(later))), "steps count over windows"


@pytest.mark.slow
def test_a_window_that_comes_later_is_waited_for(tmp_path):
    """The trainer is ahead: it waits, is told why, and goes on as soon as the window is recorded."""
    store = make_store(tmp_path / "s", lengths_of(24, mean_log=4, shortest=4, longest=200), teachers=TEACHERS)
    add_window(store, 0)
    spec = LoadSpec(stage=STAGE, deadline_s=20)
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        steps = len(list(client.batches(STAGE, 0)))
        writer = threading.Timer(1.5, add_window, (store, 1))
        writer.start()
        assert [b.window for b in client.batches(STAGE, 1)] == [1] * steps
        writer.join()
    with start_server(store.uri, tmp_path / "m.sock", spec) as loader, connect(loader, window_deadline_s=1.0) as client:
        stream = client.batches(STAGE, 7)
        with pytest.raises(DeadlineError, match=r"window 7 .* not planned yet"):
            next(stream)


def test_a_whole_batch_may_be_held_and_packs_may_go_one_by_one(store, loader):
    with connect(loader) as client:
        stream = client.batches(STAGE, 0)
        batch = next(stream)
        packs = list(batch.packs)
        assert len(packs) > SPEC.slots, "the ring grows to the batch"
        first = packs[0].tokens.tolist()
        batch.release(*packs[1:])
        assert packs[0].tokens.tolist() == first
        with pytest.raises(ResourceError, match="was released already"):
            batch.packs[1]
        assert batch.packs[0] is packs[0]


def test_a_ring_too_small_for_what_is_held_says_so(store, tmp_path):
    spec = SPEC.model_copy(update={"slots": 2, "ring_bytes": 3 * 64 * 1024, "slot_bytes": 64 * 1024})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        stream = client.batches(STAGE, 0)
        batch = next(stream)
        with pytest.raises(ResourceError, match=r"all 3 slots .* are held by trainers, 3 by this one"):
            list(batch.packs)
        batch.release(*batch.packs[:3])
        assert batch.packs[3].index == 3
        batch.release()
        for batch in stream:
            for pack in batch.packs:
                batch.release(pack)


def test_a_loader_may_open_as_many_files_as_this_machine_allows(store, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/proc/self/fd"))) + 64  # this process still opens the loader's pipes
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with start_server(store.uri, tmp_path / "l.sock", SPEC) as loader:
            limits = Path(f"/proc/{loader.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert re.search(rf"Max open files +{hard} +{hard} ", limits)


def test_a_loader_that_starts_too_slowly_is_ended_and_the_key_named(store, tmp_path):
    slow = SPEC.model_copy(update={"deadline_s": 0.01})
    with pytest.raises(DeadlineError, match=r"alive but not ready after 0\.01 s \(load\.deadline_s\)"):
        start_server(store.uri, tmp_path / "l.sock", slow)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _command(path)]


def _command(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_members_of_a_group_read_the_same_slots(loader):
    clients = [connect(loader, member=member, members=2) for member in range(2)]
    streams = [client.batches(STAGE, 0) for client in clients]
    with ThreadPoolExecutor(2) as pool:
        batches = list(pool.map(next, streams))
        for pair in zip(*(batch.packs for batch in batches), strict=True):
            assert pair[0].tokens.tolist() == pair[1].tokens.tolist()
        slots = [[lease.slot for lease in batch.packs._leases.values()] for batch in batches]
        assert slots[0] == slots[1]
        batches[0].release()
        assert batches[1].packs[0].tokens.tolist(), "held until the last member releases"
        batches[1].release()
        assert [batch.step for batch in pool.map(next, streams)] == [1, 1]
    for client in clients:
        client.close()


def test_the_trainer_imports_neither_lance_nor_pyarrow():
    code = (
        "import sys; from mopd_dataplane.load.client import LoaderClient; "
        "print([m for m in ('lance', 'pyarrow', 'torch', 'duckdb') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_refusals(loader, tmp_path):
    with connect(loader) as client:
        with pytest.raises(InputError, match="serves stage 'student', not 'other'"):
            next(client.batches("other", 0))
        with pytest.raises(InputError, match="step 99 is outside window 0"):
            next(client.batches(STAGE, 0, 99))
        with pytest.raises(MismatchError, match="rank 0 is taken"):
            connect(loader)
        with pytest.raises(MismatchError, match="there are 2 ranks, and the trainers before it said 1"):
            connect(loader, 1, 2)
        with pytest.raises(InputError, match="rank 3 of 2"):
            connect(loader, 3, 2)
        with pytest.raises(ResourceError, match="another loader listens"):
            listen(loader.socket)
    with pytest.raises(UnknownNameError):
        start_server(str(tmp_path / "nowhere"), tmp_path / "n.sock", SPEC)
    with pytest.raises(InputError, match="107 are possible"):
        listen(tmp_path / ("x" * 120))
    with pytest.raises(DeadlineError, match="no loader answers"):
        LoaderClient(tmp_path / "nobody.sock", deadline_s=0.2)


def test_missing_signals_are_named(tmp_path):
    store = make_store(tmp_path / "s", lengths_of(8, mean_log=4, shortest=4, longest=100), teachers=TEACHERS)
    add_window(store, 0)
    spec = LoadSpec(stage=STAGE, signals=("logprob",), deadline_s=20)
    with (
        start_server(store.uri, tmp_path / "l.sock", spec) as loader,
        connect(loader) as client,
        pytest.raises(UnknownNameError, match="'logprob'"),
    ):
        next(client.batches(STAGE, 0))


def test_only_this_user_may_connect(loader):
    assert oct(loader.socket.stat().st_mode & 0o777) == "0o600"


def test_the_server_ends_with_its_last_trainer(store, tmp_path):
    with start_server(store.uri, tmp_path / "l.sock", SPEC) as own:
        with connect(own) as client:
            next(client.batches(STAGE, 0))
        assert own.process.wait(20) == 0
        assert not own.socket.exists()


class ThreadThatIsOver(threading.Thread):
    """Comes back from start() after its work, where that is short: a server never sees a short visit alive."""

    def start(self) -> None:
        super().start()
        self.join(0.3)


def test_a_trainer_that_waits_to_be_accepted_is_served_though_the_one_before_it_has_left(store, tmp_path, monkeypatch):
    monkeypatch.setattr("mopd_dataplane.load.server.threading", SimpleNamespace(Thread=ThreadThatIsOver))
    ring = Ring(max_bytes=1 << 20)
    server = Server(Loader(store, SPEC, ring), SPEC, tmp_path / "l.sock")
    first, second = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    for waiting in (first, second):
        waiting.connect(str(tmp_path / "l.sock"))
    first.close()
    channel = Channel(second)
    hello = {"op": "hello", "version": VERSION, "rank": 0, "world_size": 1, "member": 0, "members": 1}
    channel.send(hello, deadline_s=5)

    def serve() -> None:
        server.run(os.getppid())
        server.close()

    runner = threading.Thread(target=serve)
    runner.start()
    assert channel.receive(deadline_s=20)[0]["stage"] == STAGE
    channel.close()
    runner.join(20)
    assert not runner.is_alive()
