"""Reads ahead of every trainer: fills slots with the packs of each group, lends the slots and takes them back.

A filler thread keeps every group supplied. A slot goes back to the ring when every consumer of its group has claimed
and released it, or has left; see consumers.py.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import InputError, MismatchError, MopdError, ResourceError
from mopd_dataplane.load.consumers import Consumer, ConsumerGroup, Item, Lending, refusal
from mopd_dataplane.load.prefetch_depth import PrefetchDepth
from mopd_dataplane.load.protocol import HEARTBEAT_S
from mopd_dataplane.load.ring import Lent, Ring, Slot
from mopd_dataplane.load.slot_layout import UNCHECKED, seal
from mopd_dataplane.load.source import WindowSource
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.load.windows import PLAN_POLL_S, Heartbeat, Windows
from mopd_dataplane.plan.balance import deal

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store

JOIN_S = 2.0
"""How long a joining trainer waits for its predecessor to leave, in seconds."""
AHEAD_BYTES = 256 << 20
"""Bytes of payload, without hidden states, that are looked up together over all groups. With an object store, they are
also read together."""
AHEAD_PACKS = 512
"""Upper bound of the packs of one group that are looked up in advance."""
AHEAD_GROWTH = 4
"""The next look-up covers at most this many times the packs of the window that were looked up before."""
HANDED_BYTES = 2 << 20
"""Bytes of small packs that are announced together: a trainer that waits for one gets them all with one message."""
HANDED_S = 0.005
"""Longest time in seconds that a filled pack waits for others to be announced with it: a disk may be slow."""
DEALT_STEPS = 2 * AHEAD_PACKS
"""Number of steps whose assignment of packs to ranks is cached."""


class Loader:
    """Reads ahead of every trainer. All methods may be called from any thread."""

    def __init__(self, store: Store, spec: LoadSpec, ring: Ring) -> None:
        self._store = store
        self._spec = spec
        self._ring = ring
        self._windows = Windows(store, spec)
        self._changed = threading.Condition()
        self._groups: dict[tuple[int, int], ConsumerGroup] = {}
        self._joined = 0
        self._probed = 0.0
        self._lending = Lending(ring, poison=spec.poison)
        self._dealt: dict[tuple[int, int, int], list[list[int]]] = {}
        """(window, step, ranks) → packs of each rank."""
        self._closed = False
        self._filler = threading.Thread(target=self._fill_forever, name="filler", daemon=True)
        self._filler.start()

    def join(self, rank: int, ranks: int, member: int, members: int) -> Consumer:
        """Add a trainer as a member of a rank. Returns its handle.

        A trainer that was killed a moment ago may still be registered there, so the call waits JOIN_S for it to leave.
        Raises InputError for a rank outside 0..ranks-1, MismatchError when the rank stays occupied or when other
        trainers disagree on the number of ranks.
        """
        if not 0 <= rank < ranks or not 0 <= member < members:
            raise InputError(
                f"rank {rank} of {ranks}, member {member} of {members}; ranks count from 0 to {ranks - 1}, members to "
                f"{members - 1}"
            )
        with self._changed:
            arguments = (self._groups.values(), rank, ranks, members)
            self._changed.wait_for(lambda: not refusal(*arguments), timeout=JOIN_S)
            if why := refusal(*arguments):
                raise MismatchError(why)
            prefetch = PrefetchDepth(self._spec.slots)
            group = self._groups.setdefault((rank, ranks), ConsumerGroup(rank, ranks, members, prefetch))
            self._joined += 1
            group.consumers.add(self._joined)
            self._changed.notify_all()
            return Consumer(self._joined, group)

    def open(self, consumer: Consumer, window: int, step: int, beat: Heartbeat) -> tuple[int, int]:
        """Move a consumer to a step of a window, once that is planned.

        Packs that were read ahead are kept if the consumer continues with them.
        Returns (steps of the window, steps of the stage before the window). Raises InputError for a step outside the
        window.
        """
        source = self._windows.wait_for(window, beat)
        self._wait_for_members(consumer, beat)
        if not 0 <= step <= source.steps:
            raise InputError(
                f"step {step} is outside window {window} of {self._spec.stage!r}, which has {source.steps} steps"
            )
        with self._changed:
            consumer.source, consumer.step = source, step
            group = consumer.group
            self._forget_before(consumer, (window, step))
            ahead = group.items[0].position[:2] if group.items else None
            at_tail = group.source is not None and (group.source.plan.window, group.next_step) == (window, step)
            if ahead != (window, step) and not (ahead is None and at_tail):
                for item in list(group.items):
                    for waiting in list(item.waiting):
                        self._forget(group, item, waiting)
                group.source, group.next_step = source, step
            used = {other.source.plan.window for other in self._groups.values() if other.source is not None}
            self._changed.notify_all()
        self._windows.drop_before(min(used | {window}))
        return source.steps, source.first_step

    def planned(self, window: int, beat: Heartbeat) -> dict[str, int | str]:
        """Return the number of steps of a window and its digests, waiting until it is planned; 0 steps close the
        log."""
        plan = self._windows.wait_for(window, beat).plan
        return {"steps": len(plan.step_starts) - 1, "plan_digest": plan.digest, "snapshot_digest": plan.snapshot.digest}

    def advance(self, consumer: Consumer, used: Sequence[float]) -> tuple[WindowSource, int, list[int], Lent] | None:
        """Move a consumer to its next step, without waiting.

        Returns (window, step, packs, lent), or None at the end of the window. `lent` holds the first packs of the step
        that are small and ready, as in `claim`. used: as in `claim`.
        """
        with self._changed:
            source, step = consumer.source, consumer.step
            if source is None:
                raise InputError("no window is open; send open first")
            self._forget_before(consumer, (source.plan.window, step))
            if step == source.steps:
                return None
            consumer.step += 1
            self._taken(consumer, used)
            lent = self._lending.first_of(consumer, (source.plan.window, step), self._groups.values())
            self._changed.notify_all()
            return source, step, self._packs(consumer.group, source, step), lent

    def claim(self, consumer: Consumer, step: int, ordinal: int, beat: Heartbeat, used: Sequence[float]) -> Lent:
        """Wait for one pack of a step that the consumer has advanced to. Returns (ordinal, slot) of it and of small
        ready packs after it. The consumer holds each slot until it releases it.

        used: for each pack that was lent without a request, seconds since the trainer began to use it; only packs that
        it has not reported before.
        Raises ResourceError when the ring is full of packs that this trainer holds, or is smaller than the pack.
        """
        with self._changed:
            self._taken(consumer, [*used, 0.0])
        while True:
            until = time.monotonic() + HEARTBEAT_S
            with self._changed:
                item = self._find(consumer, step, ordinal)
                while not self._deliverable(item, consumer) and (left := until - time.monotonic()) > 0:
                    if not item.is_requested:
                        item.is_requested = True
                        self._changed.notify_all()
                    self._changed.wait(left)
                if self._deliverable(item, consumer):
                    lent = self._lending.asked_for(item, consumer, self._groups.values())
                    self._changed.notify_all()
                    return lent
                reason = f"waits for room, {self._full()}" if item.starved else "is being read"
            beat(f"pack {ordinal} of step {step} {reason}")

    def release(self, consumer: Consumer, leases: list[tuple[int, int]]) -> None:
        """Give slots back: (slot id, generation) pairs. Raises InputError for a slot the consumer does not hold."""
        with self._changed:
            for slot_id, generation in leases:
                item = consumer.items_held.get(slot_id)
                if item is None or item.slot is None or item.slot.generation != generation:
                    raise InputError(
                        f"slot {slot_id} generation {generation} cannot be released: this trainer does not hold it"
                    )
                del consumer.items_held[slot_id]
                item.holders.discard(consumer.id)
                self._recycle(item)
            self._changed.notify_all()

    def leave(self, consumer: Consumer) -> None:
        """Take back every slot that a trainer holds, whether it ended properly or was killed."""
        with self._changed:
            group = consumer.group
            for item in consumer.items_held.values():
                item.holders.discard(consumer.id)
                self._recycle(item)
            consumer.items_held.clear()
            for item in list(group.items):
                self._forget(group, item, consumer.id)
            group.consumers.discard(consumer.id)
            if not group.consumers:
                self._groups.pop((group.rank, group.ranks), None)
            self._changed.notify_all()

    def stats(self) -> dict[str, Any]:
        """Return the size of the ring, and how far ahead of each rank the loader is and should be; see
        docs/loader.md."""
        with self._changed:
            ranks = [
                {
                    "rank": group.rank,
                    "depth": group.prefetch.depth,
                    "ready": sum(item.ready for item in group.items),
                    "pack_s": group.prefetch.pack_s,
                    "longest_read_s": group.prefetch.longest_read_s,
                }
                for group in self._groups.values()
            ]
            ring = self._ring
            return {
                "ranks": sorted(ranks, key=lambda rank_stats: rank_stats["rank"]),
                "slots": len(ring.ids),
                "lent": ring.lent,
                "bytes": ring.bytes,
                "max_bytes": ring.max_bytes,
                "cache": cache.stats() if (cache := self._store.cache) is not None else None,
            }

    def retired(self, slots: set[int]) -> set[int]:
        """Return those of these slots that the ring has freed; a trainer should unmap them, to free their memory."""
        with self._changed:
            return slots - self._ring.ids

    def close(self) -> None:
        """Stop reading ahead and free the ring."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._filler.join(timeout=self._spec.deadline_s)
        with self._changed:
            self._ring.close()

    def _wait_for_members(self, consumer: Consumer, beat: Heartbeat) -> None:
        """Wait until all members of a group have joined: every member gets every pack, so none is lent before."""
        while True:
            with self._changed:
                here = len(consumer.group.consumers)
                if here == consumer.group.members:
                    return
                self._changed.wait(HEARTBEAT_S)
            beat(f"{here} of {consumer.group.members} members of rank {consumer.group.rank} have joined")

    def _packs(self, group: ConsumerGroup, source: WindowSource, step: int) -> list[int]:
        """Return the packs of one step for a group, from the cache when possible."""
        key = (source.plan.window, step, group.ranks)
        if key not in self._dealt:
            while len(self._dealt) >= DEALT_STEPS:
                del self._dealt[next(iter(self._dealt))]
            self._dealt[key] = deal(source.plan, source.lengths, step, group.ranks)
        return [pack for pack in self._dealt[key][group.rank] if pack >= 0]

    # -- items; the caller holds the lock -----------------------------------------------------------------------------

    def _find(self, consumer: Consumer, step: int, ordinal: int) -> Item:
        if consumer.source is None or step >= consumer.step:
            raise InputError(f"step {step} was not requested yet; send next first")
        group, window = consumer.group, consumer.source.plan.window
        while group.source is not None and group.source.plan.window == window and group.next_step <= step:
            self._extend(group)
        for item in group.items:
            if item.position == (window, step, ordinal) and consumer.id in item.waiting:
                return item
        raise InputError(f"pack {ordinal} of step {step} cannot be claimed: it was before, or the step has fewer packs")

    def _deliverable(self, item: Item, consumer: Consumer) -> bool:
        """Check if an item can be lent now. Raises its error if filling failed, ResourceError if the trainer blocks
        itself."""
        if item.error is not None:
            error, item.error, item.is_requested = item.error, None, False
            raise error
        if item.starved and consumer.items_held:
            raise ResourceError(errno.ENOMEM, self._full(len(consumer.items_held)))
        return item.ready

    def _full(self, own: int = 0) -> str:
        """Return the error text about a full ring. own: number of slots held by the trainer that gets the error."""
        return (
            f"all {self._ring.lent} slots ({self._ring.bytes:,} of {self._ring.max_bytes:,} bytes) are held by "
            f"trainers, {own} by this one; release packs as they are used, or raise load.ring_bytes"
        )

    def _taken(self, consumer: Consumer, ages: Sequence[float]) -> None:
        """Record that a consumer came to packs `ages` seconds ago. The first member counts for its group."""
        if consumer.id == min(consumer.group.consumers):
            now = time.monotonic()
            consumer.group.prefetch.taken([now - age for age in ages])

    def _extend(self, group: ConsumerGroup) -> bool:
        """Append the items of one more step. Returns False at the end of what is planned."""
        source = group.source
        if source is None:
            return False
        if group.next_step >= source.steps:
            following = self._windows.get_open(source.plan.window + 1)
            if following is None or source.steps == 0:
                return False
            group.source, group.next_step = following, 0
            return True
        for ordinal, pack in enumerate(self._packs(group, source, group.next_step)):
            fields, nbytes = source.fields(pack)
            in_lists = sum(field.nbytes for field in fields if field.name not in UNCHECKED)
            key = (source, group.next_step, ordinal, pack)
            group.items.append(Item(group.prefetch, *key, set(group.consumers), fields, nbytes, in_lists))
        group.next_step += 1
        return True

    def _forget_before(self, consumer: Consumer, position: tuple[int, int]) -> None:
        """Forget a consumer's items before a position (window, step), which it will not request any more."""
        for item in list(takewhile(lambda item: item.position[:2] < position, consumer.group.items)):
            self._forget(consumer.group, item, consumer.id)

    def _forget(self, group: ConsumerGroup, item: Item, consumer_id: int) -> None:
        """Forget an item for one consumer, which will not request it any more."""
        item.waiting.discard(consumer_id)
        if not item.waiting:
            if item in group.items:
                group.items.remove(item)
            self._recycle(item)

    def _recycle(self, item: Item) -> None:
        """Free the slot of an item that nobody waits for or reads. A slot that is being filled is freed by the filler
        later."""
        if item.slot is not None and item.ready and not item.waiting and not item.holders:
            self._ring.release(item.slot)
            item.slot, item.ready = None, False

    # -- filling ---------------------------------------------------------------------------------------------------

    def _fill_forever(self) -> None:
        while True:
            with self._changed:
                batch = [] if self._closed else self._choose()
                if self._closed:
                    return
                if not batch:
                    self._changed.wait(PLAN_POLL_S)
            if batch:
                self._fill(batch)
            else:
                self._probe()

    def _probe(self) -> None:
        """Open the window after a group's last one as soon as it is planned."""
        if time.monotonic() - self._probed < PLAN_POLL_S:
            return
        self._probed = time.monotonic()
        with self._changed:
            ends = {
                group.source.plan.window + 1
                for group in self._groups.values()
                if group.source is not None and group.source.steps and group.next_step >= group.source.steps
            }
        for window in ends:
            with suppress(MopdError):  # the trainer that opens this window gets the error
                self._windows.open_if_planned(window)

    def _choose(self) -> list[Item]:
        """Return the items to fill now, each with a slot: first those that a trainer waits for, then the nearest of
        each group."""
        nearest: list[Item] = []
        for group in self._groups.values():
            depth = group.prefetch.depth
            while len(group.items) < depth and self._extend(group):
                pass
            nearest += [item for item in group.items if item.is_requested and item.slot is None]
            ahead = (item for item in islice(group.items, depth) if item.slot is None and not item.is_requested)
            nearest += islice(ahead, self._spec.slots)
        nearest.sort(key=lambda item: (not item.is_requested, item.position))
        chosen: list[Item] = []
        for item in nearest:  # a few of each group, then look again: a trainer may wait by now
            try:
                item.slot, item.since = self._acquire(item), time.monotonic()
            except MopdError as error:
                item.error = error
                self._changed.notify_all()
                continue
            if item.slot is None:
                break
            chosen.append(item)
        return chosen

    def _coming(self, source: WindowSource, chosen: list[Item]) -> list[int]:
        """Return the packs of a window to look up next: the chosen ones, then those without a slot.

        Together they stay below AHEAD_BYTES over all groups. A window begins with few and then takes ever more: a
        trainer waits for the first pack and should not wait for the reading of later ones.
        """
        packs = [item.pack for item in chosen if item.source is source]
        most = min(AHEAD_GROWTH * source.looked_up, AHEAD_PACKS)
        with self._changed:
            for group in self._groups.values():
                left = AHEAD_BYTES // len(self._groups)
                for item in islice(self._owed(group), most):
                    left -= item.list_bytes
                    if left < 0:
                        break
                    if item.source is source and item.slot is None:
                        packs.append(item.pack)
        return packs

    def _owed(self, group: ConsumerGroup) -> Iterator[Item]:
        """Yield the items of a group in order, adding those of later steps when the iteration reaches them."""
        ordinal = 0
        while ordinal < len(group.items) or self._extend(group):
            if ordinal < len(group.items):
                yield group.items[ordinal]
                ordinal += 1

    def _acquire(self, item: Item) -> Slot | None:
        """Return a slot for the item, or None if there is no room.

        If a trainer waits for the item, the slot of a pack that is needed later, or that its group skipped, is taken
        away.
        """
        item.starved = False
        want = item.source.largest_pack_bytes
        slot = self._ring.acquire(item.nbytes, want_bytes=want)
        if slot is not None or not item.is_requested:
            return slot
        later = [
            other
            for group in self._groups.values()
            for other in group.items
            if other.ready and not other.holders and not other.is_requested
            if other.position > item.position
            or (group.prefetch is item.prefetch and len(other.waiting) == group.members)
        ]
        for other in sorted(later, key=lambda other: other.position, reverse=True):
            assert other.slot is not None
            self._ring.release(other.slot)
            other.slot, other.ready = None, False
            slot = self._ring.acquire(item.nbytes, want_bytes=want)
            if slot is not None:
                return slot
        item.starved = True
        self._changed.notify_all()
        return None

    def _fill(self, batch: list[Item]) -> None:
        """Fill items one after the other and announce them to trainers, small ones several at a time."""
        filled: list[Item] = []
        nbytes, begun = 0, time.monotonic()
        for ordinal, item in enumerate(batch):
            slot, source = item.slot, item.source
            assert slot is not None
            if filled and source.needs_read(item.pack):  # the filled ones should not wait for a read
                self._hand_out(filled)
                filled, nbytes, begun = [], 0, time.monotonic()
            try:
                source.fill(item.pack, item.fields, slot.memory, partial(self._coming, source, batch[ordinal + 1 :]))
                seal(slot.memory, item.fields, generation=slot.generation, pack=item.pack)
            except MopdError as error:
                self._refuse(item, error)
            except Exception as error:
                self._refuse(item, MopdError(f"reading pack {item.pack}: {type(error).__name__}: {error}"))
            else:
                filled.append(item)
                nbytes += item.nbytes
            if nbytes >= HANDED_BYTES or time.monotonic() > begun + HANDED_S:
                self._hand_out(filled)
                filled, nbytes, begun = [], 0, time.monotonic()
        self._hand_out(filled)

    def _refuse(self, item: Item, error: MopdError) -> None:
        """Record that an item cannot be filled; the trainer that requests it gets the error."""
        with self._changed:
            assert item.slot is not None
            self._ring.release(item.slot)
            item.slot, item.error = None, error
            self._changed.notify_all()

    def _hand_out(self, filled: list[Item]) -> None:
        with self._changed:
            now = time.monotonic()
            for item in filled:
                item.ready, item.error = True, None
                item.prefetch.read(now, item.since)
                self._recycle(item)
            self._changed.notify_all()
