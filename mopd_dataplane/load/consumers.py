"""Assignment of packs to trainers, and of their reading.

A *consumer group* is one data-parallel rank: the packs it will be asked for, in order. Its *consumers* are trainer
processes: one, or several where the ranks of a tensor- or context-parallel group read the same packs.

    planned ──fill──▶ ready ──claim by every consumer──▶ lent ──release by every consumer──▶ (slot free)
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from mopd_dataplane.errors import MopdError
from mopd_dataplane.load.prefetch_depth import PrefetchDepth
from mopd_dataplane.load.ring import Slot
from mopd_dataplane.load.slot_layout import Field
from mopd_dataplane.load.source import WindowSource


@dataclass(eq=False, slots=True)
class Item:
    """One pack that one group will read."""

    prefetch: PrefetchDepth
    """How many packs to keep ready for the group."""
    source: WindowSource
    step: int
    ordinal: int
    pack: int
    waiting: set[int]
    """Consumers that have not claimed it."""
    fields: tuple[Field, ...]
    nbytes: int
    """Bytes of the whole pack in a slot."""
    list_bytes: int
    """Bytes of the pack without its hidden states: about what its payload takes in memory once it is read."""
    slot: Slot | None = None
    since: float = 0.0
    """Time at which it got the slot."""
    ready: bool = False
    wanted: bool = False
    """A trainer is blocked on it."""
    starved: bool = False
    """Wanted, but every slot is held by a trainer."""
    holders: set[int] = field(default_factory=set)
    error: MopdError | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        """Order of use."""
        return self.source.plan.window, self.step, self.ordinal


@dataclass(eq=False, slots=True)
class ConsumerGroup:
    """Packs for one data-parallel rank. items: packs that not all of its consumers have claimed, in order."""

    rank: int
    ranks: int
    members: int
    prefetch: PrefetchDepth
    consumers: set[int] = field(default_factory=set)
    items: deque[Item] = field(default_factory=deque)
    source: WindowSource | None = None
    """Window that `next_step` belongs to."""
    next_step: int = 0
    """First step that has no items yet."""

    def ready_from(self, place: tuple[int, int, int], consumer: int, most_bytes: int) -> list[Item]:
        """Items of a step from a place on that are ready and not claimed by the consumer, as long as none is missing
        between them and their slots take at most so many bytes."""
        left = most_bytes
        found: list[Item] = []
        for item in self.items:
            if item.place < place:
                continue
            if (
                item.slot is None
                or not item.ready
                or item.place != (*place[:2], place[2] + len(found))
                or consumer not in item.waiting
            ):
                break
            left -= item.slot.capacity
            if left < 0:
                break
            found.append(item)
        return found


@dataclass(eq=False, slots=True)
class Consumer:
    """One trainer process. step: the one its next batch is for."""

    id: int
    group: ConsumerGroup
    source: WindowSource | None = None
    step: int = 0
    held: dict[int, Item] = field(default_factory=dict)
    """Slot id → item whose slot this process reads."""


def refusal(groups: Iterable[ConsumerGroup], rank: int, ranks: int, members: int) -> str:
    """Why a trainer cannot join these groups now; empty when it can."""
    for group in groups:
        if group.ranks != ranks:
            return f"a trainer of {ranks} ranks joins while others say {group.ranks}"
        if group.rank == rank and (group.members != members or len(group.consumers) == members):
            return f"rank {rank} is served already ({len(group.consumers)} of {group.members} members)"
    return ""
