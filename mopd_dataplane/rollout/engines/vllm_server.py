"""The engine of a running vLLM server, reached by its URL: one streaming completion per live slot.

With `noise = "keyed"` the server must run this package's sampler (see vllm_sampler.py), which is tested at the start.
With `noise = "seeded"` any vLLM server can be used: it draws with its own generator, seeded per sample.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from mopd_dataplane.base.http_client import STOP_GRACE_S, BrokenOffError, Call, HttpClient, validation_problem
from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.base.stop_request import StopRequest
from mopd_dataplane.errors import DeadlineError, EngineError, MismatchError, MopdError
from mopd_dataplane.models.hf import weights_digest
from mopd_dataplane.models.server_identity import ServerIdentity, identity_of
from mopd_dataplane.models.vllm_replies import LOWEST, Event, checked_logprob
from mopd_dataplane.models.vllm_replies import Completions as CompletionsReply
from mopd_dataplane.models.vllm_server import VllmServer
from mopd_dataplane.rollout.engines import call_timeout
from mopd_dataplane.rollout.engines.engine import Request
from mopd_dataplane.rollout.engines.streaming import Noise, Stream, StreamingEngine
from mopd_dataplane.rollout.engines.vllm import LOGPROBS_MODE, SAMPLER

if TYPE_CHECKING:
    from mopd_dataplane.job.sections import Lora

_POLL_S = 0.2
_DATA, _DONE = "data: ", "[DONE]"


class ServerEngine(StreamingEngine):
    """Decodes with a running vLLM server.

    folder: the policy's folder here; its digest must be the server's (see VllmServer.take). reload: whether the server
    may be told to load another version. adapter: later policies will be adapters. Raises InputError, EngineError when
    nobody answers, MismatchError when the server has other weights, takes no adapters, or does not run the sampler
    that `noise` needs.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        url: str,
        slots: int,
        policy_version: int = 0,
        noise: Noise = "keyed",
        reload: bool = False,
        adapter: Lora | None = None,
    ) -> None:
        super().__init__(Path(folder), slots=slots, noise=noise)
        self._reload = reload
        self._server = VllmServer(url)
        self.context_length = min(self._server.context_length, self.context_length)
        self._name = ""
        """Name of the model in requests to the server."""
        if adapter is not None:
            self._server.require_adapters()
        self.load_policy(Path(folder), policy_version)
        self._cuts_reported = True
        self._check_sampler(noise)
        self._completions = Completions(self._server.url, self._server.headers, most=slots)

    def _check_sampler(self, noise: Noise) -> None:
        """Let the server draw two tokens, and check which sampler and which log-probs it uses."""
        if noise == "seeded":
            # The only token inside top_k = 1 has log-prob 0, unless the server reports the softmax before the cut.
            self._cuts_reported = self._said_at_once(_probe(top_k=1), ())[1] == 0
            return
        # Of two tokens at one position, top_k = 1 leaves at most one; the sampler repeats both and reports the outer as
        # such.
        due = (self.vocab_size - 1, self.vocab_size - 2)
        told = [self._said_at_once(_probe(token, top_k=1), (token,)) for token in due]
        if tuple(token for token, _ in told) != due or min(logprob for _, logprob in told) != LOWEST:
            raise MismatchError(
                f"{self._server.url} does not run this package's sampler: start it with --logits-processors {SAMPLER} "
                f'--logprobs-mode {LOGPROBS_MODE["keyed"]} and this package installed, or set engine.noise = "seeded"'
            )

    def _said_at_once(self, request: Request, again: tuple[int, ...]) -> tuple[int, float]:
        """Return the first token of a request that is not streamed, and its log-prob."""
        body = self._body(request, request.prompt_ids.tolist(), again) | {"stream": False, "max_tokens": 1}
        reply, answer = self._server.completion(body, CompletionsReply, "a first token")
        choice = reply.choices[0]
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        if not choice.token_ids or not logprobs or logprobs[0] is None:
            raise answer.refused("choices.0 has no token id with its log-prob, which vLLM 0.32 and later return")
        return choice.token_ids[0], logprobs[0]

    def _body(self, request: Request, prompt: list[int], again: tuple[int, ...]) -> dict[str, Any]:
        return {
            "model": self._name,
            "prompt": prompt,
            "stream": True,
            "return_token_ids": True,
            "add_special_tokens": False,
            # A server takes settings that are missing here from the model's generation config.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_p": 0.0,
            **self._drawing(request, again, arguments_as="vllm_xargs"),
        }

    def _check(self, request: Request) -> None:
        """Check that the server can report log-probs of this distribution. Raises MismatchError."""
        plain = request.temperature in (0, 1) and request.top_p == 1 and request.top_k == 0
        if not plain and not self._cuts_reported:
            raise MismatchError(
                f"{self._server.url} reports log-probs before temperature and cuts, but samples with temperature "
                f"{request.temperature:g}, top_p {request.top_p:g}, top_k {request.top_k}; start it with "
                f"--logprobs-mode {LOGPROBS_MODE['seeded']}, or sample at temperature 1 without cuts"
            )

    def _send(self, stream: Stream, prompt: list[int]) -> None:
        self._completions.start(stream.name, self._body(stream.request, prompt, stream.again))

    def _waiting(self) -> bool:
        return not self._completions.said.empty()

    def _cancel(self, names: Sequence[str]) -> None:
        for name in names:
            self._completions.stop(name)

    def _listen(self) -> None:
        """Pass on the next chunk of any stream.

        Raises EngineError when a stream broke or when a stop cannot wait for the server, DeadlineError after a silence.
        """
        chunk = self._next_chunk()
        if chunk.was_cut:
            if (stream := self._streams.begin_again(chunk.name, again=self._again)) is not None:
                self._ask(stream)
            return
        if chunk.error and self._streams.knows(chunk.name):
            raise EngineError(
                f"{self._server.url} broke off a completion ({chunk.error}); every logged token is kept: look at the "
                "server, then run again to continue"
            )
        if chunk.token_ids:
            self._streams.arrive(chunk.name, chunk.token_ids, chunk.logprobs)
        else:
            self._streams.end(chunk.name)

    def _next_chunk(self) -> Chunk:
        silent_since = time.monotonic()
        while True:
            try:
                return self._completions.said.get(timeout=_POLL_S)
            except queue.Empty:
                silent_s = time.monotonic() - silent_since
            if silent_s > STOP_GRACE_S and StopRequest.pending_s() > STOP_GRACE_S:
                raise EngineError(f"{self._server.url} has said nothing since this run was asked to stop")
            if silent_s > call_timeout.DEADLINE_S:
                raise DeadlineError(
                    f"{self._server.url} has said nothing for {call_timeout.DEADLINE_S:g} s; every logged token is "
                    "kept: look at the server, then run again to continue"
                )

    def load_policy(self, folder: Path, version: int) -> None:
        """Make sure that the server has these weights, see VllmServer.take; every slot must be free."""
        self._require_free()
        digest = weights_digest(folder)
        before, self._name = self._name, self._server.take(folder, digest, reload=self._reload)
        if before not in ("", self._name, self._server.name):
            self._server.forget(before)
        self.policy_version, self.policy_digest = version, digest

    @property
    def url(self) -> str:
        """API root of the server."""
        return self._server.url

    def identity(self) -> ServerIdentity | None:
        """See HasIdentity. Returns None for a keyed server: it may report logits for log-probs, and its sampler
        identifies it."""
        if self._server.names_weights or self.samplers:
            return None
        return identity_of(self._server, self._name, self.tokenizer, self.vocab_size)

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._completions.close()
        self._server.close()


