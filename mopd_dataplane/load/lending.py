"""Which packs go to a trainer with one answer: the one it asks for, and small ones that are ready.

Messages and wake-ups would cost more than small packs do. A trainer so holds a small part of the ring at most, or one
pack: a ring that holds the largest pack of each rank stays large enough.
"""

import time
from collections.abc import Collection, Sequence

from mopd_dataplane.load.consumers import Consumer, ConsumerGroup, Item
from mopd_dataplane.load.prefetch_depth import REMEMBERED
from mopd_dataplane.load.protocol import MAX_FDS
from mopd_dataplane.load.ring import Lent, Ring

LENT_BYTES = 4 << 20
"""Most slot bytes lent in one answer where it is more than one pack."""
LENT_SHARE = 1 / 16
"""Largest share of the ring that may be lent in one answer, over all trainers."""
TRIM_PACKS = 2 * REMEMBERED
"""Packs lent between two looks whether the ring has slots that nobody used meanwhile."""

Groups = Collection[ConsumerGroup]


class Lending:
    """Lends slots of a ring. Not thread-safe: the caller holds its lock."""

    def __init__(self, ring: Ring, *, poison: bool) -> None:
        """poison: slots are for finding late readers, so each is lent, and given back, alone."""
        self._ring = ring
        self._poison = poison
        self._packs = 0
        """Packs that the first of their readers has."""

    def asked_for(self, item: Item, consumer: Consumer, groups: Groups) -> Lent:
        """A ready item, and those after it in its step that may go with it."""
        assert item.slot is not None
        window, step, ordinal = item.place
        left = self._most_bytes(groups) - item.slot.capacity
        return self._lend([item, *consumer.group.ready_from((window, step, ordinal + 1), consumer.id, left)], consumer)

    def first_of(self, consumer: Consumer, step: tuple[int, int], groups: Groups) -> Lent:
        """The first packs of a step (window, number) that are ready and small; may be none."""
        return self._lend(consumer.group.ready_from((*step, 0), consumer.id, self._most_bytes(groups)), consumer)

    def _most_bytes(self, groups: Groups) -> int:
        if self._poison:
            return 0
        consumers = sum(len(group.consumers) for group in groups)
        return min(LENT_BYTES, int(self._ring.max_bytes * LENT_SHARE) // consumers)

    def _lend(self, items: Sequence[Item], consumer: Consumer) -> Lent:
        """(ordinal, slot) of ready items, as many as have their descriptors in one message."""
        group, lent, first_read = consumer.group, [], 0
        for item in items[:MAX_FDS]:
            assert item.slot is not None
            item.wanted = False
            first_read += len(item.waiting) == group.members
            item.waiting.discard(consumer.id)
            item.holders.add(consumer.id)
            consumer.held[item.slot.id] = item
            if not item.waiting:
                group.items.remove(item)
            lent.append((item.ordinal, item.slot))
        if first_read:
            group.prefetch.lent(time.monotonic())
            self._packs += first_read
            if self._packs % TRIM_PACKS < first_read:  # now and then the ring is cut to what it needs
                self._ring.trim()
        return lent
