"""Batches from a real loader process equal what the store holds, on any number of ranks."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mopd_dataplane import config
from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.errors import (
    DamagedError,
    DeadlineError,
    InputError,
    MismatchError,
    ResourceError,
    UnknownNameError,
)
from mopd_dataplane.load.client import LoaderClient
from mopd_dataplane.load.launch import LoaderProcess, start_server
from mopd_dataplane.load.loader import HANDED_S, Loader
from mopd_dataplane.load.protocol import VERSION, Channel
from mopd_dataplane.load.ring import Ring
from mopd_dataplane.load.server import Server, deal_packs, listen
from mopd_dataplane.load.source import WindowSource
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.records import Pack, PlanWindow, Signal
from mopd_dataplane.store.dataset import Store

TEACHERS = ["adder", "speller"]
RULE = config.Plan(pack_tokens=512, batch_samples=16)
SPEC = LoadSpec(
    stage=STAGE, signals=("logprob", "topk", "hidden"), reference="adder", rewards=True, slots=2, deadline_s=20
)


def add_window(store: Store, window: int, seed: int = 0) -> PlanWindow:
    plan = build_window(
        plan_columns(store, TEACHERS), RULE, seed=seed, stage=STAGE, window=window, snapshot=store.snapshot(),
        teachers=TEACHERS,
    )  # fmt: skip
    store.add_plan(plan)
    return plan


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Sixty short samples with every signal, and two windows."""
    lengths = lengths_of(60, mean_log=4.5, shortest=4, longest=400)
    root = tmp_path_factory.mktemp("load") / "store"
    made = make_store(
        root, lengths, teachers=TEACHERS, signals=("logprob", "topk", "hidden"), group_size=4, rewards=True
    )
    rows = np.arange(60)
    speller = rows[rows % 2 == 1]
    tokens = made.read_tokens(speller, ["loss_mask"]).to_pylist()
    uids = made.take_samples(speller, ["uid"])["uid"].to_pylist()
    made.commit_signals("adder", "logprob", [
        Signal(uid=uid, sample_row=int(row), kind="logprob", logprob=-0.25 * np.array(t["loss_mask"], dtype=np.float32))
        for uid, row, t in zip(uids, speller, tokens, strict=True)
    ])  # fmt: skip
    add_window(made, 0)
    add_window(made, 1, seed=1)
    return made


@pytest.fixture(scope="module")
def loader(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoaderProcess]:
    """One loader for all tests: a connection that asks for nothing keeps it alive between trainers."""
    path = tmp_path_factory.mktemp("loader") / "loader.sock"
    with start_server(store.uri, path, SPEC) as process, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as anchor:
        anchor.connect(str(path))
        yield process


def connect(loader: LoaderProcess, rank: int = 0, world_size: int = 1, **options) -> LoaderClient:
    return LoaderClient(loader.socket, rank, world_size, views="numpy", deadline_s=20, **options)


def expect_pack(store: Store, plan: PlanWindow, pack: Pack) -> None:
    """Compare every field of a pack with the store, sample by sample."""
    rows = plan.sample_rows[plan.pack_starts[pack.index] : plan.pack_starts[pack.index + 1]]
    teacher = TEACHERS[plan.pack_teachers[pack.index]]
    payload = store.read_tokens(rows).to_pylist()
    logprobs = store.read_signal(teacher, "logprob", rows)
    reference = store.read_signal("adder", "logprob", rows)
    topk = store.read_signal(teacher, "topk", rows)
    hidden = store.read_signal(teacher, "hidden", rows)
    assert (pack.teacher, pack.hidden_codec) == (teacher, "bf16")
    assert pack.sample_rows.tolist() == rows.tolist()
    assert pack.cu_seqlens.tolist() == np.cumsum([0] + [len(p["tokens"]) for p in payload]).tolist()
    for i, (first, last) in enumerate(pairwise(pack.cu_seqlens.tolist())):
        sample = payload[i]
        prompt = len(sample["tokens"]) - len(sample["loss_mask"])
        response = slice(first + prompt, last)
        assert pack.tokens[first:last].tolist() == sample["tokens"]
        assert pack.position_ids[first:last].tolist() == list(range(last - first))
        assert pack.loss_mask[first:last].tolist() == [0] * prompt + sample["loss_mask"]
        assert np.array_equal(pack.sampler_logprobs[response], np.float32(sample["logprobs"]))
        assert np.array_equal(pack.teacher_logprobs[response], logprobs[i])
        assert np.array_equal(pack.reference_logprobs[response], reference[i])
        spans = [*sample["version_starts"], last - first - prompt]
        versions = [v for v, (a, b) in zip(sample["versions"], pairwise(spans), strict=True) for _ in range(b - a)]
        trained = [v if m else -1 for v, m in zip(versions, sample["loss_mask"], strict=True)]
        assert pack.policy_versions[first:last].tolist() == [-1] * prompt + trained
        for field in (pack.sampler_logprobs, pack.teacher_logprobs, pack.reference_logprobs):
            assert not field[first : first + prompt].any()
    assert np.array_equal(pack.topk_ids, np.concatenate([ids for ids, _ in topk]))
    assert np.array_equal(pack.topk_logprobs, np.concatenate([values for _, values in topk]))
    assert np.array_equal(pack.hidden, np.concatenate(hidden))
    assert len(pack.hidden) == pack.loss_mask.sum()


