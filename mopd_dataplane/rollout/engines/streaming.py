"""Common base of the engines that run in another process: they send requests and receive tokens as these arrive.

    admit ──_send──▶ the engine ──_listen──▶ Streams ──step──▶ the loop, one token a slot
                                  a slot that ends, or is released ──_cancel──▶ the engine

An engine that cannot score a prefix draws the newest RESCORED prefix tokens again (see sampler_arguments.py). The first
tokens for such a slot are the self-check of the resume; new tokens follow.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mopd_dataplane.errors import DeadlineError, EngineError
from mopd_dataplane.models.architecture import context_length
from mopd_dataplane.models.hf import load_tokenizer, model_shape, stop_ids, tokenizer_digest
from mopd_dataplane.models.vllm_replies import LOWEST
from mopd_dataplane.rollout.engines import call_timeout
from mopd_dataplane.rollout.engines.engine import GOING, LENGTH, RESCORED, STOP, Request, StepOutput
from mopd_dataplane.rollout.engines.sampler_arguments import SamplerArguments
from mopd_dataplane.rollout.engines.sampling import SAMPLERS
from mopd_dataplane.rollout.stop_strings import StopText

Noise = Literal["keyed", "seeded"]
MOST_CUTS = 5
"""How often one request may be interrupted and started again."""


@dataclass
class Stream:
    """One live slot."""

    name: str
    """The engine's name of the request; never used again."""
    request: Request
    stops: StopText
    again: tuple[int, ...]
    """Prefix tokens that the engine draws again before it continues."""
    position: int
    """Response position of the next token for the loop."""
    rescored: list[float] = field(default_factory=list)
    arrived: deque[tuple[int, float]] = field(default_factory=deque)
    ended: bool = False
    """True once the engine will send no more tokens of it."""
    heard_s: float = field(default_factory=time.monotonic)
    heard: list[int] = field(default_factory=list)
    """New tokens so far, both those passed to the loop and those still waiting."""
    continued: int = 0
    """Number of tokens in `heard` that are already in the prefix of the request."""
    cuts: int = 0
    """How often the request was started again after the tokens that had arrived."""
    admission: list[float] | None = None
    """Log-probs of the prefix tokens that were drawn again at admission, saved when the request was started again."""

    @property
    def is_rescored(self) -> bool:
        """True once all prefix tokens that the engine draws again have come back."""
        return len(self.rescored) == len(self.again)


