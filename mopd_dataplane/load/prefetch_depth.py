"""Number of packs to keep ready for a rank: as many as its trainer takes during the longest read.

Reads are not even: one fetches the payload of many packs, the next ones only copy. A trainer is not even either: it may
take a whole batch at once and compute for a while. So no mean says how far ahead to be; this does:

    the trainer's requests, its waits left out    |  | |     |||||       |  | |
    longest time between two packs                         └──────┘
    packs to keep ready                           1 that is being read + 5, the most that any such stretch has seen

A trainer slower than every read keeps the least depth. One that is faster than the reader gets a deep ring, which fills
while it pauses. Memory is bounded by the ring, not here.
"""

from bisect import bisect_left
from collections.abc import Sequence

REMEMBERED = 64
"""Requests that are looked at, and so about the most packs kept ready."""
FORGET = 0.999
"""Share of the longest read that is left after each further pack; one large read serves some five hundred packs."""


class PrefetchDepth:
    """Prefetch depth of one rank. Not thread-safe: the caller holds its lock. Times: seconds of a monotonic clock."""

    def __init__(self, least: int) -> None:
        """least: depth that is always kept."""
        self.depth = least
        """Packs to keep ready."""
        self.longest_read_s = 0.0
        self._least = least
        self._asked: list[float] = []
        self._within: list[int] = []
        """For each request, how many were made in the longest read before it."""
        self._worked = 0.0
        """The trainer's own time: all of it but what it waited."""
        self._lent_at: float | None = None
        self._ready_at = 0.0

    @property
    def pack_s(self) -> float:
        """Mean time of the trainer from one pack to its next request; 0 before the second."""
        return (self._asked[-1] - self._asked[0]) / (len(self._asked) - 1) if len(self._asked) > 1 else 0.0

    def taken(self, moments: Sequence[float]) -> None:
        """The trainer came to packs at these moments, or waits for one since then."""
        for now in moments:  # one more pack is needed, and worked on from now on if it is here already
            if self._lent_at is not None:
                self._worked += max(now - self._lent_at, 0.0)
                self._lent_at = max(now, self._lent_at)
            self._asked.append(self._worked)
            del self._asked[:-REMEMBERED], self._within[: 1 - REMEMBERED]
            first = bisect_left(self._asked, self._worked - self.longest_read_s)
            self._within.append(len(self._asked) - first)
        self.depth = max(self._least, 1 + max(self._within, default=0))

    def lent(self, now: float) -> None:
        """The trainer has the pack."""
        self._lent_at = now

    def read(self, now: float, since: float) -> None:
        """A pack is ready that could be read since then, or since the one before it was ready."""
        self.longest_read_s = max(now - max(since, self._ready_at), self.longest_read_s * FORGET)
        self._ready_at = now
