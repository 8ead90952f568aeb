"""The simulated fleet: its audit sees every kind of loss, and a fleet that is killed loses nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from advice import advises

from mopd_dataplane.bench import fleet as fleet_module
from mopd_dataplane.bench.commit_writer import Work
from mopd_dataplane.bench.commit_writers import FIGURES, drawn_lengths, stored_lengths
from mopd_dataplane.bench.commit_writers import measure as measure_writers
from mopd_dataplane.bench.fleet import VERIFIED, measure
from mopd_dataplane.bench.fleet_audit import audit
from mopd_dataplane.bench.fleet_member import expected_samples, policy_version, run_member
from mopd_dataplane.bench.fleet_settings import Fleet
from mopd_dataplane.bench.length_bias import Interrupted, Killed
from mopd_dataplane.bench.replay import ReplayEngine, expected_response, reply, script_of
from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.errors import EngineError, InputError
from mopd_dataplane.job import sections
from mopd_dataplane.records import Prompt, Sample
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.store.dataset import Store

SMALL = Fleet(
    engines=2, scorers=2, trainers=1, slots=8, samples=32, mean_tokens=20, longest=200, multi_turn=0.5, pause_s=0.1,
    rate=100, batch=12, step_s=0.1, topk=2, speed=20, kills=3,
)  # fmt: skip
"""A fleet whose work takes a second or two of one core."""


class _Mortal(Interrupted, ReplayEngine):
    """The replay engine, which may be killed."""


def test_a_rollout_that_is_killed_ends_with_the_scripted_tokens(tmp_path: Path) -> None:
    lengths = SMALL.lengths
    prompts = [Prompt(prompt_id=f"p{number}", domain="bench", text="") for number in range(12)]
    committed: dict[str, Sample] = {}
    for steps in (7, 30, 0):
        engine = _Mortal(slots=4, rate=1e5, pause_s=0.002, lengths=lengths, version=0)
        engine.left = steps
        task = RolloutTask(
            stage="replay", iteration=0, seed=0, wal=sections.Wal(), wal_dir=tmp_path, render=lambda prompt: [1, 2],
            rollout=sections.Rollout(max_new_tokens=lengths.longest),
        )  # fmt: skip
        try:
            run_rollout(
                engine, prompts, task, environment=lambda turn: reply(turn, lengths), skip_uids=committed.keys(),
                commit=lambda batch: committed.update({sample.uid: sample for sample in batch}),
            )  # fmt: skip
        except Killed:
            assert steps
    assert len(committed) == 12
    assert any(sample.interruptions for sample in committed.values())
    assert {sample.finish_reason for sample in committed.values()} == {"stop", "length"}
    for uid, sample in committed.items():
        tokens, logprobs, mask = expected_response(uid, lengths)
        np.testing.assert_array_equal(sample.tokens[2:], tokens)
        np.testing.assert_array_equal(sample.logprobs, logprobs)
        np.testing.assert_array_equal(sample.loss_mask, mask)
        assert sample.turns == len(script_of(uid, lengths).turns)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Folder of a fleet whose members worked one after the other, in this process."""
    fleet_module.make_store(SMALL, tmp_path)
    for role, count in (("engine", SMALL.engines), ("scorer", SMALL.scorers), ("trainer", SMALL.trainers)):
        for number in range(count):
            run_member(SMALL, tmp_path, role, number)
    return tmp_path


def counts(folder: Path, fleet: Fleet = SMALL, acknowledged: tuple[str, ...] = ()) -> dict[str, int]:
    """What the audit counts that is not 0."""
    result = audit(Store.open(folder / "store"), fleet, acknowledged)
    return {name: result[name] for name in VERIFIED if result[name]}


def test_the_audit_of_a_whole_store_counts_nothing(finished: Path) -> None:
    assert counts(finished) == {}
    assert policy_version(finished, "student-0") == 3  # 32 samples in steps of 12
    assert Store.open(finished / "store").table("steps", ["samples"])["samples"].to_pylist() == [12, 12, 8]
    run_member(SMALL, finished, "engine", 0)
    run_member(SMALL, finished, "scorer", 0)
    run_member(SMALL, finished, "trainer", 0)
    assert counts(finished) == {}  # a member that is started again has nothing to do


def _remove_step(store: Store) -> None:
    store.table_handle("steps").open().delete("step = 2")


def _repeat_step(store: Store) -> None:
    (row,) = store.table("steps", filter="step = 2").to_pylist()
    row["step"] = 3
    store.insert_rows(
        "steps", store.table("steps").schema.empty_table().from_pylist([row], store.table("steps").schema)
    )


def _remove_signal(store: Store) -> None:
    store.table_handle("scores").open().delete("sample_row = 5 and kind = 'topk'")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [(_remove_step, {"lost": 8}), (_repeat_step, {"duplicated": 8}), (_remove_signal, {"lost": 1})],
    ids=["a step is missing", "a window was trained twice", "a signal is missing"],
)
def test_the_audit_counts_damage(finished: Path, damage: Callable[[Store], None], expected: dict[str, int]) -> None:
    damage(Store.open(finished / "store"))
    totals = counts(finished)
    assert {name: totals.get(name, 0) for name in expected} == expected


