"""Events that share a commit."""

from pathlib import Path

import pytest

from mopd_dataplane.run.event_batch import TOGETHER_S, EventBatch
from mopd_dataplane.store.dataset import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def names(store: Store) -> list[str]:
    return store.table("events", ["event_id"])["event_id"].to_pylist()


def versions(store: Store) -> int:
    return store.dataset("events").version


def add(events: EventBatch, name: str) -> None:
    events.add(name, "student", "stage_time", 0, 1.0, {"action": name})


def interrupted(events: EventBatch, error: BaseException) -> None:
    """An iteration that ends with an error while an event waits."""
    with events.iteration():
        add(events, "first")
        add(events, "second")
        raise error


def test_events_of_an_iteration_share_a_commit(store: Store) -> None:
    events = EventBatch(store)
    before = versions(store)
    with events.iteration():
        add(events, "first")  # no event was committed just before
        assert names(store) == ["first"]
        for name in ("second", "third", "fourth"):
            add(events, name)
        assert names(store) == ["first"]
    assert names(store) == ["first", "second", "third", "fourth"]
    assert versions(store) == before + 2


def test_events_of_a_long_iteration_are_committed_as_they_come(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("mopd_dataplane.run.event_batch.time.monotonic", lambda: now)
    events = EventBatch(store)
    with events.iteration():
        for number in range(3):
            now += TOGETHER_S + 1
            add(events, f"time/{number}")
            assert len(names(store)) == number + 1


def test_an_event_outside_an_iteration_is_committed_at_once(store: Store) -> None:
    events = EventBatch(store)
    for number in range(2):
        add(events, f"time/{number}")
        assert len(names(store)) == number + 1


def test_events_that_wait_are_committed_when_the_iteration_fails(store: Store) -> None:
    events = EventBatch(store)
    with pytest.raises(KeyboardInterrupt):
        interrupted(events, KeyboardInterrupt())
    assert names(store) == ["first", "second"]
    add(events, "after")
    assert names(store) == ["first", "second", "after"]


def test_the_error_of_the_iteration_is_reported_if_the_commit_fails_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = EventBatch(store)
    monkeypatch.setattr(store, "add_events", lambda rows: 1 / (len(rows) == 1 and rows[0]["event_id"] == "first"))
    with pytest.raises(ValueError, match="the iteration"):
        interrupted(events, ValueError("the iteration"))
