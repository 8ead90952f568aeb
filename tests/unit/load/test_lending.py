"""What is read ahead, lent together and given back, and what happens when the ring is full."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from load_builders import SPEC, connect, expect_pack, pack_bytes

from mopd_dataplane.bench.synthetic import STAGE
from mopd_dataplane.errors import (
    DamagedError,
    ResourceError,
)
from mopd_dataplane.load.client import LoaderClient
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.loader import HANDED_S, Loader
from mopd_dataplane.load.ring import Ring
from mopd_dataplane.load.server import Server
from mopd_dataplane.load.source import WindowSource


@pytest.mark.slow
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
                for position in range(places):
                    seen += [pack.index for pack in batch.packs[position : position + 1]]
                    together.wait()
                    batch.release(*batch.packs[position : position + 1])
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


def wait_until_lent(client: LoaderClient, trainer_slots: int) -> bool:
    """Whether so many of the slots in use are the trainer's, and all others those of packs read ahead."""
    until = time.monotonic() + 20
    while (stats := client.stats())["lent"] != stats["ranks"][0]["ready"] + trainer_slots and time.monotonic() < until:
        time.sleep(0.01)
    return stats["lent"] == stats["ranks"][0]["ready"] + trainer_slots


def test_small_packs_are_lent_and_given_back_together(store, tmp_path):
    spec, plan = SPEC.model_copy(update={"slots": 16}), store.plan(STAGE, 0)
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        stream = client.batches(STAGE, 0)
        batch = next(stream)
        assert len(batch.packs) > 3
        wait_until_ready(client, len(batch.packs) + 3)
        said = requests_of(client)
        early, packs = len(batch.packs._leases), len(batch.packs)
        ops: list[str] = []
        for position, pack in enumerate(batch.packs):
            ops += ["pack"] if position == early else []  # those before it came with the batch, as a rule none
            assert [message["op"] for message in said] == ops, "one request, and nothing is given back on the way"
            expect_pack(store, plan, pack)
            batch.release(pack)
            ops += ["release"] if position + 1 in (early, packs) else []
        ops.append("next")
        assert [message["op"] for message in said] == ops
        assert sum(len(message.get("leases", ())) for message in said) == packs
        assert sum(len(message.get("used", ())) for message in said) == packs - (early < packs)
        following = next(stream)
        came = sorted(following.packs._leases)
        assert came == list(range(len(came)))
        assert len(came) >= min(3, len(following.packs))
        for position in came:
            expect_pack(store, plan, following.packs[position])
        assert [message["op"] for message in said] == ops, "they came with their batch"
        assert wait_until_lent(client, trainer_slots=len(came))


def test_a_batch_that_was_asked_for_ahead_and_is_not_taken_goes_back(store, tmp_path):
    """A trainer that goes elsewhere, or asks for something else, before it takes the next batch."""
    spec = SPEC.model_copy(update={"slots": 16})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        batch = next(client.batches(STAGE, 0))
        packs = len(batch.packs)
        wait_until_ready(client, packs + 3)
        batch.release(*batch.packs)
        assert client._asked_next
        assert client.stats()["lent"] >= 3, "the answer to what was asked first is kept"
        again = next(client.batches(STAGE, 0))
        assert wait_until_lent(client, trainer_slots=len(again.packs._leases))
        assert [pack.index for pack in again.packs] == list(range(packs))


def test_packs_that_were_lent_and_not_looked_at_go_back_with_their_batch(store, tmp_path):
    spec = SPEC.model_copy(update={"slots": 16})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        stream = client.batches(STAGE, 0)
        batch = next(stream)
        wait_until_ready(client, len(batch.packs) + 1)
        assert batch.packs[0].index == 0
        assert len(batch.packs._leases) == len(batch.packs)
        following = next(stream)
        assert wait_until_lent(client, trainer_slots=len(following.packs._leases))


@pytest.mark.slow
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
    server = Server(Loader(store, spec, Ring(max_bytes=1 << 28)), spec, tmp_path / "l.sock")
    runner = threading.Thread(target=server.run, args=(os.getppid(),))
    runner.start()
    with LoaderClient(tmp_path / "l.sock", views="numpy", deadline_s=20, window_deadline_s=5) as client:
        batch = next(client.batches(STAGE, 0))
        assert [batch.packs[0].index, batch.packs[1].index] == [0, 1]
        let_go.set()
        assert len(list(batch.packs)) > 3
    runner.join(20)
    server.close()
    assert not runner.is_alive()