def test_the_audit_compares_samples_with_their_scripts(finished: Path) -> None:
    samples = len(list(expected_samples(SMALL)))
    assert counts(finished, replace(SMALL, mean_tokens=21))["changed"] > samples // 2
    more = counts(finished, replace(SMALL, samples=48))
    assert (more["lost"], more.get("duplicated", 0)) == (16 * 4, 0)  # the sample, two signals, training
    assert counts(finished, acknowledged=("0" * 32,)) == {"acknowledged and lost": 1}


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True])
def test_a_fleet_that_is_killed_loses_and_repeats_nothing(group: bool, tmp_path: Path) -> None:
    notes: list[str] = []
    figures = measure(replace(SMALL, group=group), tmp_path, notes.append)
    assert sum(figures["kills"].values()) == len(notes) > 0
    assert {name: figures["audit"][name] for name in VERIFIED} == dict.fromkeys(VERIFIED, 0)
    assert figures["audit"]["samples"] == 32
    assert figures["fleet"] == {**asdict(SMALL), "group": group}
    assert figures["tokens/day"] > 0
    assert 0 < figures["sample: end to committed, ms"]["p50"] <= figures["sample: end to committed, ms"]["p99"]
    assert figures["staleness"]["steps"] == 3
    assert figures["requests (computed)"]["PUT/s"] > 0
    assert figures["bytes"]["tokens"] > 4 * figures["tokens"]


@pytest.mark.slow
def test_a_fleet_of_one_commit_has_figures(tmp_path: Path) -> None:
    figures = measure(replace(SMALL, samples=4, kills=0, engines=1, trainers=2, topk=0), tmp_path)
    assert figures["kills"] == {}
    assert figures["tokens/day"] > 0
    assert figures["staleness"]["steps"] == 1


def test_a_store_that_differs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "audit", lambda *arguments: dict.fromkeys(VERIFIED, 0) | {"lost": 1})
    with pytest.raises(EngineError, match="'lost': 1"):
        measure(replace(SMALL, samples=4, kills=0, engines=1, scorers=1, topk=0), tmp_path)


@pytest.mark.parametrize("group", [False, True])
def test_concurrent_writers_commit_every_sample(group: bool, tmp_path: Path) -> None:
    figures = measure_writers(tmp_path, str(tmp_path / "store"), 2, 0.4, group=group)
    assert figures.keys() == set(FIGURES) - (set() if group else {"load"})
    assert figures["offered samples/s"] == 40
    assert 0 < figures["wait p50, ms"] <= figures["wait p99, ms"]
    assert Store.open(tmp_path / "store").dataset("samples").count_rows() == 2 * (1 + 2 * 4)


def test_writers_that_share_a_process_commit_every_sample(tmp_path: Path) -> None:
    figures = measure_writers(tmp_path, str(tmp_path / "store"), 4, 0.4, group=True, per_process=2)
    assert figures["writers"] == 4
    assert Store.open(tmp_path / "store").dataset("samples").count_rows() == 4 * (1 + 2 * 4)


def test_writers_whose_samples_end_at_random_moments_commit_every_sample(tmp_path: Path) -> None:
    tokens = drawn_lengths(200)
    figures = measure_writers(tmp_path, str(tmp_path / "store"), 2, 1.0, rate=40, lengths=tokens, group=True)
    assert figures["offered samples/s"] == 40
    assert 0 < figures["load"] <= 1
    lengths = Store.open(tmp_path / "store").samples(["response_len"])["response_len"].to_numpy()
    assert len(np.unique(lengths)) > 2


def test_writers_replay_the_lengths_of_a_store(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "run")
    with advises("; give another store, or --mean-tokens"):
        stored_lengths(store.uri)
    store.commit_samples([bench_sample(number, length) for number, length in enumerate((3, 70, 11))])
    lengths = stored_lengths(store.uri)
    assert sorted(lengths) == [3, 11, 70]
    (tmp_path / "writers").mkdir()
    measure_writers(tmp_path / "writers", str(tmp_path / "store"), 1, 0.6, lengths=lengths)
    replayed = Store.open(tmp_path / "store").samples(["response_len"])["response_len"].to_pylist()
    assert Counter(replayed[1:]) == Counter({3: 4, 11: 4, 70: 4})


def test_writers_finish_as_many_samples_as_the_rate_says() -> None:
    work = Work(uri="", seconds=1000.0, finished=4, rate=2.0, responses=[60])
    moments = [moment for writer in range(8) for moment in work.moments(writer)]
    assert abs(len(moments) - 16_000) < 5 * 16_000**0.5
    assert min(moments) > 0
    assert max(moments) < 1000
    assert [*replace(work, seconds=0.4, rate=0.0).moments(3)] == [0.0] * 4 + [0.2] * 4


@pytest.mark.parametrize(("writers", "group"), [(3, True), (4, False)])
def test_writers_that_cannot_share_a_process_are_rejected(writers: int, group: bool, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--per-process"):
        measure_writers(tmp_path, str(tmp_path / "store"), writers, 0.4, group=group, per_process=2)
    assert not list(tmp_path.iterdir())
