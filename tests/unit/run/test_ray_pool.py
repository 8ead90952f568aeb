"""Workers on Ray that fail before their first task: what the pool makes of each error, without a cluster."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from mopd_dataplane.errors import EngineError, InputError
from mopd_dataplane.run.ray import pool

ray = pytest.importorskip("ray")
from ray.exceptions import ActorDiedError, RayTaskError  # noqa: E402


@pytest.fixture
def group() -> pool.Group:
    return pool.Group("trial", object, (), {"num_cpus": 0}, 1, deque([pool.Task(())]))


def settle(group: pool.Group, answer: Any, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> bool:
    """Let the pool settle the call of `ready` of a new worker, which answers or raises this."""

    def get(reference: object, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    return pool._settle(object(), pool._Call(group, object(), None), lambda *done: None, said.append)


def test_an_error_of_opening_ends_the_run_as_itself(group: pool.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RayTaskError("ready", "Traceback\nInputError: no such folder", InputError("no such folder: say another"))
    with pytest.raises(InputError, match="no such folder: say another"):
        settle(group, error, monkeypatch, [])


def test_a_worker_that_cannot_be_made_ends_the_run(group: pool.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Traceback\nModuleNotFoundError: No module named 'mopd_dataplane'"
    error = ActorDiedError(RayTaskError("__init__", text, ModuleNotFoundError("mopd_dataplane")))
    with pytest.raises(EngineError, match=r"of trial cannot start \(.*No module named 'mopd_dataplane'\); every node"):
        settle(group, error, monkeypatch, [])


def test_workers_that_die_before_they_are_ready_are_replaced_so_often(
    group: pool.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(pool, "DEATHS", 3)
    for _ in range(2):
        assert not settle(group, ActorDiedError(), monkeypatch, said)
    assert settle(group, True, monkeypatch, said), "one that is ready ends the series"
    for _ in range(2):
        assert not settle(group, ActorDiedError(), monkeypatch, said)
    with pytest.raises(EngineError, match="3 workers of trial died before they were ready"):
        settle(group, ActorDiedError(), monkeypatch, said)
    assert len(said) == 5
