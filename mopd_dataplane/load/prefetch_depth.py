"""Number of packs to keep ready for a rank: as many as its trainer takes during the longest read.

Reads are not even: one fetches the payload of many packs, the next ones only copy. Nor is a trainer: it may take a
whole batch at once and compute for a while. So no mean tells how far ahead to be, and this does:

    the trainer's requests, its waits left out    |  | |     |||||       |  | |
    longest time between two packs                         └──────┘
    packs to keep ready                           1 that is being read + 5, the most requests in any such interval

A trainer slower than every read keeps the smallest depth. One that is faster than the reader gets a deep ring, which
fills while it pauses. The ring bounds the memory, not this depth.
"""

from bisect import bisect_left
from collections.abc import Sequence

REMEMBERED = 64
"""Number of recent requests that are evaluated, and so about the largest depth."""
FORGET = 0.999
"""Factor by which the longest read decays with each further pack; one large read serves some five hundred packs."""


class PrefetchDepth:
    """Prefetch depth of one rank. Not thread-safe: the caller holds its lock. Times are seconds of a monotonic
    clock."""

    def __init__(self, least: int) -> None:
        """Start at the smallest depth, `least`, in packs."""
        self.depth = least
        """Packs to keep ready."""
        self.longest_read_s = 0.0
        self._least = least
        self._asked: list[float] = []
        self._within: list[int] = []
        """For each remembered request, the number of requests within the longest read before it."""
        self._worked = 0.0
        """Seconds that the trainer spent outside of waits."""
        self._lent_at: float | None = None
        self._ready_at = 0.0

    @property
    def pack_s(self) -> float:
        """Mean time of the trainer from one pack to its next request, in seconds; 0 before the second request."""
        return (self._asked[-1] - self._asked[0]) / (len(self._asked) - 1) if len(self._asked) > 1 else 0.0

    def taken(self, moments: Sequence[float]) -> None:
        """Record that the trainer came to packs at these moments, and still waits for the last if it is not there
        yet."""
        for now in moments:  # each needs one more pack, and its work starts here if the pack is ready
            if self._lent_at is not None:
                self._worked += max(now - self._lent_at, 0.0)
                self._lent_at = max(now, self._lent_at)
            self._asked.append(self._worked)
            del self._asked[:-REMEMBERED], self._within[: 1 - REMEMBERED]
            first = bisect_left(self._asked, self._worked - self.longest_read_s)
            self._within.append(len(self._asked) - first)
        self.depth = max(self._least, 1 + max(self._within, default=0))

    def lent(self, now: float) -> None:
        """Record that the trainer has received the pack."""
        self._lent_at = now

    def read(self, now: float, since: float) -> None:
        """Record that a pack is ready whose reading could begin at `since`, or when the pack before it was ready."""
        self.longest_read_s = max(now - max(since, self._ready_at), self.longest_read_s * FORGET)
        self._ready_at = now
