"""Tokens of an engine in another process: kept as they arrive, and handed to the loop one per slot and step.

An engine that cannot score a prefix draws the newest RESCORED prefix tokens again (see sampler_arguments.py): what
arrives first for such a slot is the self-check of the resume, what follows is new.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from mopd_dataplane.errors import DeadlineError, EngineError
from mopd_dataplane.rollout.engines import call_timeout
from mopd_dataplane.rollout.engines.engine import GOING, LENGTH, STOP, Request, StepOutput
from mopd_dataplane.rollout.stop_strings import StopText


@dataclass
class Stream:
    """One live slot."""

    name: str
    """The engine's name of the request; never used twice."""
    request: Request
    stops: StopText
    again: tuple[int, ...]
    """Prefix tokens that the engine draws again before it continues."""
    position: int
    """Response position of the next token that is handed out."""
    rescored: list[float] = field(default_factory=list)
    arrived: deque[tuple[int, float]] = field(default_factory=deque)
    ended: bool = False
    """The engine sends no more tokens of it."""
    heard_s: float = field(default_factory=time.monotonic)

    @property
    def is_rescored(self) -> bool:
        """Every prefix token that is drawn again has come back."""
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
        """Take a request in; the engine will draw the newest `again` tokens of its prefix once more."""
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
        """New tokens of a request; those of a request that was closed meanwhile are dropped.

        Raises EngineError when a prefix token does not come back as it is.
        """
        if (stream := self._by_name.get(name)) is None:
            return
        stream.heard_s = time.monotonic()
        for token, logprob in zip(ids, logprobs, strict=True):
            if stream.is_rescored:
                stream.arrived.append((token, logprob))
                continue
            due = stream.again[len(stream.rescored)]
            if token != due:
                raise EngineError(
                    f"the engine had to repeat token {due} of sample {stream.request.uid} and said {token}: it does "
                    "not run this package's sampler; see docs/engines.md, then run again to continue"
                )
            stream.rescored.append(logprob)

    def knows(self, name: str) -> bool:
        """Whether a live slot has this request."""
        return name in self._by_name

    def end(self, name: str) -> None:
        """The engine has finished a request. Raises EngineError when it was still repeating the prefix."""
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
        """Whether some slot's next token is here.

        Raises DeadlineError when one has said nothing for too long, EngineError when one ended too early.
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
        """The next token of each slot that has one, and the names of the requests that end with it."""
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
        """Forget a live slot; the name of its request."""
        name = self._live.pop(slot).name
        del self._by_name[name]
        return name

    def __contains__(self, slot: int) -> bool:
        return slot in self._live