def _probe(*prefix: int, top_k: int) -> Request:
    """Build a request that only tests what the server does."""
    return Request(
        uid="probe", prompt_ids=np.ones(1, np.int32), prefix_ids=np.array(prefix, np.int32), key=0, top_k=top_k,
        max_new_tokens=len(prefix) + 1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a stream: tokens or an error; with neither, the stream has ended."""

    name: str
    token_ids: list[int]
    logprobs: list[float]
    error: str = ""
    was_cut: bool = False
    """True if the connection was cut after the stream's beginning."""


class Completions:
    """Concurrent streams of POST {url}/completions, by name; a queue holds their chunks."""

    def __init__(self, url: str, headers: Mapping[str, str], *, most: int, patience_s: float | None = None) -> None:
        self._url = url
        self.said: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self._client = HttpClient(headers=headers, most=most, patience_s=patience_s)
        self._running: dict[str, Future[None]] = {}

    def start(self, name: str, body: Mapping[str, Any]) -> None:
        self._running[name] = self._client.start(self._run(name, body))

    def stop(self, name: str) -> None:
        """End a stream that is still running; the server stops decoding when the connection closes."""
        if (stream := self._running.pop(name, None)) is not None:
            stream.cancel()

    def close(self) -> None:
        """End every stream and the thread."""
        self._client.close()

    async def _run(self, name: str, body: Mapping[str, Any]) -> None:
        call = Call(url=f"{self._url}/completions", body=body, purpose=f"tokens of {name}")
        try:
            async with aclosing(self._client.stream(call)) as lines:
                async for line in lines:
                    if line.startswith(_DATA) and (text := line.removeprefix(_DATA)) != _DONE:
                        self._say(name, text)
            self.said.put(Chunk(name, [], []))
        except MopdError as error:
            self.said.put(Chunk(name, [], [], error=str(error), was_cut=isinstance(error, BrokenOffError)))
        except Exception as error:  # any error must reach the run, which would wait forever
            self.said.put(Chunk(name, [], [], error=f"{type(error).__name__}: {error}"))

    def _say(self, name: str, text: str) -> None:
        """Pass on the tokens of one event. Raises EngineError when it has another form, or lacks a log-prob of a
        token."""
        try:
            event = Event.model_validate_json(text)
        except ValidationError as error:
            raise EngineError(f"{validation_problem(error)}, in event {redacted(text[:300])!r}") from None
        if event.error is not None:
            raise EngineError(redacted(getattr(event.error, "message", str(event.error)))[:500])
        for choice in event.choices:
            if choice.token_ids:
                values = choice.logprobs.token_logprobs if choice.logprobs else []
                if len(values) != len(choice.token_ids):
                    raise EngineError(
                        f"{len(choice.token_ids)} tokens and {len(values)} log-probs, in event {redacted(text[:300])!r}"
                    )
                self.said.put(
                    Chunk(
                        name, choice.token_ids, [_logprob(*pair) for pair in zip(choice.token_ids, values, strict=True)]
                    )
                )


def _logprob(token: int, value: float | None) -> float:
    """Check a streamed log-prob; vLLM's value for an impossible token is allowed, because repeated tokens may have
    it."""
    if value == LOWEST:
        return LOWEST
    try:
        return checked_logprob(value, token)
    except ValueError as error:
        raise EngineError(str(error)) from None
