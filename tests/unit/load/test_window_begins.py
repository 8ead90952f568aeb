"""A window's first packs wait for as little as possible: for its plan to be recorded, and for their own payload."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from load_builders import SPEC, TEACHERS, add_window, expect_pack

from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store
from mopd_dataplane.fields import arguments
from mopd_dataplane.load import source as source_module
from mopd_dataplane.load import windows as windows_module
from mopd_dataplane.load.loader import AHEAD_GROWTH, Loader
from mopd_dataplane.load.ring import Ring
from mopd_dataplane.load.slot_layout import arrays_of
from mopd_dataplane.load.source import WindowSource
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.load.windows import Windows
from mopd_dataplane.records import Pack
from mopd_dataplane.store.read.hidden import HiddenReader
from mopd_dataplane.store.read.row_reader import PayloadReader


def unheard(reason: str) -> None:
    """A trainer that only waits."""


def test_a_plan_is_seen_as_soon_as_it_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(windows_module, "PLAN_POLL_S", 3600.0)  # what a folder says must be enough
    store = make_store(tmp_path / "s", lengths_of(24, mean_log=4, shortest=4, longest=200), teachers=TEACHERS)
    add_window(store, 0)
    begun, sources = threading.Event(), []
    waiting = threading.Thread(
        target=lambda: sources.append(Windows(store, LoadSpec(stage=STAGE)).wait_for(1, lambda reason: begun.set())),
        daemon=True,
    )
    waiting.start()
    assert begun.wait(60)
    assert not sources
    add_window(store, 1)
    waiting.join(60)
    assert [source.plan.window for source in sources] == [1]


def test_few_packs_are_looked_up_first_and_then_ever_more(store, monkeypatch):
    """All packs of the window are needed by a trainer at some time; here it takes them one by one."""
    monkeypatch.setattr(source_module, "LOOKED_UP_FIRST", 0)
    read, looked_up, ids = WindowSource._read, [], set()

    def recorded(source: WindowSource, packs: list[int]):
        looked_up.append(len(packs))
        ids.update(packs)
        return read(source, packs)

    monkeypatch.setattr(WindowSource, "_read", recorded)
    loader = Loader(store, SPEC, Ring(max_bytes=1 << 28))
    trainer = loader.join(0, 1, 0, 1)
    steps, _ = loader.open(trainer, 0, 0, unheard)
    for _ in range(steps):
        _, step, packs, lent = loader.advance(trainer, [])
        leases = list(lent)
        while len(leases) < len(packs):
            leases += loader.claim(trainer, step, len(leases), unheard, [])
        loader.release(trainer, [(slot.id, slot.generation) for _, slot in leases])
    loader.close()
    assert ids == set(range(len(store.plan(STAGE, 0).pack_teachers)))  # one that gave up its slot is asked for again
    assert looked_up[0] <= SPEC.slots
    before = np.cumsum(looked_up)
    for earlier, later in zip(before, looked_up[1:], strict=False):
        assert later <= AHEAD_GROWTH * earlier + SPEC.slots
    assert len(looked_up) < len(store.plan(STAGE, 0).pack_teachers), "and not each alone"


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1, 30, 1 << 20])
def test_packs_do_not_depend_on_how_many_samples_were_looked_up_when_the_window_was_opened(store, monkeypatch, first):
    monkeypatch.setattr(source_module, "LOOKED_UP_FIRST", first)
    plan = store.plan(STAGE, 0)
    source = WindowSource(store, plan, SPEC)
    for pack in range(len(plan.pack_teachers)):
        fields, nbytes = source.fields(pack)
        memory = memoryview(bytearray(nbytes))
        source.fill(pack, fields, memory, list)
        pack_arguments = arguments(Pack, arrays_of(memory, fields))
        expect_pack(
            store,
            plan,
            Pack(index=pack, teacher=source.teacher(pack), hidden_codec=source.codec(pack), **pack_arguments),
        )


def test_an_open_window_knows_where_its_first_packs_lie(store, monkeypatch):
    """Filling one asks neither for metadata nor, of hidden states, anything through Lance."""
    plan = store.plan(STAGE, 0)
    source = WindowSource(store, plan, SPEC.model_copy(update={"signals": ("hidden",), "others": {}}))
    lance_reads: list[str] = []
    monkeypatch.setattr(HiddenReader, "_through_lance", lambda _, row, *__: lance_reads.append(f"row {row}"))
    rows_of_all = PayloadReader.look_up

    def look_up(reader: PayloadReader, rows):
        assert (reader._rows[np.searchsorted(reader.sample_rows, rows)] >= 0).all()
        return rows_of_all(reader, rows)

    monkeypatch.setattr(PayloadReader, "look_up", look_up)
    for pack in range(int(plan.step_starts[1])):
        fields, nbytes = source.fields(pack)
        source.fill(pack, fields, memoryview(bytearray(nbytes)), list)
    assert lance_reads == []