def test_every_field_equals_the_store(store, loader):
    plan = store.plan(STAGE, 0)
    with connect(loader) as client:
        seen = []
        for batch in client.batches(STAGE, 0):
            first, last = plan.pack_starts[plan.step_starts[batch.step : batch.step + 2]]
            rows = plan.sample_rows[first:last]
            known = list(zip(batch.teachers, batch.lengths, strict=True))  # before a pack is fetched
            assert known == [(pack.teacher, np.diff(pack.cu_seqlens).tolist()) for pack in batch.packs]
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
    with start_server(store.uri, tmp_path / "m.sock", spec) as loader, connect(loader, patience_s=1.0) as client:
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
        with pytest.raises(ResourceError, match="was released"):
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


def pack_bytes(store: Store, window: int = 0) -> list[int]:
    """Bytes in a slot of every pack of a window."""
    source = WindowSource(store, store.plan(STAGE, window), SPEC)
    return [source.fields(pack)[1] for pack in range(len(source.plan.pack_teachers))]


@pytest.mark.parametrize("rounds", [1.0, 2.5])
def test_packs_larger_than_a_slot_stream_inside_the_bound(store, tmp_path, rounds):
    """Each needs a slot of its own size, and the ring holds little more than the largest one."""
    sizes = pack_bytes(store)
    spec = SPEC.model_copy(update={"slot_bytes": 4096, "ring_bytes": int(max(sizes) * rounds) + 4096})
    plan = store.plan(STAGE, 0)
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        seen = []
        for batch in client.batches(STAGE, 0):
            for pack in batch.packs:
                expect_pack(store, plan, pack)
                seen.append(pack.index)
                assert sum(len(slot.memory) for slot in client._slots.values()) <= spec.ring_bytes, (
                    "no slot stays mapped"
                )
                batch.release(pack)
        assert seen == list(range(len(sizes)))


