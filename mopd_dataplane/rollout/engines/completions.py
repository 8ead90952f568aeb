"""Many concurrent streaming completions of one server: a thread runs them, a queue holds their chunks."""

import asyncio
import json
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx2

from mopd_dataplane.errors import EngineError

SILENCE_S = 600.0
"""Longest time between two chunks of one stream."""
_CONNECT_S = 10.0
_JOIN_S = 10.0
_DATA, _DONE = "data: ", "[DONE]"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a stream: tokens or an error; if it has neither, the stream has ended."""

    name: str
    token_ids: list[int]
    logprobs: list[float]
    error: str = ""


class Completions:
    """Streams of POST {url}/completions, by name."""

    def __init__(self, url: str, headers: Mapping[str, str], *, most: int) -> None:
        self._url = url
        self.said: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most)
        timeout = httpx2.Timeout(SILENCE_S, connect=_CONNECT_S)
        self._client = httpx2.AsyncClient(headers=dict(headers), limits=limits, timeout=timeout)
        self._running: dict[str, Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="completions", daemon=True)
        self._thread.start()

    def start(self, name: str, body: Mapping[str, Any]) -> None:
        """Begin a stream."""
        self._running[name] = asyncio.run_coroutine_threadsafe(self._run(name, body), self._loop)

    def stop(self, name: str) -> None:
        """End a stream, if it has not ended; the server stops decoding when the connection closes."""
        if (stream := self._running.pop(name, None)) is not None:
            stream.cancel()

    def close(self) -> None:
        """End every stream and the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(timeout=_JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_JOIN_S)
        self._loop.close()

    async def _shut(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _run(self, name: str, body: Mapping[str, Any]) -> None:
        try:
            async with self._client.stream("POST", f"{self._url}/completions", json=body) as answer:
                if answer.is_error:
                    text = (await answer.aread()).decode(errors="replace")
                    raise EngineError(f"status {answer.status_code}: {text[:500]!r}")
                async for line in answer.aiter_lines():
                    if line.startswith(_DATA) and (text := line.removeprefix(_DATA)) != _DONE:
                        self._say(name, json.loads(text))
            self.said.put(Chunk(name, [], []))
        except Exception as error:  # whatever a server says: else the run waits for it in vain
            self.said.put(Chunk(name, [], [], error=f"{type(error).__name__}: {error}"))

    def _say(self, name: str, event: Mapping[str, Any]) -> None:
        """Pass on the tokens of one event. Raises LookupError when it has tokens and not a log-prob for each."""
        if "error" in event:
            raise EngineError(str(event["error"])[:500])
        for choice in event["choices"]:
            token_ids = [int(token) for token in choice["token_ids"] or []]
            if token_ids:
                logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
                if len(logprobs) != len(token_ids):
                    raise LookupError(f"{len(token_ids)} tokens and {len(logprobs)} log-probs")
                self.said.put(Chunk(name, token_ids, logprobs))
