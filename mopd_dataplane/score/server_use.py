"""What scoring has requested from a teacher's server: its cost."""

from __future__ import annotations

from typing import NamedTuple


class ServerUse(NamedTuple):
    """Requests to the servers of teachers, and the tokens in them."""

    requests: int = 0
    """Requests without their repetitions."""
    retries: int = 0
    """Repetitions after answers 429 and 5xx, and after cut connections."""
    tokens: int = 0
    """Prompt tokens of these requests, without their repetitions."""

    def plus(self, other: ServerUse) -> ServerUse:
        """Return the sum of both."""
        return ServerUse(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, earlier: ServerUse) -> ServerUse:
        """Return what was requested since `earlier`."""
        return ServerUse(*(mine - theirs for mine, theirs in zip(self, earlier, strict=True)))

    def __str__(self) -> str:
        """Describe the use for the line of a finished step.

        >>> str(ServerUse(1200, 1, 345678))
        '1,200 requests, 1 retry, 345,678 prompt tokens'
        """
        retries = "retry" if self.retries == 1 else "retries"
        requests = "request" if self.requests == 1 else "requests"
        return f"{self.requests:,} {requests}, {self.retries:,} {retries}, {self.tokens:,} prompt tokens"
