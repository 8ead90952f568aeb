"""Requests to a model server: repeated where the failure can pass, bounded in time and size, never in a signal's way.

A thread runs the requests, so that Ctrl-C and SIGTERM reach the caller at once, whatever a server does.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.errors import DeadlineError, EngineError

if TYPE_CHECKING:
    from collections.abc import Coroutine


REQUEST_S = 600.0
"""Longest time that one request may take, repetitions and the whole reply included."""
RETRY_S = 60.0
"""Longest time for which a failure that can pass is answered with another request."""
CONNECT_S = 10.0
GRACE_S = 30.0
"""How long after its deadline a request may take to say so."""
MOST_BYTES = 2 << 30
"""Largest reply."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that another request may not meet: too many requests, and errors of the server or of what is before it."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 8.0
_JOIN_S = 10.0
_SHOWN = 200
"""Characters of a reply that a message shows."""

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """A whole reply of a server."""

    url: str
    status: int
    content: bytes

    @property
    def is_error(self) -> bool:
        return self.status >= 400

    @property
    def text(self) -> str:
        """Its beginning, for a message."""
        return redacted(self.content[: 4 * _SHOWN].decode(errors="replace"))[:_SHOWN]

    def json(self) -> Any:
        """The reply as JSON. Raises EngineError."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            raise self.refused("it is not JSON") from None

    def read(self, reader: Callable[[Any], T]) -> T:
        """What a function makes of the JSON. Raises EngineError, with what came, for another form than it expects."""
        value = self.json()
        try:
            return reader(value)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self.refused(f"{type(error).__name__}: {error!s:.200}") from None

    def refused(self, problem: str) -> EngineError:
        """The error for a reply of no use."""
        return EngineError(
            f"{self.url} replied {self.text!r}, which cannot be used ({problem}); look at the server and its version, "
            "then run the same command again to continue"
        )


class HttpClient:
    """Requests to servers, each with retries and a deadline; close() ends them all.

    headers: sent with every request. connections: the most at a time.
    """

    def __init__(self, headers: Mapping[str, str], *, connections: int = 64) -> None:
        import httpx2

        limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
        timeout = httpx2.Timeout(REQUEST_S, connect=CONNECT_S, pool=None)
        self.session = httpx2.AsyncClient(headers=dict(headers), limits=limits, timeout=timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the thread of the requests."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def request(self, method: str, url: str, body: Mapping[str, Any] | None = None, *, repeat: bool = True) -> Reply:
        """The reply to one request, whatever its status. repeat: ask again after a failure that can pass.

        Raises EngineError when nobody answers, DeadlineError after REQUEST_S.
        """
        future = self.submit(self.reply(method, url, body, repeat=repeat))
        try:
            return future.result(REQUEST_S + GRACE_S)
        finally:
            future.cancel()  # a signal has come meanwhile

    async def reply(self, method: str, url: str, body: Mapping[str, Any] | None, *, repeat: bool = True) -> Reply:
        """See request()."""
        attempts = Attempts(url)
        while True:
            try:
                async with asyncio.timeout(attempts.left_s):
                    reply = await self._once(method, url, body)
            except TimeoutError:
                raise attempts.late() from None
            except Exception as error:
                if not repeat or not await attempts.may_pass(error):
                    raise attempts.failed(error) from error
                continue
            if not repeat or reply.status not in PASSING or not await attempts.may_pass(reply):
                return reply

    async def _once(self, method: str, url: str, body: Mapping[str, Any] | None) -> Reply:
        async with self.session.stream(method, url, json=body) as answer:
            content = bytearray()
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    raise EngineError(f"{url} sent more than {MOST_BYTES:,} bytes; look at the server, then run again")
            return Reply(url, answer.status_code, bytes(content))

    def close(self) -> None:
        """End every request and the thread."""
        if self._loop.is_closed():
            return
        self.submit(self._shut()).result(timeout=_JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_JOIN_S)
        self._loop.close()

    async def _shut(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.session.aclose()


class Attempts:
    """The attempts at one request: how many, for how long, and whether another one is worth it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._started_at = time.monotonic()
        self._count = 1
        self._wait_s = _FIRST_WAIT_S

    @property
    def left_s(self) -> float:
        """Time until the request's deadline."""
        return max(0.0, REQUEST_S - self._passed_s())

    async def may_pass(self, failure: Exception | Reply) -> bool:
        """Wait before another attempt; False where the failure cannot pass, or has not for RETRY_S."""
        import httpx2

        can_pass = isinstance(failure, Reply | httpx2.TransportError)
        if not can_pass or self._passed_s() + self._wait_s > RETRY_S:
            return False
        await asyncio.sleep(self._wait_s * random.uniform(0.75, 1.25))
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        self._count += 1
        return True

    def failed(self, error: Exception) -> EngineError:
        """The error for a request that got no reply."""
        if isinstance(error, EngineError):
            return error
        return EngineError(
            f"{self._url} does not answer ({type(error).__name__}: {redacted(str(error))[:_SHOWN]}){self._effort()}; "
            "start it, then run the same command again to continue"
        )

    def late(self) -> DeadlineError:
        """The error for a reply that did not end in time."""
        return DeadlineError(
            f"{self._url} has not ended its reply in {REQUEST_S:g} s{self._effort()}; look at the server, then run the "
            "same command again to continue"
        )

    def _effort(self) -> str:
        return f" after {self._count} attempts in {self._passed_s():.0f} s" if self._count > 1 else ""

    def _passed_s(self) -> float:
        return time.monotonic() - self._started_at
