"""Payload is read for many packs at once, in the order it is stored, and lands in the packs that asked for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mopd_dataplane.bench import synthetic
from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.errors import DamagedError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.load.slot_layout import arrays_of
from mopd_dataplane.load.source import WindowSource
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.store.read import row_reader
from mopd_dataplane.store.read.list_files import ListFiles
from mopd_dataplane.store.read.row_reader import PayloadReader

TEACHERS = ["adder", "speller"]
SPEC = LoadSpec(stage=STAGE, signals=("logprob", "topk"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> WindowSource:
    lengths = lengths_of(40, mean_log=4.5, shortest=4, longest=400)
    store = make_store(tmp_path_factory.mktemp("payload") / "s", lengths, teachers=TEACHERS, signals=SPEC.signals)
    plan = build_window(
        plan_columns(store, TEACHERS), sections.Plan(pack_tokens=512, batch_samples=8), seed=3, stage=STAGE, window=0,
        snapshot=store.snapshot(), teachers=TEACHERS,
    )  # fmt: skip
    store.add_plan(plan)
    return WindowSource(store, plan, SPEC)


def filled(source: WindowSource, pack: int, ahead: list[int]) -> dict[str, bytes]:
    fields, nbytes = source.fields(pack)
    memory = memoryview(bytearray(b"\xdb" * nbytes))
    source.fill(pack, fields, memory, lambda: ahead)
    return {name: array.tobytes() for name, array in arrays_of(memory, fields).items()}


@pytest.mark.parametrize("request_bytes", [0, 1, 3000, 1 << 20])
def test_packs_do_not_depend_on_how_they_were_read(source, monkeypatch, request_bytes):
    """In place, or through Lance in requests of so many bytes; pack by pack, or all at once."""
    packs = list(range(len(source.plan.pack_teachers)))
    alone = {}
    for pack in packs:
        source._payload = None
        alone[pack] = filled(source, pack, [])
    takes = []
    monkeypatch.setattr(row_reader, "IN_PLACE_BYTES", 0)
    if request_bytes:
        monkeypatch.setattr(row_reader, "REQUEST_BYTES", request_bytes)
        monkeypatch.setattr(ListFiles, "locate", lambda *_: None)
        take = row_reader.take_payload
        monkeypatch.setattr(row_reader, "take_payload", lambda *args: takes.append(len(args[1])) or take(*args))
    source._payload = None
    assert {pack: filled(source, pack, packs) for pack in packs} == alone
    tables = 1 + 2 * len(TEACHERS)
    assert (len(takes) > tables) == (request_bytes in (1, 3000)), "requests are bounded"
    assert bool(takes) == bool(request_bytes), "and all is read in place where Lance is not asked"


def test_one_read_serves_all_packs_ahead_in_storage_order(source, monkeypatch):
    row_requests = []
    lists = PayloadReader.lists

    def spy(self, rows, *columns, **options):
        if columns:  # of tokens
            row_requests.append(np.asarray(rows).tolist())
        return lists(self, rows, *columns, **options)

    monkeypatch.setattr(PayloadReader, "lists", spy)
    packs = list(range(len(source.plan.pack_teachers)))
    source._payload = None
    for pack in packs:
        filled(source, pack, packs)
    assert row_requests == [sorted(source.plan.sample_rows.tolist())]
    assert source._payload is None, "memory of packs that are all filled is given back"


def test_a_payload_of_another_length_than_its_metadata_is_damage(source):
    source._payload = None
    lengths, spans = source.lengths.copy(), source._version_spans.copy()
    source.lengths[source._span(1)] += 1
    source._version_spans[source._span(2)] += 1
    filled(source, 0, [1, 2])
    with pytest.raises(DamagedError, match=r"row \d+ has \d+ tokens, its metadata says"):
        filled(source, 1, [])
    with pytest.raises(DamagedError, match=r"row \d+ has \d policy versions, its metadata says"):
        filled(source, 2, [])
    source.lengths, source._version_spans = lengths, spans


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("logprobs", r"row \d+ has \d+ log-probs, its metadata says \d+; run `mopd store verify`"),
        ("logprob", r"row \d+ has \d+ logprob of 'adder', its metadata says \d+"),
        (
            "ids",
            r"the pack of sample row \d+ has [\d,]+ topk_ids of teacher 'adder', its metadata says [\d,]+; run `mopd",
        ),
    ],
)
def test_lists_of_another_length_than_the_response_are_damage(source, monkeypatch, column, said):
    lists = PayloadReader.lists

    def shortened(self, *args, **options):
        columns = lists(self, *args, **options)
        if column in columns:
            columns[column].lengths[:] -= 1
        return columns

    source._payload = None
    monkeypatch.setattr(PayloadReader, "lists", shortened)
    adders = [pack for pack in range(len(source.plan.pack_teachers)) if source.teacher(pack) == "adder"]
    with pytest.raises(DamagedError, match=said):
        filled(source, adders[0], adders)
    source._payload = None


def test_hidden_states_come_from_the_sidecar_only_when_it_is_the_right_file(tmp_path: Path):
    store = make_store(
        tmp_path / "s", np.full(6, 64, np.int32), teachers=["adder"], signals=("hidden",), row_bytes=4096
    )
    rows = store.signal_rows("adder", "hidden", range(6))["payload_row"].to_pylist()
    expected = [states.tobytes() for states in store.read_signal("adder", "hidden", range(6), verify=True)]

    def read(reader) -> list[bytes]:
        targets = [bytearray(len(states)) for states in expected]
        for row, target in zip(rows, targets, strict=True):
            reader.read_into(row, 0, memoryview(target))
        return [bytes(target) for target in targets]

    direct = store.own_hidden_reader("adder")
    assert read(direct) == expected
    [(name, file)] = direct._files.items()
    assert file is not None, "read by preadv"
    sidecar = direct._sidecars._folder / name

    decoy = store.own_hidden_reader("adder")
    decoy._sidecars._folder = tmp_path / "decoy"
    (tmp_path / "decoy" / name).parent.mkdir(parents=True)
    (tmp_path / "decoy" / name).write_bytes(bytes(sidecar.stat().st_size))
    assert read(decoy) == expected
    assert decoy._files == {name: None}, "another file's bytes: everything through Lance"

    with sidecar.open("r+b") as file:
        file.truncate(sidecar.stat().st_size - 1)
    with pytest.raises(DamagedError, match="the file ends before"):
        read(direct)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"topk_source": "student"}, r"4 \(the student's likeliest\), 4 \(the teacher's"),
        ({"k": 2}, r"2 \(the teacher's likeliest\), 4 "),
    ],
)
def test_a_window_whose_top_k_is_of_two_kinds_is_refused(tmp_path, monkeypatch, change, said):
    lengths = lengths_of(12, mean_log=3.0, shortest=4, longest=40)
    make_signal = synthetic._signal

    def mixed(kind, sample, row, *rest):
        signal = make_signal(kind, sample, row, *rest)
        if row % 2 == 0:
            return signal
        if "k" in change:
            return replace(signal, topk_ids=signal.topk_ids[:, :2], topk_logprobs=signal.topk_logprobs[:, :2])
        return replace(signal, **change)

    monkeypatch.setattr(synthetic, "_signal", mixed)
    store = make_store(tmp_path / "s", lengths, teachers=["adder"], signals=("topk",))
    plan = build_window(
        plan_columns(store, ["adder"]), sections.Plan(pack_tokens=512, batch_samples=4), seed=3, stage=STAGE, window=0,
        snapshot=store.snapshot(), teachers=["adder"],
    )  # fmt: skip
    with pytest.raises(MismatchError, match=said):
        WindowSource(store, plan, LoadSpec(stage=STAGE, signals=("topk",)))


def test_a_window_of_the_other_support_than_the_stage_asks_for_is_refused(source):
    spec = LoadSpec(stage=STAGE, signals=("topk",), topk_source="student")
    with pytest.raises(MismatchError, match=r"4 \(the teacher's likeliest\).* needed, the student's"):
        WindowSource(source._store, source.plan, spec)
    WindowSource(source._store, source.plan, spec.model_copy(update={"topk_source": "teacher"}))


def test_a_group_is_of_one_stage(tmp_path, monkeypatch):
    """Two stages ask the same prompts in the same iteration; neither's rewards count in the other's advantages."""
    lengths = lengths_of(8, mean_log=3.0, shortest=4, longest=40)
    store = make_store(tmp_path / "s", lengths, teachers=["adder"], group_size=4, rewards=True)
    plan = build_window(
        plan_columns(store, ["adder"]), sections.Plan(pack_tokens=512, batch_samples=4), seed=3, stage=STAGE, window=0,
        snapshot=store.snapshot(), teachers=["adder"],
    )  # fmt: skip
    alone = WindowSource(store, plan, LoadSpec(stage=STAGE, rewards=True))._outcomes
    make_sample = synthetic._sample

    def of_another_stage(index, *rest):
        sample = make_sample(index, *rest)
        return replace(sample, uid=f"{index:032x}", stage="other")

    monkeypatch.setattr(synthetic, "_sample", of_another_stage)
    monkeypatch.setattr(
        synthetic,
        "_reward",
        lambda s, row, noise: {
            "uid": s.uid,
            "sample_row": row,
            "verifier": "bench",
            "verifier_version": "1",
            "reward": 9.0,
        },
    )
    both = make_store(tmp_path / "s", lengths, teachers=["adder"], group_size=4, rewards=True)
    plan.snapshot = both.snapshot()
    outcomes = WindowSource(both, plan, LoadSpec(stage=STAGE, rewards=True))._outcomes
    assert len(both.samples(["uid"])) == 16
    np.testing.assert_array_equal(outcomes.advantages, alone.advantages)
    assert alone.advantages.any()
