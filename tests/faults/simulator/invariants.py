"""The invariants of docs/durability.md, each checked under its number."""

from __future__ import annotations

from collections import Counter

from simulator import values
from simulator.model import Deletion, Key, Model, Value, Violation
from simulator.reading import Reader

from mopd_dataplane.records import Snapshot
from mopd_dataplane.store.maintain.deletion_records import prompt_hash
from mopd_dataplane.store.read import snapshot as snapshots

_HASHES = {prompt_hash(values.prompt_of(number)): values.prompt_of(number) for number in range(values.SAMPLES)}
_PROMPTS = {values.sample(number).uid: values.prompt_of(number) for number in range(values.SAMPLES)}


def check(model: Model, reader: Reader) -> None:
    """Compare what a reader sees with the model, and let the model learn it. Raises Violation."""
    try:
        rows, labelled, queue = reader.rows(), reader.labelled(), reader.values()
    except Exception as error:
        raise Violation(f"I1: a reader ended with {error!r}") from error
    check_deletions(model, reader)
    check_rows(model, rows)
    check_row_ids(model, reader)
    for number in range(values.SAMPLES):
        uid = values.sample(number).uid
        if not model.named(uid, values.prompt_of(number), finished=False):
            check_value(model, "label", uid, uid in labelled, "I11")
    for key in range(values.SAMPLES):
        check_value(model, "queue", key, queue.get(key), "I10")
    check_pins(model, reader)
    model.settle()


def check_deletions(model: Model, reader: Reader) -> None:
    """I9: the record of a deletion stays, and so does its end."""
    records = {}
    for record in reader.store.deletions.all():
        prompts = frozenset(_HASHES[prompt] for prompt in record.prompts)
        records[record.name] = Deletion(frozenset(record.uids), prompts, record.finished)
    for name, deletion in model.deletions.items():
        if name not in records or (deletion.is_finished and not records[name].is_finished):
            raise Violation(f"I9: deletion {name} was recorded, and is {'open again' if name in records else 'gone'}")
        if records[name].uids != deletion.uids:
            raise Violation(
                f"I9: deletion {name} names {set(records[name].uids)}, before it named {set(deletion.uids)}"
            )
    model.deletions = records


def check_rows(model: Model, rows: dict[str, list[tuple[Key, Value]]]) -> None:
    """I1 to I5 and I8: rows of every table."""
    for table, pairs in rows.items():
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise Violation(f"I2: {table} has {twice} more than once")
        seen = dict(pairs)
        for key, value in seen.items():
            allowed = model.allowed(table, key)
            if not allowed:
                raise Violation(f"I3: {table} has {key}, which no writer that is alive has committed")
            if value not in allowed:
                number = "I4" if table in ("samples", "scores") else "I3"
                raise Violation(f"{number}: {table} {key} is {value}, committed was {allowed}")
            uid, prompt = about(table, key)
            if model.named(uid, prompt, finished=True) and not model.is_straggler(uid, prompt):
                raise Violation(f"I8: {table} has {key}, which was deleted")
        for key in model.required(table):
            uid, prompt = about(table, key)
            if key not in seen and not model.named(uid, prompt, finished=False):
                number = "I1" if key in model.committed[table] else "I5"
                raise Violation(f"{number}: {table} {key} is gone")
        model.visible[table] = seen


def about(table: str, key: Key) -> tuple[str, str]:
    """The sample and the prompt that a row goes with; empty where there is none."""
    if table == "prompts":
        return "", str(key)
    if table in ("plans", "steps"):
        return "", ""
    uid = str(key if table == "samples" else key[1] if table == "labels" else key[0])  # type: ignore[index]
    return uid, _PROMPTS[uid]


def check_row_ids(model: Model, reader: Reader) -> None:
    """I6: a row id means one sample for ever."""
    for uid, row in reader.row_ids.items():
        if not model.named(uid, _PROMPTS[uid], finished=False) and model.row_ids.setdefault(uid, row) != row:
            raise Violation(f"I6: {uid} was row {model.row_ids[uid]}, now it is row {row}")
    twice = [row for row, count in Counter(model.row_ids.values()).items() if count > 1]
    if twice:
        raise Violation(f"I6: row {twice} meant another sample before")
    for uid, row in reader.sample_rows:
        if model.row_ids.get(uid, row) != row:
            raise Violation(f"I6: {uid} is row {model.row_ids[uid]}, and is named as row {row}")
    reader.sample_rows = []


def check_value(model: Model, register: str, key: Key, value: Value, number: str) -> None:
    """A register has a value that it may have; from then on it has that one."""
    allowed = model.may_have(register, key)
    if value not in allowed:
        raise Violation(f"{number}: {register} {key} is {value!r}, and may be {allowed}")
    model.register(register, key).possible = {value}


def check_pins(model: Model, reader: Reader) -> None:
    """I7: a pinned snapshot shows what it showed, until it is released or a deletion takes one of its rows."""
    tags = set(snapshots.tags(reader.store)) if model.pins or model.doomed else set()
    for tag, pin in list(model.pins.items()):
        takes = {
            name for name, deletion in model.deletions.items()
            if pin.uids & deletion.uids or pin.prompts & deletion.prompts
        }  # fmt: skip
        if takes or pin.deletions & model.deletions.keys():
            del model.pins[tag]
            model.doomed[tag] = model.doomed.get(tag, set()) | takes
        elif tag not in tags:
            raise Violation(f"I7: {tag} was pinned, and is gone")
        else:
            snapshot = Snapshot(uri=reader.store.uri, versions=pin.versions)
            try:
                uids = reader.store.samples(["uid"], snapshot=snapshot)["uid"].to_pylist()
            except Exception as error:
                raise Violation(f"I7: {tag} cannot be read: {error!r}") from error
            if frozenset(uids) != pin.uids:
                raise Violation(f"I7: {tag} showed {set(pin.uids)}, now it shows {set(uids)}")
    _check_doomed(model, tags)


def _check_doomed(model: Model, tags: set[str]) -> None:
    """I8: when the deletions that take a snapshot are finished, and nobody is at work, it is gone."""
    is_calm = not model.stragglers and all(one.ended for one in model.live)
    for tag, names in list(model.doomed.items()):
        records = [model.deletions[name] for name in names if name in model.deletions]
        if tag not in tags:
            del model.doomed[tag]
        elif is_calm and records and all(record.is_finished for record in records):
            raise Violation(f"I8: {tag} still pins rows that were deleted")