def test_ranks_in_step_with_each_other_share_a_ring_that_holds_one_large_pack_each(store, tmp_path):
    """Each waits for the other at every pack, as collectives do: neither may keep the room that the other needs."""
    spec = SPEC.model_copy(update={"slot_bytes": 4096, "ring_bytes": 2 * max(pack_bytes(store)) + 2 * 4096})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader:
        clients = [connect(loader, rank, 2) for rank in range(2)]
        together = threading.Barrier(2, timeout=20)
        rounds = -(-np.diff(store.plan(STAGE, 0).step_starts) // 2)

        def read(client: LoaderClient) -> list[int]:
            seen = []
            for batch, places in zip(client.batches(STAGE, 0), rounds.tolist(), strict=True):
                for place in range(places):
                    seen += [pack.index for pack in batch.packs[place : place + 1]]
                    together.wait()
                    batch.release(*batch.packs[place : place + 1])
            return seen

        with ThreadPoolExecutor(2) as pool:
            seen = [*pool.map(read, clients)]
        assert sorted(seen[0] + seen[1]) == list(range(len(pack_bytes(store))))
        for client in clients:
            client.close()


def requests_of(client: LoaderClient) -> list[dict]:
    """Everything this trainer says from now on."""
    said: list[dict] = []
    send = client._channel.send

    def listening(message: dict, **options) -> None:
        said.append(message)
        send(message, **options)

    client._channel.send = listening
    return said


def wait_until_ready(client: LoaderClient, packs: int) -> None:
    until = time.monotonic() + 20
    while client.stats()["ranks"][0]["ready"] < packs:
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_until_lent(client: LoaderClient) -> bool:
    """Whether every slot in use is that of a pack read ahead, and none a trainer's."""
    until = time.monotonic() + 20
    while (found := client.stats())["lent"] != found["ranks"][0]["ready"] and time.monotonic() < until:
        time.sleep(0.01)
    return found["lent"] == found["ranks"][0]["ready"]


def test_small_packs_are_lent_and_given_back_together(store, tmp_path):
    spec, plan = SPEC.model_copy(update={"slots": 16}), store.plan(STAGE, 0)
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        batch = next(client.batches(STAGE, 0))
        assert len(batch.packs) > 3
        wait_until_ready(client, len(batch.packs) + 1)
        said = requests_of(client)
        for pack in batch.packs:
            assert [message["op"] for message in said] == ["pack"], "one request, and nothing is given back on the way"
            expect_pack(store, plan, pack)
            batch.release(pack)
        assert [message["op"] for message in said] == ["pack", "release"]
        assert len(said[1]["leases"]) == len(batch.packs)
        assert wait_until_lent(client)


def test_packs_that_were_lent_and_not_looked_at_go_back_with_their_batch(store, tmp_path):
    spec = SPEC.model_copy(update={"slots": 16})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        stream = client.batches(STAGE, 0)
        batch = next(stream)
        wait_until_ready(client, len(batch.packs) + 1)
        assert batch.packs[0].index == 0
        assert len(batch.packs._leases) == len(batch.packs)
        next(stream)
        assert wait_until_lent(client)


@pytest.mark.parametrize(("update", "together"), [({"poison": True}, 1), ({"ring_bytes": 40}, 2), ({}, 4)])
def test_few_packs_are_lent_together_where_the_ring_is_small(store, tmp_path, update, together):
    """ring_bytes here counts the largest packs; a sixteenth of it is two of them."""
    largest = WindowSource(store, store.plan(STAGE, 0), SPEC).largest_pack_bytes
    if "ring_bytes" in update:
        update = {"ring_bytes": update["ring_bytes"] * (largest + 4096)}
    spec = SPEC.model_copy(update={"slots": 16, **update})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        batch = next(client.batches(STAGE, 0))
        wait_until_ready(client, len(batch.packs))
        batch.packs[0]
        assert min(len(batch.packs._leases), 4) == together


def test_a_loader_may_open_as_many_files_as_this_machine_allows(store, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with start_server(store.uri, tmp_path / "l.sock", SPEC) as loader:
            limits = Path(f"/proc/{loader.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert re.search(rf"Max open files +{hard} +{hard} ", limits)


@pytest.mark.parametrize("part", ["_read", "_fill"])
def test_a_filled_pack_does_not_wait_for_another_one(store, tmp_path, monkeypatch, part):
    """The third pack is looked up, or comes from a slow disk, only after the first two are used."""
    if part == "_read":  # every pack is looked up alone
        monkeypatch.setattr("mopd_dataplane.load.loader.AHEAD_BYTES", 0)
        monkeypatch.setattr("mopd_dataplane.load.loader.HANDED_S", 60)
        monkeypatch.setattr(Loader, "_coming", lambda *_: [])
    let_go, begun, whole = threading.Event(), [], getattr(WindowSource, part)

    def slow(source: WindowSource, *arguments):
        begun.append(arguments)
        time.sleep(2 * HANDED_S if part == "_fill" else 0)
        if len(begun) == 3:
            assert let_go.wait(20)
        return whole(source, *arguments)

    monkeypatch.setattr(WindowSource, part, slow)
    spec = SPEC.model_copy(update={"slots": 8, "signals": ("logprob",)})
    server = Server(Loader(store, spec, Ring(max_bytes=1 << 28), deal_packs), spec, tmp_path / "l.sock")
    runner = threading.Thread(target=server.run, args=(os.getppid(),))
    runner.start()
    with LoaderClient(tmp_path / "l.sock", views="numpy", deadline_s=20, patience_s=5) as client:
        batch = next(client.batches(STAGE, 0))
        assert [batch.packs[0].index, batch.packs[1].index] == [0, 1]
        let_go.set()
        assert len(list(batch.packs)) > 3
    runner.join(20)
    server.close()
    assert not runner.is_alive()


def test_packs_of_a_step_come_in_any_order_from_a_ring_that_holds_few(store, tmp_path):
    """The loader reads ahead in order; what the trainer asks for comes first, whatever fills the ring."""
    spec = SPEC.model_copy(update={"slots": 2, "ring_bytes": 3 * max(pack_bytes(store)) + 3 * 4096})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader, patience_s=10) as client:
        for window in (0, 1, 0):  # the depth grows meanwhile
            starts, base = store.plan(STAGE, window).step_starts, store.steps_before(STAGE, window)
            for batch in client.batches(STAGE, window):
                for place in reversed(range(len(batch.packs))):
                    assert batch.packs[place].index == starts[batch.step - base] + place
                    batch.release(batch.packs[place])
        assert client.stats()["ranks"][0]["depth"] > 2


@pytest.mark.parametrize("used", [["x"], [-1.0], [float("nan")], 3])
def test_ages_of_packs_that_make_no_sense_are_refused(loader, used):
    with connect(loader) as client:
        next(client.batches(STAGE, 0))
        with pytest.raises(DamagedError, match="'pack' is malformed"):
            client._ask({"op": "pack", "step": 0, "ordinal": 0, "used": used})


def read_at(client: LoaderClient, pack_s: float) -> dict:
    """Read a window, pause at the next one, and say what the loader has ready by then."""
    for batch in client.batches(STAGE, 0):
        for pack in batch.packs:
            time.sleep(pack_s)
            batch.release(pack)
    next(client.batches(STAGE, 1))
    time.sleep(2.0)
    return client.stats()


def test_a_fast_trainer_gets_a_deeper_ring_than_a_slow_one_inside_the_bound(store, tmp_path):
    most = 6 * max(pack_bytes(store))
    found = {}
    for name, pack_s, ring_bytes in (("slow", 0.3, 0), ("fast", 0.0, 0), ("bounded", 0.0, most)):
        spec = SPEC.model_copy(update={"ring_bytes": ring_bytes})
        with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
            found[name] = read_at(client, pack_s)
    slow, fast, bounded = (found[name]["ranks"][0] for name in ("slow", "fast", "bounded"))
    assert SPEC.slots <= slow["depth"] < fast["depth"]
    assert slow["pack_s"] == pytest.approx(0.3, rel=0.5)
    assert slow["ready"] < slow["depth"] + 1 <= fast["ready"] <= fast["depth"]
    assert bounded["depth"] > SPEC.slots
    assert found["bounded"]["bytes"] <= found["bounded"]["max_bytes"] <= most


def test_a_pack_larger_than_the_ring_says_so_and_others_are_still_read(store, tmp_path):
    sizes = pack_bytes(store)
    most = (max(sizes) - 1) // 4096 * 4096
    spec = SPEC.model_copy(update={"slots": 8, "ring_bytes": most})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        refused, plan = 0, store.plan(STAGE, 0)
        for batch in client.batches(STAGE, 0):
            first = int(plan.step_starts[batch.step])
            for place in range(len(batch.packs)):
                if sizes[first + place] <= most:
                    batch.release(batch.packs[place])
                    continue
                with pytest.raises(ResourceError, match=r"set load\.ring_bytes to at least"):
                    batch.packs[place]
                refused += 1
        assert 0 < refused < len(sizes)


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
        with pytest.raises(MismatchError, match="rank 0 is served already"):
            connect(loader)
        with pytest.raises(MismatchError, match="of 2 ranks joins while others say 1"):
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
    server = Server(Loader(store, SPEC, ring, deal_packs), SPEC, tmp_path / "l.sock")
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
