"""Copies and upgrades into folders beside the store, each compared with what its source had meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
from simulator import values
from simulator.invariants import about
from simulator.model import Attempt, Key, Model, Value, Violation
from simulator.operations import Operation, Writer
from simulator.reading import Reader

from mopd_dataplane.errors import MopdError
from mopd_dataplane.run import delete as deleting
from mopd_dataplane.run.fork import fork
from mopd_dataplane.run.upgrade import upgrade_store
from mopd_dataplane.run.whole_copy import copy_whole
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.copy_samples import copy_samples

TARGETS = 2
WHERE = "domain = 'math'"
_PARTIAL = ("samples", "scores", "rewards", "labels")
"""Tables that are compared with a copy of some samples."""
_OLD = ("prompts", "samples", "tokens", "rewards", "scores", "steps")


CALM = ("compact a fork", "delete from a fork")
"""Operations that nothing befalls: the model follows a fork only where it is whole."""


def operation(name: str, writer: Writer, model: Model, choice: int, template: Path) -> Operation | None:
    """The copy or upgrade of a name."""
    return OPERATIONS[name](writer, model, random.Random(choice), template)


def _copy(writer: Writer, model: Model, draw: random.Random, template: Path) -> Operation:
    target = f"{writer.home}/copy-{draw.randrange(TARGETS)}"
    return _compared(model, target, lambda: list(copy_whole(writer.store, target)))


def _copy_where(writer: Writer, model: Model, draw: random.Random, template: Path) -> Operation:
    target = f"{writer.home}/copy-{draw.randrange(TARGETS)}"
    math = {values.sample(number).uid for number in range(values.SAMPLES) if values.sample(number).domain == "math"}
    return _compared(model, target, lambda: list(copy_samples(writer.store, target, WHERE)), math)


def _compared(model: Model, target: str, work: Callable[[], Any], uids: set[str] | None = None) -> Operation:
    """A copy, of these samples or of everything, which is compared once it is done."""
    before = {table: {key: model.allowed(table, key) for key in model.required(table)} for table in model.visible}
    name = target.rpartition("/")[2]

    def done(result: Any) -> None:
        if not _opens(target):
            raise Violation(f"I12: {name} is done, and opens as no store")
        if name not in model.copies:
            compare(model, target, before, uids)

    return Operation(Attempt(target=name), work, name, done)


def _upgrade(writer: Writer, model: Model, draw: random.Random, template: Path) -> Operation:
    target, old = f"{writer.home}/upgraded", template / "old"

    def done(result: Any) -> None:
        for table in _OLD:
            counts = [lance.dataset(f"{folder}/{table}").count_rows() for folder in (old, target)]
            if counts[0] != counts[1]:
                raise Violation(f"I12: {table} had {counts[0]} rows, upgraded it has {counts[1]}")
        model.copies.add("upgraded")

    return Operation(Attempt(target="upgraded"), lambda: list(upgrade_store(old, target)), "upgraded", done)


def _opens(uri: str) -> bool:
    """Whether a location opens as a store."""
    try:
        return Store.find(uri) is not None
    except MopdError:
        return False


def check_targets(model: Model, home: str) -> None:
    """I12: a target that nobody finished opens as no store; one that was finished stays as it was."""
    for name in (f"{kind}-{number}" for kind in ("copy", "fork") for number in range(TARGETS)):
        is_busy = any(attempt.target == name and not attempt.ended for attempt in model.live)
        if name in model.copies:
            rows = {table: dict(pairs) for table, pairs in Reader(f"{home}/{name}").rows().items()}
            if rows != model.copied[name]:
                raise Violation(f"I12: the copy {name} has changed since it was complete")
        elif not is_busy and _opens(f"{home}/{name}"):
            raise Violation(f"I12: {name} opens as a store, and no copy to it is done")


def compare(model: Model, target: str, before: dict[str, dict[Key, set[Value]]], uids: set[str] | None) -> None:
    """I12: a copy has what its source had from its beginning on, nothing else, and nothing that was deleted."""
    name = target.rpartition("/")[2]
    rows = {table: dict(pairs) for table, pairs in Reader(target).rows().items()}
    for table in rows if uids is None else _PARTIAL:
        for key, value in rows[table].items():
            uid, prompt = about(table, key)
            allowed = before[table].get(key, set()) | model.allowed(table, key)
            if value not in allowed or (uids is not None and uid not in uids):
                raise Violation(f"I12: {name} has {table} {key} {value}, and may have {allowed}")
            if model.named(uid, prompt, finished=True) and not model.is_straggler(uid, prompt):
                raise Violation(f"I12: {name} has {table} {key}, which was deleted")
        for key in before[table]:
            uid, prompt = about(table, key)
            is_copied = uids is None or uid in uids
            if key not in rows[table] and is_copied and not model.named(uid, prompt, finished=False):
                raise Violation(f"I12: {name} lacks {table} {key}, which its source had before")
    model.copies.add(name)
    model.copied[name] = rows


def _fork(writer: Writer, model: Model, draw: random.Random, template: Path) -> Operation:
    """A fork behind everything that the store has."""
    target = f"{writer.home}/fork-{draw.randrange(TARGETS)}"
    return _compared(model, target, lambda: fork(writer.store, target, f"{values.LATER}@0"))


def _compact_fork(writer: Writer, model: Model, draw: random.Random, template: Path) -> Operation | None:
    if not (forks := forks_of(model)):
        return None
    name = draw.choice(forks)
    return Operation(Attempt(), lambda: Store.open(f"{writer.home}/{name}").compact(now=True), name)


def _delete_from_fork(writer: Writer, model: Model, draw: random.Random, template: Path) -> Operation | None:
    """A deletion from a fork, which the store that it was forked from must not notice."""
    numbers = {values.sample(number).uid: number for number in range(values.SAMPLES)}
    present = [(name, str(uid)) for name in forks_of(model) for uid in sorted(map(str, model.copied[name]["samples"]))]
    if not present:
        return None
    name, uid = draw.choice(present)
    prompt = values.prompt_of(numbers[uid])

    def work() -> None:
        store = Store.open(f"{writer.home}/{name}")
        chosen, _ = deleting.preview(store, f"uid = '{uid}'")
        list(deleting.delete(store, chosen, f"uid = '{uid}'"))

    def done(result: None) -> None:
        rows = model.copied[name]
        is_last = not any(values.prompt_of(numbers[str(other)]) == prompt for other in rows["samples"] if other != uid)
        for table, pairs in rows.items():
            gone = [
                key for key in pairs if about(table, key)[0] == uid or (is_last and (table, key) == ("prompts", prompt))
            ]
            for key in gone:
                del pairs[key]

    return Operation(Attempt(), work, f"{uid} of {name}", done)


def forks_of(model: Model) -> list[str]:
    """Forks that are complete."""
    return sorted(name for name in model.copies if name.startswith("fork"))


OPERATIONS: dict[str, Callable[[Writer, Model, random.Random, Path], Operation | None]] = {
    "copy": _copy, "copy where": _copy_where, "upgrade": _upgrade, "fork": _fork, "compact a fork": _compact_fork,
    "delete from a fork": _delete_from_fork,
}  # fmt: skip
