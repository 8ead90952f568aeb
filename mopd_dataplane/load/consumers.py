"""Assignment of packs to trainers.

A *consumer group* is one data-parallel rank: the packs that it will request, in order. Its *consumers* are trainer
processes: one, or several where the ranks of a tensor- or context-parallel group read the same packs.

    planned ──fill──▶ ready ──claim by every consumer──▶ lent ──release by every consumer──▶ (slot free)

One answer lends the pack that a trainer requests and also small packs that are ready, because messages and wake-ups
would cost more than small packs do. So a trainer holds either one pack or a small part of the ring, and a ring that
holds the largest pack of each rank stays large enough.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from mopd_dataplane.errors import MopdError
from mopd_dataplane.load.prefetch_depth import REMEMBERED, PrefetchDepth
from mopd_dataplane.load.protocol import MAX_FDS
from mopd_dataplane.load.ring import Lent, Ring, Slot
from mopd_dataplane.load.slot_layout import Field
from mopd_dataplane.load.source import WindowSource

LENT_BYTES = 4 << 20
"""Upper bound of the slot bytes lent in one answer, if it lends more than one pack."""
LENT_SHARE = 1 / 16
"""Largest share of the ring that may be lent in one answer, over all trainers."""
TRIM_PACKS = 2 * REMEMBERED
"""Number of packs lent between two trims of the ring, each of which frees the slots that nobody used since the last."""


@dataclass(eq=False, slots=True)
class Item:
    """One pack that one group will read, from planning to release."""

    prefetch: PrefetchDepth
    """Prefetch depth of the group."""
    source: WindowSource
    step: int
    ordinal: int
    pack: int
    waiting: set[int]
    """Ids of the consumers that have not claimed the pack."""
    fields: tuple[Field, ...]
    nbytes: int
    """Bytes of the slot that the pack needs."""
    list_bytes: int
    """Bytes of the pack without its hidden states: about the memory that its payload takes once it is read."""
    slot: Slot | None = None
    since: float = 0.0
    """Time at which the item got its slot, in seconds of the monotonic clock."""
    ready: bool = False
    is_requested: bool = False
    """True while a trainer is blocked on the pack."""
    starved: bool = False
    """True while a trainer waits for the pack and trainers hold every slot."""
    holders: set[int] = field(default_factory=set)
    error: MopdError | None = None

    @property
    def position(self) -> tuple[int, int, int]:
        """Sort key in order of use: (window, step, ordinal)."""
        return self.source.plan.window, self.step, self.ordinal


@dataclass(eq=False, slots=True)
class ConsumerGroup:
    """Packs for one data-parallel rank. items: packs that some of its consumers have not claimed yet, in order."""

    rank: int
    ranks: int
    members: int
    prefetch: PrefetchDepth
    consumers: set[int] = field(default_factory=set)
    items: deque[Item] = field(default_factory=deque)
    source: WindowSource | None = None
    """Window that `next_step` belongs to."""
    next_step: int = 0
    """First step for which no items were made yet."""

    def ready_from(self, start: tuple[int, int, int], consumer: int, most_bytes: int) -> list[Item]:
        """Return the ready items of a step from position `start` on that this consumer has not claimed.

        The items are consecutive, and their slots take at most `most_bytes`.
        """
        left = most_bytes
        items: list[Item] = []
        for item in self.items:
            if item.position < start:
                continue
            following = (*start[:2], start[2] + len(items))
            if item.slot is None or not item.ready or item.position != following or consumer not in item.waiting:
                break
            left -= item.slot.capacity
            if left < 0:
                break
            items.append(item)
        return items


@dataclass(eq=False, slots=True)
class Consumer:
    """One trainer process. step: the step of its next batch."""

    id: int
    group: ConsumerGroup
    source: WindowSource | None = None
    step: int = 0
    items_held: dict[int, Item] = field(default_factory=dict)
    """Slot id → item whose slot this process reads."""


def refusal(groups: Iterable[ConsumerGroup], rank: int, ranks: int, members: int) -> str:
    """Return why a trainer cannot join these groups now, or an empty string if it can."""
    for group in groups:
        if group.ranks != ranks:
            return f"a trainer says that there are {ranks} ranks, and the trainers before it said {group.ranks}"
        if group.rank == rank and (group.members != members or len(group.consumers) == members):
            return (
                f"rank {rank} is taken: {len(group.consumers)} of {group.members} trainers of this rank are connected"
            )
    return ""


class Lending:
    """Lends slots of a ring. Not thread-safe: the caller holds its lock."""

    def __init__(self, ring: Ring, *, poison: bool) -> None:
        """Lend from this ring. poison: slots are overwritten to expose late readers, so each is lent and released
        alone."""
        self._ring = ring
        self._poison = poison
        self._packs = 0
        """Number of packs lent to the first of their consumers."""

    def asked_for(self, item: Item, consumer: Consumer, groups: Collection[ConsumerGroup]) -> Lent:
        """Lend a requested item that is ready, and the ready items after it in its step that fit in the answer."""
        assert item.slot is not None
        window, step, ordinal = item.position
        left = self._most_bytes(groups) - item.slot.capacity
        return self._lend([item, *consumer.group.ready_from((window, step, ordinal + 1), consumer.id, left)], consumer)

    def first_of(self, consumer: Consumer, step: tuple[int, int], groups: Collection[ConsumerGroup]) -> Lent:
        """Lend the first packs of a step (window, number) that are ready and small. The list may be empty."""
        return self._lend(consumer.group.ready_from((*step, 0), consumer.id, self._most_bytes(groups)), consumer)

    def _most_bytes(self, groups: Collection[ConsumerGroup]) -> int:
        if self._poison:
            return 0
        consumers = sum(len(group.consumers) for group in groups)
        return min(LENT_BYTES, int(self._ring.max_bytes * LENT_SHARE) // consumers)

    def _lend(self, items: Sequence[Item], consumer: Consumer) -> Lent:
        """Lend ready items. Returns (ordinal, slot) of as many as have their file descriptors in one message."""
        group, lent, first_read = consumer.group, [], 0
        for item in items[:MAX_FDS]:
            assert item.slot is not None
            item.is_requested = False
            first_read += len(item.waiting) == group.members
            item.waiting.discard(consumer.id)
            item.holders.add(consumer.id)
            consumer.items_held[item.slot.id] = item
            if not item.waiting:
                group.items.remove(item)
            lent.append((item.ordinal, item.slot))
        if first_read:
            group.prefetch.lent(time.monotonic())
            self._packs += first_read
            if self._packs % TRIM_PACKS < first_read:  # trim now and then, to free unused slots
                self._ring.trim()
        return lent