@pytest.mark.slow
def test_packs_of_a_step_come_in_any_order_from_a_ring_that_holds_few(store, tmp_path):
    """The loader reads ahead in order; what the trainer asks for comes first, whatever fills the ring."""
    spec = SPEC.model_copy(update={"slots": 2, "ring_bytes": 3 * max(pack_bytes(store)) + 3 * 4096})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader, window_deadline_s=10) as client:
        for window in (0, 1, 0):  # the depth grows meanwhile
            starts, base = store.plan(STAGE, window).step_starts, store.steps_before(STAGE, window)
            for batch in client.batches(STAGE, window):
                for position in reversed(range(len(batch.packs))):
                    assert batch.packs[position].index == starts[batch.step - base] + position
                    batch.release(batch.packs[position])
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


@pytest.mark.slow
def test_a_fast_trainer_gets_a_deeper_ring_than_a_slow_one_inside_the_bound(store, tmp_path):
    most = 6 * max(pack_bytes(store))
    stats = {}
    for name, pack_s, ring_bytes in (("slow", 0.3, 0), ("fast", 0.0, 0), ("bounded", 0.0, most)):
        spec = SPEC.model_copy(update={"ring_bytes": ring_bytes})
        with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
            stats[name] = read_at(client, pack_s)
    slow, fast, bounded = (stats[name]["ranks"][0] for name in ("slow", "fast", "bounded"))
    assert SPEC.slots <= slow["depth"] < fast["depth"]
    assert slow["pack_s"] == pytest.approx(0.3, rel=0.5)
    assert slow["ready"] < slow["depth"] + 1 <= fast["ready"] <= fast["depth"]
    assert bounded["depth"] > SPEC.slots
    assert stats["bounded"]["bytes"] <= stats["bounded"]["max_bytes"] <= most


@pytest.mark.slow
def test_a_pack_larger_than_the_ring_says_so_and_others_are_still_read(store, tmp_path):
    sizes = pack_bytes(store)
    most = (max(sizes) - 1) // 4096 * 4096
    spec = SPEC.model_copy(update={"slots": 8, "ring_bytes": most})
    with start_server(store.uri, tmp_path / "l.sock", spec) as loader, connect(loader) as client:
        refused, plan = 0, store.plan(STAGE, 0)
        for batch in client.batches(STAGE, 0):
            first = int(plan.step_starts[batch.step])
            for position in range(len(batch.packs)):
                if sizes[first + position] <= most:
                    batch.release(batch.packs[position])
                    continue
                with pytest.raises(ResourceError, match=r"set load\.ring_bytes to at least"):
                    batch.packs[position]
                refused += 1
        assert 0 < refused < len(sizes)


def test_a_pack_that_one_member_has_read_is_kept_for_the_other(store, tmp_path, monkeypatch):
    """The first waits for room, and nothing is read twice."""
    filled, fill = [], WindowSource._fill
    monkeypatch.setattr(
        WindowSource, "_fill", lambda source, pack, *rest: filled.append(pack) or fill(source, pack, *rest)
    )
    spec = SPEC.model_copy(update={"slots": 2, "poison": True})
    room = 3 * max(pack_bytes(store)) + 3 * 4096
    server = Server(Loader(store, spec, Ring(max_bytes=room)), spec, tmp_path / "l.sock")
    runner = threading.Thread(target=server.run, args=(os.getppid(),))
    runner.start()
    read: list[list[int]] = [[], []]
    go_on = threading.Event()

    def member(number: int) -> None:
        options = {"member": number, "members": 2, "views": "numpy", "deadline_s": 20}
        with LoaderClient(tmp_path / "l.sock", **options) as client:
            batch = next(client.batches(STAGE, 0))
            if number == 1:
                assert go_on.wait(20)
            for pack in batch.packs:
                read[number].append(pack.index)
                batch.release(pack)

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(member, number) for number in range(2)]
        until = time.monotonic() + 20
        while len(read[0]) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)
        read_count = len(read[0])
        go_on.set()
        for one in both:
            one.result(timeout=20)
    runner.join(20)
    server.close()
    packs = list(range(store.plan(STAGE, 0).step_starts[1]))
    assert read_count < len(packs)
    assert read == [packs, packs]
    assert sorted(pack for pack in filled if pack in packs) == packs
