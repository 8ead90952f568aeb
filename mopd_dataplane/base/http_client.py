"""Requests to servers of models (engines, teachers, judges): one client for all of them.

    request(call) / gather(calls) ──▶ a thread with an event loop ──▶ the server
    stream(call)                      deadline, limit of size, retries with back-off

The caller only waits for that thread, so Ctrl-C and SIGTERM end the wait at once, whatever the server is doing.
Failures that may pass (429, 5xx, a connection that is cut or refused) are retried for `patience_s`, and until the
request's deadline if the server names the pause (Retry-After). Everything else is an error that names server, request
and reply.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from mopd_dataplane.base.extras import require
from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.base.stop_request import StopRequest
from mopd_dataplane.errors import DeadlineError, EngineError, InputError

if TYPE_CHECKING:
    import httpx2

STATUS_S = 60.0
"""Deadline of a request that a server answers from memory, in seconds."""
WORK_S = 600.0
"""Deadline of a request for which a server computes, in seconds, with retries and pauses."""
BODY_S = 60.0
"""Longest time from an answer's headers to its last byte, in seconds. Servers of models send headers when the work is
done."""
PATIENCE_S = 120.0
"""How long failures that may pass are retried, in seconds: enough for a server to restart."""
SILENCE_S = 600.0
"""Longest time between two parts of a stream, in seconds."""
SMALL_BYTES = 16 << 20
"""Limit in bytes of an answer whose size does not depend on the request."""
LINE_BYTES = 16 << 20
"""Longest line of a stream, in bytes."""
STOP_GRACE_S = 2.0
"""Seconds that a server has to answer once Ctrl-C or SIGTERM has asked a rollout to stop."""
_CONNECT_S = 10.0
_JOIN_S = 10.0
_POLL_S = 0.2
_PAUSE_S = 0.5
"""First pause in seconds. Each later one is twice as long, up to _LONGEST_PAUSE_S, and shortened at random so that the
requests of one run do not all come back together."""
_LONGEST_PAUSE_S = 20.0
_TELLS_AT = 3
"""Number of failed tries after which the user is told that a server is being waited for."""
_SHOWN = 300
"""Characters of an answer that an error shows."""
_LASTING = (501, 505)
"""Statuses of 500 and more that are not retried."""
_PASSING = (408, 425, 429)
"""Statuses below 500 that are retried."""

Value = TypeVar("Value")
Form = TypeVar("Form", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request."""

    method: str = "POST"
    url: str
    body: Mapping[str, Any] | None = None
    purpose: str = ""
    """Description for messages: `log-probs of 412 tokens`."""
    deadline_s: float = field(default_factory=lambda: WORK_S)
    limit_bytes: int = SMALL_BYTES
    """Size in bytes above which an answer is refused."""
    server: str = "a vLLM server"
    """The kind of server that can answer, for messages."""

    def __str__(self) -> str:
        purpose = f" ({self.purpose})" if self.purpose else ""
        return f"{self.method} {redacted(self.url)}{purpose}"


@dataclass(frozen=True)
class Answer:
    """A complete answer, with any status that is not retried."""

    call: Call
    status: int
    content_type: str
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def shown(self) -> str:
        """Status, content type and beginning, for messages."""
        return _shown(self.status, self.content_type, self.content)

    def require_success(self) -> Answer:
        """Return the answer itself. Raises EngineError for a status outside 200 to 299."""
        if not self.is_success:
            raise EngineError(f"{self.call} failed: the server answered {self.shown}; {_next_step(self)}")
        return self

    def read(self, form: type[Form]) -> Form:
        """Parse the JSON of a successful answer. Raises EngineError when it has another form."""
        self.require_success()
        try:
            return form.model_validate_json(self.content)
        except ValidationError as error:
            raise self.refused(validation_problem(error)) from None

    def refused(self, problem: str) -> EngineError:
        """Return the error for an answer whose content is not usable."""
        return EngineError(
            f"{self.call} failed: {problem}; the server answered {self.shown}; nothing of it was stored: check that "
            f"the url is that of {self.call.server}, then run again to continue"
        )


@dataclass(kw_only=True)
class Traffic:
    """Requests to one server so far."""

    requests: int = 0
    """Requests that were sent, without their repetitions."""
    retries: int = 0
    """Repetitions after a failure that may pass."""


class BrokenOffError(EngineError):
    """A stream was cut after it had begun; the lines that arrived are complete."""


class _Passing(Exception):
    """A failure that may pass, so that a retry makes sense."""

    def __init__(self, problem: str, pause_s: float = 0.0) -> None:
        super().__init__(problem)
        self.pause_s = pause_s