class Streams:
    """The live slots of one engine."""

    def __init__(self, slots: int, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        self._slots = slots
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._live: dict[int, Stream] = {}
        self._by_name: dict[str, Stream] = {}
        self._opened = 0

    def __len__(self) -> int:
        return len(self._live)

    def open(self, slot: int, request: Request, *, again: int) -> Stream:
        """Register a request. The engine will draw the newest `again` tokens of its prefix once more."""
        if slot in self._live or not 0 <= slot < self._slots:
            raise EngineError(f"slot {slot} of {self._slots} is not free")
        prefix = request.prefix_ids.tolist()
        stops = StopText(self._tokenizer, request.stop, prefix)
        self._opened += 1
        name = f"{self._opened}-{request.uid}"
        stream = Stream(name, request, stops, tuple(prefix[len(prefix) - again :]), len(prefix))
        self._live[slot] = self._by_name[name] = stream
        return stream

    def arrive(self, name: str, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add new tokens of a request; those of a request that was closed meanwhile are dropped.

        Raises EngineError when a prefix token comes back changed, or a new one is impossible.
        """
        if (stream := self._by_name.get(name)) is None:
            return
        stream.heard_s = time.monotonic()
        for token, logprob in zip(ids, logprobs, strict=True):
            if stream.is_rescored:
                if logprob <= LOWEST:
                    raise EngineError(
                        f"the engine drew token {token} of sample {stream.request.uid} with log-prob {logprob:g}, its "
                        "sign for an impossible token; nothing of it was written: look at the engine's logits "
                        "processors, then run again to continue"
                    )
                stream.arrived.append((token, logprob))
                stream.heard.append(token)
                continue
            due = stream.again[len(stream.rescored)]
            if token != due:
                raise EngineError(
                    f"the engine had to repeat token {due} of sample {stream.request.uid} and said {token}: it does "
                    "not run this package's sampler; see docs/engines.md, then run again to continue"
                )
            stream.rescored.append(logprob)

    def begin_again(self, name: str, *, again: int) -> Stream | None:
        """Continue a request whose connection was cut after the tokens that arrived, under a new name.

        again: number of tokens that the engine draws once more. Returns None when nothing is left to request: the
        request was closed, or all its tokens are here. Raises EngineError for a request that was cut MOST_CUTS times
        before.
        """
        if (stream := self._by_name.get(name)) is None:
            return None
        if stream.cuts == MOST_CUTS:
            raise EngineError(
                f"the connection of sample {stream.request.uid} was cut {MOST_CUTS + 1} times; every logged token is "
                "kept: look at the server, then run again to continue"
            )
        prefix = [*stream.request.prefix_ids.tolist(), *stream.heard[stream.continued :]]
        if len(prefix) >= stream.request.max_new_tokens:
            stream.ended = True
            return None
        if stream.admission is None and stream.is_rescored:
            stream.admission = stream.rescored
        again = min(again, len(prefix))
        stream.request = replace(stream.request, prefix_ids=np.array(prefix, np.int32))
        stream.again, stream.rescored = tuple(prefix[len(prefix) - again :]), []
        stream.continued, stream.cuts = len(stream.heard), stream.cuts + 1
        self._opened += 1
        del self._by_name[name]
        stream.name = f"{self._opened}-{stream.request.uid}"
        self._by_name[stream.name] = stream
        return stream

    def knows(self, name: str) -> bool:
        """Check if a live slot has this request."""
        return name in self._by_name

    def end(self, name: str) -> None:
        """Record that the engine has finished a request. Raises EngineError when it was still repeating the prefix."""
        if (stream := self._by_name.get(name)) is None:
            return
        stream.ended = True
        if not stream.is_rescored:
            raise EngineError(
                f"the engine ended sample {stream.request.uid} before it had repeated {len(stream.again)} tokens of "
                "its prefix; run again to continue with a new engine"
            )

    @property
    def ready(self) -> bool:
        """True if some slot's next token is here.

        Raises DeadlineError when a slot has been silent for too long, EngineError when one ended too early.
        """
        silent_since = time.monotonic() - call_timeout.DEADLINE_S
        for slot, stream in self._live.items():
            if stream.ended and not stream.arrived:
                raise EngineError(
                    f"the engine ended sample {stream.request.uid} at response position {stream.position} of at most "
                    f"{stream.request.max_new_tokens}, and not with an end-of-sequence token; run again to continue"
                )
            if not stream.arrived and stream.heard_s < silent_since:
                raise DeadlineError(
                    f"the engine has said nothing about slot {slot} (sample {stream.request.uid}) for "
                    f"{call_timeout.DEADLINE_S:g} s; every logged token is kept: look at the engine, then run again"
                )
        return any(stream.arrived for stream in self._live.values())

    def step(self) -> tuple[StepOutput, list[str]]:
        """Return the next token of each slot that has one, and the names of the requests that end with it."""
        rows, ended = [], []
        for slot, stream in list(self._live.items()):
            if not stream.arrived:
                continue
            token, logprob = stream.arrived.popleft()
            finished = self._finished(stream, token)
            rows.append((slot, stream.position, token, logprob, finished))
            stream.position += 1
            if finished:
                ended.append(self.close(slot))
        slots, positions, tokens, logprobs, finished_ = zip(*rows, strict=True)
        output = StepOutput(
            np.array(slots, np.int64), np.array(positions, np.int32), np.array(tokens, np.int32),
            np.array(logprobs, np.float32), np.array(finished_, np.uint8),
        )  # fmt: skip
        return output, ended

    def _finished(self, stream: Stream, token: int) -> int:
        if stream.stops.add(token) or token in self._stop_ids:
            return STOP
        return LENGTH if stream.position + 1 >= stream.request.max_new_tokens else GOING

    def close(self, slot: int) -> str:
        """Close a live slot. Returns the name of its request."""
        name = self._live.pop(slot).name
        del self._by_name[name]
        return name

    def __contains__(self, slot: int) -> bool:
        return slot in self._live


class StreamingEngine(ABC):
    """Slots, tokenizer and shape of the model; Engine documents the public methods."""

    lockstep = False
    policy_version: int
    policy_digest: str

    def __init__(self, folder: Path, *, slots: int, noise: Noise) -> None:
        self.slots = slots
        self.samplers: tuple[str, ...] = tuple(SAMPLERS) if noise == "keyed" else ()
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer_digest = tokenizer_digest(self.tokenizer)
        self._shape = model_shape(folder)
        self.vocab_size = int(self._shape["vocab_size"])
        self.context_length = context_length(self._shape)
        self._streams = Streams(slots, self.tokenizer, stop_ids(folder, self.tokenizer))

    def admit(self, requests: Sequence[tuple[int, Request]]) -> dict[int, NDArray[np.float32]]:
        """See Engine.admit. Other live slots continue meanwhile; their tokens wait for the following steps."""
        opened = []
        for slot, request in requests:
            self._check(request)
            stream = self._streams.open(slot, request, again=min(self._again, len(request.prefix_ids)))
            self._ask(stream)
            opened.append((slot, stream, bool(stream.again)))
        while not all(stream.is_rescored for _, stream, _ in opened):
            self._listen()
        return {
            slot: np.array(stream.rescored if stream.admission is None else stream.admission, np.float32)
            for slot, stream, has_prefix in opened
            if has_prefix
        }

    @property
    def _again(self) -> int:
        """Upper bound of the prefix tokens that are drawn once more."""
        return RESCORED if self.samplers else 0

    def _ask(self, stream: Stream) -> None:
        """Send a request that continues a stream's prefix."""
        ids = [*stream.request.prompt_ids.tolist(), *stream.request.prefix_ids.tolist()]
        self._send(stream, ids[: len(ids) - len(stream.again)])

    def step(self) -> StepOutput:
        """See Engine.step. Waits until at least one slot's next token is here."""
        while not self._streams.ready or self._waiting():
            self._listen()
        output, ended = self._streams.step()
        self._cancel(ended)
        return output

    def release(self, slot: int) -> None:
        if slot in self._streams:
            self._cancel([self._streams.close(slot)])

    def _require_free(self) -> None:
        """Check that no slot is live, so that another policy may be loaded. Raises EngineError."""
        if len(self._streams):
            raise EngineError(f"{len(self._streams)} slots are still live; release them before loading another policy")

    def save(self, file: Path, requests: Sequence[tuple[int, Request]], *, limit_bytes: int) -> int:
        """Save nothing, because the engine's keys and values cannot be read; prefixes are read again."""
        return 0

    def restore(self, file: Path, requests: Sequence[Request]) -> list[tuple[str, float]]:
        """Restore nothing, see save."""
        return []

    def _drawing(self, request: Request, again: Sequence[int], *, arguments_as: str) -> dict[str, Any]:
        """Return vLLM's settings for a continuation of a request's prefix, whose newest tokens `again` are drawn once
        more."""
        settings = {
            "max_tokens": request.max_new_tokens - len(request.prefix_ids) + len(again),
            "logprobs": 0,
            "ignore_eos": True,  # Streams ends a sample; a repeated prefix may hold end tokens
        }
        if self.samplers:
            arguments = SamplerArguments.of(request, again).as_arguments()
            return settings | {"temperature": 0.0, "top_p": 1.0, "top_k": 0, arguments_as: arguments}
        drawn = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        return settings | drawn | {"seed": native_seed(request)}

    def _check(self, request: Request) -> None:  # noqa: B027  most engines take every request
        """Check that the engine can serve a request as specified. Raises MismatchError."""

    def _waiting(self) -> bool:
        """Check if a message from the engine is waiting."""
        return False

    @abstractmethod
    def _send(self, stream: Stream, prompt: list[int]) -> None:
        """Request a continuation of `prompt` (the ids before the ones to be drawn again)."""

    @abstractmethod
    def _listen(self) -> None:
        """Wait for the engine's next message and pass it to the streams."""

    @abstractmethod
    def _cancel(self, names: Sequence[str]) -> None:
        """Tell the engine that these requests need no more tokens."""


def native_seed(request: Request) -> int:
    """Return the seed of an engine's own generator. It differs for every prefix, so that a resume does not repeat
    noise."""
    text = f"{request.key:032x}:{len(request.prefix_ids)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
