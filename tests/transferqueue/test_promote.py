"""Groups that were finished after a checkpoint come back with it, whole, under their writes, and once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from advice import advises
from omegaconf import OmegaConf
from queue_framework import SESSIONS, Framework, expected

from mopd_dataplane.errors import InputError
from mopd_dataplane.store.queue.opening import open_queue
from mopd_dataplane.transferqueue import backend, promote


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts the framework; the one before it is gone."""
    monkeypatch.setattr(backend, "opened", lambda own: open_queue(own.store, own.queue, starts_folding=False))
    runs: list[Framework] = []

    def start() -> Framework:
        if runs:
            runs[-1].close()
        runs.append(Framework(tmp_path))
        return runs[-1]

    yield start
    runs[-1].close()


def test_a_group_finished_after_the_checkpoint_takes_the_place_of_its_unfinished_prompt(begin: Any) -> None:
    run = begin()
    run.issue("a", 1)
    run.issue("b", 1)
    run.answer("a", 0, 1)
    run.save("1")
    run.answer("a", 1, 1)
    run.tag("a", status="finished")
    run.answer("b", 0, 1)
    before = run.tags()
    run = begin()
    run.load("1")
    tags = run.tags()
    assert {key: tags.get(key) for key in ("a", "a_0_0", "a_1_0")} == {k: before[k] for k in ("a", "a_0_0", "a_1_0")}
    assert tags["a"] == {"is_prompt": True, "status": "finished", "global_steps": 1}
    assert tags["b"]["status"] == "running"
    assert "b_0_0" not in tags  # one session of two is no group
    assert [run.tokens(f"a_{session}_0") for session in range(2)] == [expected("a", 0, 1), expected("a", 1, 1)]


def test_a_group_that_was_trained_with_lost_weights_comes_again(begin: Any) -> None:
    run = begin()
    run.issue("a", 1)
    run.save("1")
    run.finish("a", 1)
    run.train("a")
    for number in range(4):  # which would use its numbers again
        run.issue(f"c{number}", 2)
        run.finish(f"c{number}", 2)
    run = begin()
    run.load("1")
    assert run.tags()["a"]["status"] == "finished"
    assert run.tokens("a_1_0") == expected("a", 1, 1)


def test_a_group_that_the_checkpoints_trainer_consumed_does_not_come_again(begin: Any) -> None:
    run = begin()
    run.issue("a", 1)
    run.finish("a", 1)
    run.clear("a")  # sampled: verl saves before it clears the trajectories
    run.save("1")
    run.clear("a_0_0", "a_1_0")
    run.issue("b", 2)
    run = begin()
    run.load("1")
    assert run.tags() == {}
    assert run.waiting() == set()
    run.save("2")
    run = begin()
    run.load("2")
    assert run.tags() == {}


def test_a_prompt_that_is_drawn_again_gets_its_waiting_group(begin: Any) -> None:
    run = begin()
    run.issue("a", 1)
    run.save("1")
    run.issue("b", 2)
    run.finish("b", 2)
    before = run.tags()
    for _ in range(2):  # the second crash comes before the next checkpoint
        run = begin()
        run.load("1")
        assert run.waiting() == {"b"}
        assert "b" not in run.tags()
        run.issue("again", 2)
        run.tag("again", is_prompt=True, **{promote.PROMOTES: "b"})
        tags = run.tags()
        assert "again" not in tags
        assert {key: tags[key] for key in ("b", "b_0_0", "b_1_0")} == {k: before[k] for k in ("b", "b_0_0", "b_1_0")}
        assert run.tokens("b_1_0") == expected("b", 1, 2)
        assert run.waiting() == set()


def test_numbers_that_were_cleared_before_the_checkpoint_may_be_used_by_groups_after_it(begin: Any) -> None:
    run = begin()
    run.issue("a", 1)
    run.finish("a", 1)
    run.train("a")
    run.save("1")  # which pins the values of "a": they are cleared at the second checkpoint from then
    run = begin()
    run.load("1")
    run.issue("b", 2)
    run.finish("b", 2)
    run = begin()
    run.load("1")
    assert run.waiting() == {"b"}
    assert run.tokens("b_0_0", promote.WAITING + "train") == expected("b", 0, 2)


def test_waiting_groups_are_in_the_next_checkpoint_and_are_given_up_after_many(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promote, "WAIT_CHECKPOINTS", 2)
    run = begin()
    run.save("1")
    run.issue("b", 2)
    run.finish("b", 2)
    run = begin()
    run.load("1")
    run.save("2")
    run = begin()
    run.load("2")
    assert run.waiting() == {"b"}
    run.save("3")
    assert run.waiting() == {"b"}
    run.save("4")
    assert run.waiting() == set()


def test_a_group_of_which_a_value_is_gone_is_dropped_whole(begin: Any) -> None:
    run = begin()
    run.issue("a", 1)
    run.save("1")
    run.finish("a", 1)
    run.answer("a", 1, 9)  # replaced after the group was finished
    run = begin()
    run.load("1")
    assert set(run.tags()) == {"a"}
    assert run.tags()["a"]["status"] == "running"


def test_a_prompt_that_is_issued_again_replaces_its_earlier_answers(begin: Any) -> None:
    run = begin()
    run.issue("a", 1)
    run.answer("a", 0, 1)
    run.save("1")
    run = begin()
    run.load("1")
    run.clear("a_0_0")  # verl clears the fragments of a prompt and starts it again
    run.tag("a", is_prompt=True, status="pending", global_steps=2)
    run.finish("a", 2)
    run = begin()
    run.load("1")
    assert [run.tokens(f"a_{session}_0") for session in range(2)] == [expected("a", 0, 2), expected("a", 1, 2)]
    assert run.tags()["a"]["global_steps"] == 2


def test_numbers_and_values_are_free_after_the_second_checkpoint(begin: Any) -> None:
    run = begin()
    for step in range(1, 12):
        run.issue(f"p{step}", step)
        run.finish(f"p{step}", step)
        run.train(f"p{step}")
        run.save(str(step))
    assert len({number for number, _ in run.stored_keys()}) <= 3 * (SESSIONS + 1)
    assert run.controller.index_manager.global_index_counter <= 4 * (SESSIONS + 1)
    run = begin()
    run.load("11")
    assert run.stored_keys() == []


def test_groups_of_another_run_stay_away(begin: Any) -> None:
    run = begin()
    run.issue("old", 1)
    run.finish("old", 1)
    run = begin()  # from scratch
    run.save("1")
    run = begin()
    run.load("1")
    assert run.tags() == {}
    assert run.waiting() == set()


def test_a_checkpoint_without_groups_loads(begin: Any) -> None:
    run = begin()
    run.issue("a", 1)
    run.save("1")
    (run.folder / "1" / promote.GROUPS).unlink()
    run.finish("a", 1)
    run = begin()
    run.load("1")
    assert run.tags()["a"]["status"] == "running"


def test_only_verl_and_only_a_folder(tmp_path: Path) -> None:
    def start(**section: Any) -> None:
        backend.initialize(OmegaConf.create({"backend": {"MopdStore": section}}))

    with advises(": give verl, or leave it out"):
        start(store=str(tmp_path), promote="roll")
    with advises("; give a folder as store, or leave promote out"):
        start(store="s3://bucket/store", promote="verl")
    start(store=str(tmp_path))
    with pytest.raises(InputError, match="promote"):
        start(store=str(tmp_path), promote="nemo-rl")