class HttpClient:
    """Connections to one server, and the thread that runs them.

    most: number of requests at a time. Raises InputError without httpx2.
    """

    def __init__(self, *, headers: Mapping[str, str], most: int, patience_s: float | None = None) -> None:
        require(["httpx2"])
        import httpx2

        self._http = httpx2
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most)
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)
        self._client = httpx2.AsyncClient(headers=dict(headers), limits=limits, timeout=timeout)
        self.traffic = Traffic()
        self._has_answered = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-client", daemon=True)
        self._thread.start()
        self._room = asyncio.Semaphore(most)

    def request(self, call: Call) -> Answer:
        """Send one request and return its answer. Raises EngineError, DeadlineError."""
        return self._wait(self.start(self._exchange(call)), call)

    def gather(self, calls: Sequence[Call], read: Callable[[int, Answer], Value]) -> list[Value]:
        """Send requests, several at a time, and return `read(index, answer)` of each.

        The first failure cancels the others. Raises EngineError, DeadlineError, and the errors of `read`.
        """

        async def one(index: int, call: Call) -> Value:
            async with self._room:
                return read(index, await self._exchange(call))

        async def every() -> list[Value]:
            tasks = [asyncio.ensure_future(one(index, call)) for index, call in enumerate(calls)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        return self._wait(self.start(every()), calls[0]) if calls else []

    def start(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Run a coroutine in the client's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cut every connection and end the thread."""
        if self._loop.is_closed():
            return
        self.start(self._shut()).result(timeout=_JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_JOIN_S)
        self._loop.close()

    async def stream(self, call: Call) -> AsyncGenerator[str]:
        """Yield the lines of an answer as they arrive. Raises EngineError, DeadlineError.

        Failures before the first byte of a successful answer are retried; later ones are not, because lines that
        arrived may have been used. The caller closes the generator.
        """
        retries = _Retries(call, self._patience_s, self.traffic)
        while True:
            has_begun = False
            try:
                async with self._opened(call) as response:
                    if not response.is_success:
                        (await self._complete(call, response)).require_success()
                    async for line in _lines(call, response.aiter_bytes()):
                        has_begun = True
                        yield line
                    return
            except _Passing as failure:
                if has_begun:
                    raise BrokenOffError(
                        f"{call} was broken off: {failure}; look at the server, then run again"
                    ) from None
                await retries.pause(failure)

    async def _exchange(self, call: Call) -> Answer:
        retries = _Retries(call, self._patience_s, self.traffic)
        try:
            async with asyncio.timeout(call.deadline_s):
                while True:
                    try:
                        async with self._opened(call) as response:
                            return await self._complete(call, response)
                    except _Passing as failure:
                        await retries.pause(failure)
        except DeadlineError:
            raise
        except TimeoutError:
            failures = f" ({retries.tries} failed tries, the last: {retries.last})" if retries.tries else ""
            raise DeadlineError(
                f"{call} was not answered in {call.deadline_s:g} s{failures}; look at the server, then run again to "
                "continue"
            ) from None

    @asynccontextmanager
    async def _opened(self, call: Call) -> AsyncGenerator[httpx2.Response]:
        """Open an answer, once its headers are here. Raises _Passing for failures to be retried, else EngineError."""
        http = self._http
        try:
            async with self._client.stream(call.method, call.url, json=call.body) as response:
                self._has_answered = True
                if response.status_code in _PASSING or (
                    response.status_code >= 500 and response.status_code not in _LASTING
                ):
                    answer = await self._complete(call, response)
                    raise _Passing(f"the server answered {answer.shown}", _retry_after_s(response.headers))
                yield response
        except (http.ConnectError, http.ConnectTimeout) as error:
            problem = f"the server does not answer ({type(error).__name__}: {redacted(str(error))})"
            if self._has_answered:
                raise _Passing(problem) from error
            raise EngineError(f"{call} failed: {problem}; start it, then run again to continue") from error
        except (http.NetworkError, http.TimeoutException) as error:
            raise _Passing(f"the connection was cut ({type(error).__name__}: {redacted(str(error))})") from error
        except http.RemoteProtocolError as error:
            if any(words in str(error) for words in ("disconnected", "peer closed")):
                raise _Passing(f"the connection was cut ({redacted(str(error))})") from error
            raise EngineError(
                f"{call} failed: what came back is no HTTP ({redacted(str(error))[:_SHOWN]}); correct the url, which "
                "names a port where something else listens"
            ) from error
        except (http.HTTPError, http.InvalidURL) as error:
            raise EngineError(
                f"{call} could not be carried out ({type(error).__name__}: {redacted(str(error))[:_SHOWN]}); look at "
                "the server, then run again to continue"
            ) from error

    async def _complete(self, call: Call, response: httpx2.Response) -> Answer:
        """Read an answer to its end. Raises EngineError when it is too large, DeadlineError when it does not end."""
        parts: list[bytes] = []
        size = 0
        kind = response.headers.get("content-type", "")
        try:
            async with asyncio.timeout(BODY_S):
                async for part in response.aiter_bytes():
                    parts.append(part)
                    if (size := size + len(part)) > call.limit_bytes:
                        raise EngineError(
                            f"{call} failed: the answer has more than {call.limit_bytes} bytes, the limit for this "
                            f"request; the server answered {_shown(response.status_code, kind, parts[0])}; check that "
                            f"the url is that of {call.server}"
                        )
        except TimeoutError:
            raise DeadlineError(
                f"{call} failed: the answer had not ended {BODY_S:g} s after its headers ({size} bytes so far: "
                f"{_shown(response.status_code, kind, b''.join(parts[:8]))}); look at the server, then run again to "
                "continue"
            ) from None
        return Answer(call, response.status_code, kind, b"".join(parts))

    def _wait(self, future: Future[Value], call: Call) -> Value:
        """Return the result of work in the client's thread; an exception in the waiting thread cancels the work."""
        try:
            while not wait([future], timeout=_POLL_S).done:
                if StopRequest.pending_s() > STOP_GRACE_S:
                    raise EngineError(f"{call} was given up, because this run was asked to stop")
        except BaseException:
            future.cancel()
            raise
        return future.result(timeout=0)

    async def _shut(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()


class _Retries:
    """Pauses between the tries of one request."""

    def __init__(self, call: Call, patience_s: float, traffic: Traffic) -> None:
        self._call = call
        self._patience_s = patience_s
        self._traffic = traffic
        traffic.requests += 1
        self._began = asyncio.get_running_loop().time()
        self.tries = 0
        """Number of failed tries."""
        self.last = ""
        """Problem of the newest failed try."""

    async def pause(self, failure: _Passing) -> None:
        """Wait before the next try. Raises EngineError after `patience_s`, or at the request's deadline if the server
        names the pause."""
        self.tries += 1
        self.last = str(failure)
        elapsed_s = asyncio.get_running_loop().time() - self._began
        back_off_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (self.tries - 1)) * random.uniform(0.5, 1.0)
        pause_s = max(back_off_s, failure.pause_s)
        limit_s = self._patience_s
        if failure.pause_s and limit_s:
            limit_s = max(limit_s, self._call.deadline_s)
        if elapsed_s + pause_s > limit_s:
            raise EngineError(
                f"{self._call} failed {self.tries} times in {elapsed_s:.0f} s: {self.last}; look at the server, then "
                "run again to continue"
            ) from None
        if self.tries == _TELLS_AT or (failure.pause_s >= _LONGEST_PAUSE_S and self.tries == 1):
            times = "once" if self.tries == 1 else f"{self.tries} times"
            left = f"tried again for another {limit_s - elapsed_s:.0f} s, next in {pause_s:.0f} s"
            text = f"{self._call} failed {times}: {self.last}; {left}"
            print(text, file=sys.stderr, flush=True)
        self._traffic.retries += 1
        await asyncio.sleep(pause_s)


async def _lines(call: Call, parts: AsyncIterator[bytes]) -> AsyncGenerator[str]:
    """Yield the lines of a stream. Raises EngineError for a line without end, DeadlineError for a silent stream."""
    rest = b""
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                part = await anext(parts)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise DeadlineError(
                f"{call}: the stream has been silent for {SILENCE_S:g} s; look at the server, then run again to "
                "continue"
            ) from None
        *complete, rest = (rest + part).split(b"\n")
        if len(rest) > LINE_BYTES:
            raise EngineError(
                f"{call} failed: a line of the stream has more than {LINE_BYTES} bytes: {_start(rest)}; check that the "
                f"url is that of {call.server}"
            )
        for line in complete:
            yield line.rstrip(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def validation_problem(error: ValidationError) -> str:
    """Describe the first difference between a reply and its form: where, what is expected, what it has.

    >>> class Reply(BaseModel):
    ...     rank: int
    >>> try:
    ...     Reply.model_validate_json('{"rank": "x"}')
    ... except ValidationError as error:
    ...     validation_problem(error)
    "rank: Input should be a valid integer, unable to parse string as an integer (found 'x')"
    """
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "the whole answer"
    value = first["input"]
    shown = "" if isinstance(value, (bytes, dict, list)) else f" (found {redacted(repr(value))[:_SHOWN]})"
    return f"{where}: {first['msg']}{shown}"


def check_root(url: str) -> str:
    """Return a server's API root without a slash at its end. Raises InputError for an impossible one."""
    root = url.rstrip("/")
    if not root.startswith(("http://", "https://")) or not root.endswith("/v1"):
        raise InputError(f"url {redacted(url)!r}: give the server's API root, like http://127.0.0.1:8000/v1")
    return root


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the pause that a Retry-After header names, in seconds or as a date; 0 without one that can be read."""
    text = headers.get("retry-after", "")
    if text.isascii() and text.isdigit() and len(text) < 6:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _next_step(answer: Answer) -> str:
    status = answer.status
    if status in (401, 403):
        return "set the server's key in the environment variable VLLM_API_KEY"
    if status in (404, 405) or 300 <= status < 400:
        return f"check the url: it is that of the API root of {answer.call.server}"
    return "change what the server objects to, then run again to continue"


def _shown(status: int, content_type: str, content: bytes) -> str:
    return f"{status} {content_type or 'without a content type'} {_start(content)}"


def _start(content: bytes) -> str:
    """Return the beginning of an answer on one line."""
    text = redacted(content[: 4 * _SHOWN].decode(errors="replace"))
    return repr(text[:_SHOWN]) + ("…" if len(content) > len(text[:_SHOWN].encode()) else "")
