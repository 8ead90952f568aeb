"""The operations of a writer: what each calls, and what the model is told about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simulator import values
from simulator.model import Attempt, Model, Pin, Violation

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.importer import import_rollouts
from mopd_dataplane.run import delete as deleting
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.group_commit.committer import GroupCommitter
from mopd_dataplane.store.group_commit.mailbox import REPLIES, REQUESTS, Mailbox, open_mailbox
from mopd_dataplane.store.group_commit.requests import Reply, Request, decode_reply, decode_request, encode_request
from mopd_dataplane.store.group_commit.writer import error_of
from mopd_dataplane.store.maintain.deletion_records import prompt_hash
from mopd_dataplane.store.queue.committed import CommittedQueue
from mopd_dataplane.store.queue.values import Value

WINDOWS, KEYS, TAGS = 3, 3, 2
LABEL = "odd"


@dataclass
class Writer:
    """A process that has a store open."""

    home: str
    """Folder, or prefix of an object store, with the store and its copies."""
    store: Store
    queue: CommittedQueue
    rows: Path
    """Folder of rows to import."""

    @classmethod
    def open(cls, home: str, rows: Path) -> Writer:
        """A process that has just begun."""
        return cls(home, Store.open(f"{home}/store"), CommittedQueue(f"{home}/store", "q"), rows)


@dataclass
class Operation:
    """An operation that is about to begin."""

    attempt: Attempt
    work: Callable[[], Any]
    told: str = ""
    """Its values, for the trace."""
    done: Callable[[Any], None] = lambda result: None
    """Compares what it returned with the model."""


def operation(name: str, writer: Writer, model: Model, choice: int) -> Operation | None:
    """The operation of a name with the values of a choice; None when there is nothing to do it on."""
    return OPERATIONS[name](writer, model, random.Random(choice))


def _commit(writer: Writer, model: Model, draw: random.Random) -> Operation:
    numbers = sorted(draw.sample(range(values.SAMPLES), draw.randint(1, 4)))
    variant = int(draw.random() < 0.15)
    samples = [values.sample(number, variant) for number in numbers]
    attempt = _of_samples(numbers)
    attempt.rows = [
        ("samples", values.sample(n).uid, (values.prompt_of(n), values.digest_of(n, variant))) for n in numbers
    ]
    unseen = [sample.uid for sample in samples if sample.uid not in model.visible["samples"]]

    def done(receipt: Any) -> None:
        deleted = writer.store.deletions.uids()
        for sample, row in zip(samples, receipt.rows.tolist(), strict=True):
            before = model.row_ids.setdefault(sample.uid, row)
            if before != row and sample.uid not in deleted:
                raise Violation(f"I6: {sample.uid} was row {before}, the receipt says {row}")
        is_alone = attempt.ended == attempt.began + 1 and all(one is attempt or one.ended for one in model.live)
        if is_alone and receipt.inserted != len(unseen):
            raise Violation(f"I14: {receipt.inserted} samples inserted, {len(unseen)} were not there before")

    return Operation(attempt, lambda: writer.store.commit_samples(samples), f"{numbers}/{variant}", done)


def _commit_together(writer: Writer, model: Model, draw: random.Random) -> Operation:
    """Hand samples over, then commit them with those that others have handed over, and died."""
    numbers = sorted(draw.sample(range(values.SAMPLES), draw.randint(1, 4)))
    variant = int(draw.random() < 0.15)
    mailbox = open_mailbox(writer.store.root, writer.store.files)
    samples = [values.sample(number, variant) for number in numbers]
    attempt = _of_samples(numbers)
    attempt.rows = [
        ("samples", values.sample(n).uid, (values.prompt_of(n), values.digest_of(n, variant))) for n in numbers
    ]
    _add_handed_over(attempt, mailbox)
    name = f"{model.moment:08d}"

    def work() -> Reply:
        model.hand_over(attempt)
        mailbox.write(f"{REQUESTS}/{name}", encode_request(Request(writer.store.uuid, samples=tuple(samples))))
        fault_point("group.requested")
        GroupCommitter(writer.store).commit_all()
        content = mailbox.read(f"{REPLIES}/{name}")
        if content is None:
            raise Violation(f"I14: request {name} was taken, and nobody replied to it")
        mailbox.remove([f"{REPLIES}/{name}"])
        reply = decode_reply(content, name)
        if reply.error:
            raise error_of(reply)
        return reply

    def done(reply: Reply) -> None:
        for sample, row in zip(samples, reply.rows, strict=True):
            if row >= 0 and model.row_ids.setdefault(sample.uid, row) != row:
                deleted = writer.store.deletions.uids()
                if sample.uid not in deleted:
                    raise Violation(f"I6: {sample.uid} was row {model.row_ids[sample.uid]}, the reply says {row}")

    return Operation(attempt, work, f"{numbers}/{variant}", done)


def _add_handed_over(attempt: Attempt, mailbox: Mailbox) -> None:
    """The operation will also commit what is in the mailbox."""
    attempt.others = []
    for name in mailbox.children(REQUESTS):
        try:
            request = decode_request(mailbox.read(f"{REQUESTS}/{name}") or b"", name)
        except DamagedError:  # a power cut took a part of it
            continue
        attempt.uids |= {sample.uid for sample in request.samples}
        attempt.prompts |= {sample.prompt_id for sample in request.samples}
        attempt.others += [
            ("samples", sample.uid, (sample.prompt_id, values.digest(sample.tokens))) for sample in request.samples
        ]


def _ask(writer: Writer, model: Model, draw: random.Random) -> Operation:
    numbers = draw.sample(range(values.SAMPLES), 3)
    prompts = values.prompts(numbers)
    attempt = Attempt(prompts={prompt.prompt_id for prompt in prompts})
    attempt.rows = [("prompts", prompt.prompt_id, prompt.text) for prompt in prompts]
    return Operation(attempt, lambda: writer.store.add_prompts(prompts), str(sorted(attempt.prompts)))


def _of_samples(numbers: list[int]) -> Attempt:
    attempt = Attempt()
    attempt.uids = {values.sample(number).uid for number in numbers}
    attempt.prompts = set(map(values.prompt_of, numbers))
    return attempt


def _import(writer: Writer, model: Model, draw: random.Random) -> Operation:
    number = draw.randrange(values.SAMPLES)
    attempt = _of_samples([number])
    uid, prompt = values.sample(number).uid, values.prompt_of(number)
    attempt.rows = [("samples", uid, (prompt, values.digest_of(number))), ("prompts", prompt, f"{prompt}?")]
    settings = ImportSettings(format="plain")
    file = writer.rows / f"{uid}.jsonl"
    return Operation(attempt, lambda: import_rollouts(writer.store, file, settings, values.Letters()), str(number))


def _committed(model: Model, draw: random.Random, most: int) -> list[int]:
    """Some samples that are there and that no deletion names, by number."""
    numbers = [
        number for number in range(values.SAMPLES)
        if values.sample(number).uid in model.row_ids and values.sample(number).uid in model.committed["samples"]
    ]  # fmt: skip
    return sorted(draw.sample(numbers, min(len(numbers), draw.randint(1, most))))


def _score(writer: Writer, model: Model, draw: random.Random) -> Operation | None:
    kind = draw.choice(values.KINDS)
    if not (numbers := _committed(model, draw, 3)):
        return None
    rows = {number: model.row_ids[values.sample(number).uid] for number in numbers}
    signals = [replace(values.signal(number, kind), sample_row=row) for number, row in rows.items()]
    attempt = _of_samples(numbers)
    attempt.rows = [("scores", (values.sample(n).uid, kind), values.digest_of_signal(n, kind)) for n in numbers]
    return Operation(
        attempt, lambda: writer.store.commit_signals(values.TEACHER, kind, signals), f"{kind} of {numbers}"
    )


def _reward(writer: Writer, model: Model, draw: random.Random) -> Operation | None:
    if not (numbers := _committed(model, draw, 3)):
        return None
    attempt = _of_samples(numbers)
    attempt.rows = [("rewards", (values.sample(n).uid, "exact"), float(n)) for n in numbers]
    records = [
        {"uid": values.sample(n).uid, "sample_row": model.row_ids[values.sample(n).uid], "verifier": "exact",
         "verifier_version": "1", "reward": float(n)}
        for n in numbers
    ]  # fmt: skip
    return Operation(attempt, lambda: writer.store.add_rewards(records), str(numbers))


def _label(writer: Writer, model: Model, draw: random.Random) -> Operation | None:
    if not (numbers := _committed(model, draw, 1)):
        return None
    uid, is_removed = values.sample(numbers[0]).uid, draw.random() < 0.4
    attempt = _of_samples(numbers)
    name = f"label-{model.moment}"
    attempt.rows = [("labels", (name, uid), is_removed)]
    attempt.values = [("label", uid, not is_removed)]
    row = {"label_id": name, "uid": uid, "label": LABEL, "note": "", "author": "me", "removed": is_removed}
    return Operation(attempt, lambda: writer.store.add_labels([row]), f"{numbers[0]} {'off' if is_removed else 'on'}")


def _plan(writer: Writer, model: Model, draw: random.Random) -> Operation | None:
    window, seed = draw.randrange(WINDOWS), draw.randrange(2)
    if not (rows := sorted(model.row_ids[str(uid)] for uid in model.committed["samples"] if uid in model.row_ids)):
        return None
    plan = values.plan(window, seed, rows)
    attempt = Attempt(rows=[("plans", (values.STAGE, window), plan.digest)])

    def done(result: None) -> None:
        if plan.digest not in (recorded := model.committed["plans"][values.STAGE, window]):
            raise Violation(f"I4: window {window} was recorded as {recorded}, and a plan {plan.digest} was accepted")

    return Operation(attempt, lambda: writer.store.add_plan(plan), f"window {window}, seed {seed}", done)


def _train(writer: Writer, model: Model, draw: random.Random) -> Operation | None:
    plans = model.committed["plans"]
    if not plans:
        return None
    [(_, window), digests] = draw.choice(sorted(plans.items(), key=str))  # type: ignore[misc]
    number = draw.randrange(6)
    step = values.step(window, min(digests), number)  # type: ignore[type-var]
    attempt = Attempt(rows=[("steps", (values.STAGE, number), (window, step.loss))])
    return Operation(attempt, lambda: writer.store.add_steps([step]), f"step {number} of window {window}")


def _delete(writer: Writer, model: Model, draw: random.Random) -> Operation:
    number = draw.randrange(values.SAMPLES)
    uid, prompt = values.sample(number).uid, values.prompt_of(number)
    where = draw.choice((f"uid = '{uid}'", f"prompt_id = '{prompt}'"))
    attempt = Attempt()

    def work() -> None:
        unfinished = [one for one in writer.store.deletions.unfinished() if one.where == where]
        if unfinished:
            _add_handed_over(attempt, open_mailbox(writer.store.root, writer.store.files))
            for deletion in unfinished:
                list(deleting.resume(writer.store, deletion))
            return
        chosen, _ = deleting.preview(writer.store, where)
        attempt.deletes = frozenset(chosen.uids), frozenset(map(prompt_hash, chosen.prompts))
        _add_handed_over(attempt, open_mailbox(writer.store.root, writer.store.files))
        list(deleting.delete(writer.store, chosen, where))

    def done(result: None) -> None:
        finished = [deletion for deletion in writer.store.deletions.all() if deletion.finished]
        model.closed |= {deletion.name for deletion in finished}
        gone = {uid for deletion in finished for uid in deletion.uids}
        if attempt.deletes is not None and not attempt.deletes[0] <= gone:
            raise Violation(f"I9: no record says that the deletion where {where} is finished")

    return Operation(attempt, work, where, done)


def _repair(writer: Writer, model: Model, draw: random.Random) -> Operation:
    return Operation(Attempt(), lambda: list(deleting.repair(writer.store)))


def _compact(now: bool) -> Callable[[Writer, Model, random.Random], Operation]:
    return lambda writer, model, draw: Operation(Attempt(), lambda: writer.store.compact(now=now))


def _tag(writer: Writer, model: Model, draw: random.Random) -> Operation:
    tag = f"tag-{draw.randrange(TAGS)}"
    required = {uid for uid in model.committed["samples"] if not model.named(str(uid), "", finished=False)}

    def done(snapshot: Any) -> None:
        pin = model.pins.get(tag)
        if pin is not None and snapshot.versions != pin.versions:
            raise Violation(f"I7: {tag} pinned {pin.versions}, now it is {snapshot.versions}")
        if pin is None:
            uids = frozenset(writer.store.samples(["uid"], snapshot=snapshot)["uid"].to_pylist())
            prompts = frozenset(
                writer.store.table("prompts", ["prompt_id"], snapshot=snapshot)["prompt_id"].to_pylist()
            )
            records = writer.store.deletions.all()
            is_calm = not model.stragglers and all(one.ended for one in model.live)
            deletions = frozenset(record.name for record in records if not (record.finished and is_calm))
            model.pins[tag] = Pin(dict(snapshot.versions), uids, prompts, deletions)
            missing = [uid for uid in required - uids if not model.named(str(uid), "", finished=False)]
            is_shared = tag in model.doomed or any(tag in (one.releases, one.tag) for one in model.live[:-1])
            if missing and not is_shared:
                raise Violation(f"I7: {tag} lacks {missing}, which were acknowledged before it")

    return Operation(Attempt(tag=tag), lambda: writer.store.snapshot(tag), tag, done)


def _release(writer: Writer, model: Model, draw: random.Random) -> Operation | None:
    tag = f"tag-{draw.randrange(TAGS)}"
    if model.pins.pop(tag, None) is None:
        return None
    return Operation(Attempt(releases=tag), lambda: writer.store.release(tag), tag)


def _put(writer: Writer, model: Model, draw: random.Random) -> Operation:
    keys = sorted(draw.sample(range(KEYS), draw.randint(1, 2)))
    text = f"v{model.moment}"
    attempt = Attempt(values=[("queue", key, text) for key in keys])
    puts = [Value("msgpack", text.encode())] * len(keys)
    return Operation(attempt, lambda: writer.queue.put([(key, "f") for key in keys], puts), f"{keys} = {text}")


def _clear(writer: Writer, model: Model, draw: random.Random) -> Operation:
    key = draw.randrange(KEYS)
    attempt = Attempt(values=[("queue", key, None)])
    return Operation(attempt, lambda: writer.queue.clear([(key, "f")]), str(key))


def _verify(writer: Writer, model: Model, draw: random.Random) -> Operation:
    return Operation(Attempt(), lambda: writer.store.verify(deep=draw.random() < 0.5))


OPERATIONS: dict[str, Callable[[Writer, Model, random.Random], Operation | None]] = {
    "ask": _ask, "commit": _commit, "commit together": _commit_together, "import": _import, "score": _score,
    "reward": _reward, "label": _label, "plan": _plan, "train": _train, "delete": _delete, "repair": _repair,
    "compact": _compact(False), "compact now": _compact(True), "tag": _tag, "release": _release, "put": _put,
    "clear": _clear, "verify": _verify,
}  # fmt: skip
