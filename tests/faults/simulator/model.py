"""What a store must have, may have and must not have, in dicts and sets.

A writer's operation is an attempt. While it runs, or is suspended, each of its rows may become visible at any moment.
Once it returned, its rows must be there for good. Once it died or failed, what the next reader sees of it stays, and
the rest never appears.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

Key = Hashable
Value = Hashable
TABLES = ("prompts", "samples", "scores", "rewards", "labels", "plans", "steps")
"""Tables of the model; a row is a key and a value."""
REGISTERS = ("queue", "label")
"""What has one value at a time: a key of the queue, and whether a sample bears a label."""


class Violation(AssertionError):
    """An invariant that does not hold; the text begins with its number."""


@dataclass(eq=False)
class Attempt:
    """What one operation may do to the store."""

    rows: list[tuple[str, Key, Value]] = field(default_factory=list)
    others: list[tuple[str, Key, Value]] | None = None
    """Rows that others handed over, which it may commit too; None where it commits its own alone."""
    values: list[tuple[str, Key, Value]] = field(default_factory=list)
    """(register, key, value)"""
    uids: set[str] = field(default_factory=set)
    """Samples that its rows are about."""
    prompts: set[str] = field(default_factory=set)
    deletes: tuple[frozenset[str], frozenset[str]] | None = None
    """(uids, prompts) of a deletion that is under way."""
    tag: str = ""
    releases: str = ""
    target: str = ""
    """Folder that a copy or an upgrade writes."""
    deletions: frozenset[str] = frozenset()
    """Records of deletions that were there when it began."""
    began: int = 0
    ended: int = 0
    """Moments of the model; 0 while it goes on."""

    def values_of(self, name: str, key: Key) -> set[Value]:
        """Values that it gives a key of a register."""
        return {value for register, k, value in self.values if (register, k) == (name, key)}


@dataclass
class Register:
    """What a key may have now, and what it may come back to after a power loss."""

    possible: set[Value]
    durable: set[Value]
    acknowledged: int = 0
    """Moment of the last acknowledgement."""


@dataclass
class Deletion:
    """A record of a deletion that was seen."""

    uids: frozenset[str]
    prompts: frozenset[str]
    is_finished: bool


@dataclass
class Pin:
    """What a snapshot showed when it was taken."""

    versions: dict[str, int]
    uids: frozenset[str]
    prompts: frozenset[str]
    deletions: frozenset[str]
    """Records of deletions some of whose rows it may pin: they go on, or a writer died beside them."""


class Model:
    """The store as its promises describe it."""

    def __init__(self) -> None:
        self.committed: dict[str, dict[Key, set[Value]]] = {name: {} for name in TABLES}
        """Rows that were acknowledged, with the values that each may have."""
        self.visible: dict[str, dict[Key, Value]] = {name: {} for name in TABLES}
        """Rows as the last reader saw them."""
        self.registers: dict[tuple[str, Key], Register] = {}
        self.live: list[Attempt] = []
        """Attempts that run, are suspended, or ended since the last check."""
        self.stragglers: list[Attempt] = []
        """Attempts that died or failed since the last repair: what they left of a deleted sample, repair removes."""
        self.failed: list[Attempt] = []
        """All attempts that died or failed: what they put may have become the last value of a key."""
        self.committers: list[Attempt] = []
        """All attempts that ended and committed for others: a disk that failed them is the error of others, too."""
        self.deletions: dict[str, Deletion] = {}
        self.closed: set[str] = set()
        """Records whose end was acknowledged."""
        self.pins: dict[str, Pin] = {}
        self.doomed: dict[str, set[str]] = {}
        """Tags that are there still and that a deletion may take, and the records of those that certainly do."""
        self.row_ids: dict[str, int] = {}
        self.begun: set[str] = set()
        """Targets that a copy or an upgrade began."""
        self.copies: set[str] = set()
        """Targets that are complete."""
        self.copied: dict[str, dict[str, dict[Key, Value]]] = {}
        """Rows that each copy had when it was complete."""
        self.moment = 0

    # -- attempts --------------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        """An operation begins."""
        self.moment += 1
        attempt.began = self.moment
        attempt.deletions = frozenset(self.deletions)
        self.live.append(attempt)
        self.begun |= {attempt.target} - {""}

    def hand_over(self, attempt: Attempt) -> None:
        """An operation hands over its rows: everybody who commits for others may commit them from now on."""
        for one in self.live:
            if one.others is not None and one is not attempt:
                one.others += attempt.rows
                one.uids |= attempt.uids
                one.prompts |= attempt.prompts

    def succeed(self, attempt: Attempt) -> None:
        """An operation returned: what it wrote is durable."""
        self._end(attempt)
        for table, key, value in attempt.rows:
            committed = self.committed[table]
            if key in self.visible[table]:
                committed.setdefault(key, {self.visible[table][key]})
            elif key not in committed:
                committed[key] = {value, *self._attempted(table, key)}
        for name, key, value in attempt.values:
            register = self.register(name, key)
            others = {other for one in self.live if one is not attempt for other in one.values_of(name, key)}
            overlapping = (one for one in self.failed if one.ended > attempt.began)
            others |= {other for one in overlapping for other in one.values_of(name, key)}
            if register.acknowledged > attempt.began:  # another one came in between, and may be the later
                others |= register.possible
            register.possible = register.durable = {value} | others
            register.acknowledged = self.moment

    def fail(self, attempt: Attempt) -> None:
        """An operation died, or ended with an error: what it wrote may be there or not."""
        self._end(attempt)
        self.stragglers.append(attempt)
        self.failed.append(attempt)
        for name, key, value in attempt.values:
            self.register(name, key).possible |= {value}

    def refuse(self, attempt: Attempt) -> None:
        """An operation was refused before it wrote anything."""
        self._end(attempt)
        self.live.remove(attempt)

    def _end(self, attempt: Attempt) -> None:
        self.moment += 1
        attempt.ended = self.moment
        if attempt.others is not None:
            self.committers.append(attempt)

    def settle(self) -> None:
        """A reader has looked: attempts that ended have done what they ever will."""
        self.live = [attempt for attempt in self.live if not attempt.ended]

    def lose_power(self) -> None:
        """Every writer is dead; what was visible and not acknowledged may be gone."""
        for attempt in self.live:
            attempt.ended = attempt.ended or self.moment
            if attempt not in self.stragglers:
                self.stragglers.append(attempt)
        for name, rows in self.visible.items():
            unsure = [(name, key, value) for key, value in rows.items() if key not in self.committed[name]]
            if unsure:
                self.live.append(Attempt(rows=unsure, ended=self.moment))
            self.visible[name] = {key: value for key, value in rows.items() if key in self.committed[name]}
        self.row_ids = {uid: row for uid, row in self.row_ids.items() if uid in self.committed["samples"]}
        self.deletions = {name: record for name, record in self.deletions.items() if name in self.closed}
        for register in self.registers.values():
            register.possible |= register.durable
        for attempt in self.live:
            for register_name, key, value in attempt.values:
                self.register(register_name, key).possible |= {value}

    # -- questions -------------------------------------------------------------------------------------------------

    def register(self, name: str, key: Key) -> Register:
        """The register of a key; at first it has no value."""
        empty: Value = False if name == "label" else None
        return self.registers.setdefault((name, key), Register({empty}, {empty}))

    def may_have(self, name: str, key: Key) -> set[Value]:
        """Values that a reader may see now."""
        pending = {value for attempt in self.live for value in attempt.values_of(name, key)}
        return self.register(name, key).possible | pending

    def _attempted(self, table: str, key: Key) -> set[Value]:
        rows = (row for attempt in self.live for row in (*attempt.rows, *(attempt.others or ())))
        return {v for name, k, v in rows if (name, k) == (table, key)}

    def allowed(self, table: str, key: Key) -> set[Value]:
        """Values that a reader may see of a row; empty when nobody wrote it."""
        if key in self.visible[table]:
            return {self.visible[table][key]}
        if key in self.committed[table]:
            return self.committed[table][key]
        return self._attempted(table, key)

    def required(self, table: str) -> set[Key]:
        """Rows that a reader must see, unless a deletion names their sample."""
        return {*self.committed[table], *self.visible[table]}

    def named(self, uid: str, prompt: str, *, finished: bool) -> bool:
        """Whether a deletion, or a finished one, names a sample or its prompt."""
        return any(
            (uid in deletion.uids or prompt in deletion.prompts) and (deletion.is_finished or not finished)
            for deletion in self.deletions.values()
        )

    def is_straggler(self, uid: str, prompt: str) -> bool:
        """Whether a writer that is suspended, or ended in the middle, may have left a row of this sample."""
        return any(
            uid in attempt.uids or prompt in attempt.prompts
            for attempt in (*self.stragglers, *(one for one in self.live if not one.ended))
        )
