"""An engine that replays scripted responses at a given rate, in place of a model.

The length, the turns and every token of a response are a function of its uid. So a sample that was interrupted anywhere
must end with the tokens of `expected_response`, and a difference shows that the data plane lost or changed one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.bench.fleet_settings import Lengths
from mopd_dataplane.errors import EngineError
from mopd_dataplane.rollout.engines.engine import GOING, LENGTH, RESCORED, STOP, Request, StepOutput
from mopd_dataplane.rollout.engines.sampling import sample_key
from mopd_dataplane.rollout.tools.sandbox import Turn

VOCABULARY = 150_000
SIGMA = 0.8
"""Sigma of the lognormal length of a turn."""
TAIL_SHARE, TAIL_EXPONENT = 0.02, 1.2
"""Share of the turns whose length is multiplied by 1 + a Pareto variable, and the exponent of that variable."""
MOST_TURNS = 5
REPLY_TOKENS = (8, 64)
"""Shortest and longest reply of the environment between two turns."""
_LOW_BITS = (1 << 64) - 1
_MAX_LOGPROB = 4.0
"""Log-probs are uniform from minus this to 0, in nat."""


@dataclass(frozen=True)
class Script:
    """A response before it is written.

    Example: Script(turns=((0, 310), (342, 800)), finish_reason="stop"), with a reply of 32 tokens in between.
    """

    turns: tuple[tuple[int, int], ...]
    """(first position, end position) of each turn of the policy; the environment's replies lie in between."""
    finish_reason: str
    """stop or length."""

    def turn_at(self, position: int) -> int:
        """Return the turn that writes the token at this response position, else the turn that ends there."""
        return next(number for number, (_, end) in enumerate(self.turns) if position <= end)


@lru_cache(maxsize=1 << 16)
def script_of(uid: str, lengths: Lengths) -> Script:
    """Draw the turns of a response; the same uid gives the same ones."""
    noise = np.random.default_rng(sample_key(uid) & _LOW_BITS)
    count = int(noise.integers(2, MOST_TURNS + 1)) if noise.random() < lengths.multi_turn else 1
    turns: list[tuple[int, int]] = []
    first = 0
    while True:
        drawn = noise.lognormal(math.log(lengths.mean_tokens) - SIGMA**2 / 2, SIGMA)
        if noise.random() < TAIL_SHARE:
            drawn *= 1 + noise.pareto(TAIL_EXPONENT)
        end = first + max(2, int(min(drawn, lengths.longest)))
        if end >= lengths.longest:
            return Script((*turns, (first, lengths.longest)), "length")
        turns.append((first, end))
        first = end + int(noise.integers(REPLY_TOKENS[0], REPLY_TOKENS[1] + 1))
        if len(turns) == count or first >= lengths.longest:
            return Script(tuple(turns), "stop")


def tokens_at(
    keys: NDArray[np.uint64], positions: NDArray[np.integer]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return token and log-prob of response positions: both [n]. keys: [n] or [1], from `replay_key`."""
    mixed = keys + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    share = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    return (mixed % np.uint64(VOCABULARY)).astype(np.int32), -np.float32(_MAX_LOGPROB) * share


def replay_key(uid: str) -> int:
    """Return the 64-bit number from which the tokens of a response follow."""
    return sample_key(uid) & _LOW_BITS


def expected_response(uid: str, lengths: Lengths) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]:
    """Return tokens, log-probs and loss mask of the whole response, each [R]; 0 in both where the environment wrote."""
    script = script_of(uid, lengths)
    length = script.turns[-1][1]
    mask = np.zeros(length, np.uint8)
    for first, end in script.turns:
        mask[first:end] = 1
    tokens, logprobs = tokens_at(np.array([replay_key(uid)], np.uint64), np.arange(length))
    return tokens, logprobs * mask, mask


def reply(turn: Turn, lengths: Lengths) -> list[int] | None:
    """Return the environment's reply after a turn of the policy; None after the last one."""
    script, position = script_of(turn.uid, lengths), len(turn.response)
    number = script.turn_at(position)
    if number + 1 == len(script.turns):
        return None
    places = np.arange(position, script.turns[number + 1][0])
    tokens, _ = tokens_at(np.array([replay_key(turn.uid)], np.uint64), places)
    ids: list[int] = tokens.tolist()
    return ids


class ReplayEngine:
    """Decodes up to `slots` scripted responses, one token of each per step, at most `rate` steps a second.

    A response pauses before each turn but its first, as if a tool ran; the pause is exponential. The engine never gives
    a token early: if the machine is slower than `rate`, it lags behind.
    """

    lockstep = False
    samplers: tuple[str, ...] = ("replay",)
    vocab_size = VOCABULARY
    tokenizer_digest = "replay"

    def __init__(self, *, slots: int, rate: float, pause_s: float, lengths: Lengths, version: int) -> None:
        self.slots = slots
        self.context_length = 1 << 24
        self.finished: dict[str, float] = {}
        """Monotonic time at which each response ended, by uid; whoever reads a time removes it."""
        self._rate, self._pause_s, self._lengths = rate, pause_s, lengths
        self._uids = [""] * slots
        self._keys = np.zeros(slots, np.uint64)
        self._positions = np.full(slots, -1, np.int32)
        """Response position of each slot's next token, -1 of a free slot."""
        self._ends = np.zeros(slots, np.int32)
        """End of each slot's turn."""
        self._is_last = np.zeros(slots, np.bool_)
        """Slots whose response ends with its turn."""
        self._ready = np.zeros(slots)
        """Monotonic time before which each slot gives no token."""
        self._pauses: dict[tuple[str, int], float] = {}
        """End of each pause that has begun, by uid and position: weights may change during a pause."""
        self._next_step = time.monotonic()
        self.load_policy(Path(), version)

    def load_policy(self, folder: Path, version: int) -> None:
        """Another version gives the same tokens."""
        self.policy_version = version
        self.policy_digest = f"replay-{version}"

    def admit(self, requests: Sequence[tuple[int, Request]]) -> dict[int, NDArray[np.float32]]:
        """See Engine.admit. Raises EngineError for a slot that is not free."""
        rescored = {}
        for slot, request in requests:
            if self._positions[slot] >= 0:
                raise EngineError(f"slot {slot} is not free; release it first")
            position = len(request.prefix_ids)
            script = script_of(request.uid, self._lengths)
            number = next(number for number, (_, end) in enumerate(script.turns) if position < end)
            first, end = script.turns[number]
            self._uids[slot], self._keys[slot] = request.uid, replay_key(request.uid)
            self._positions[slot], self._ends[slot] = position, end
            self._is_last[slot] = number + 1 == len(script.turns)
            self._ready[slot] = self._end_of_pause(request.uid, position) if 0 < position == first else 0.0
            if position:
                places = np.arange(max(0, position - RESCORED), position)
                rescored[slot] = tokens_at(self._keys[slot : slot + 1], places)[1]
        return rescored

    def step(self) -> StepOutput:
        """See Engine.step. Waits until the step is due, and until a slot is not paused."""
        live = self._positions >= 0
        wake = max(self._next_step, float(self._ready[live].min()))
        if (wait := wake - time.monotonic()) > 0:
            time.sleep(wait)
        now = time.monotonic()
        self._next_step = max(self._next_step + 1 / self._rate, now)
        slots = np.flatnonzero(live & (self._ready <= max(now, wake)))
        positions = self._positions[slots].copy()
        tokens, logprobs = tokens_at(self._keys[slots], positions)
        self._positions[slots] += 1
        finished = np.full(len(slots), GOING, np.uint8)
        for row in np.flatnonzero(self._positions[slots] == self._ends[slots]).tolist():
            slot = int(slots[row])
            finished[row] = LENGTH if self._ends[slot] == self._lengths.longest else STOP
            if self._is_last[slot]:
                self.finished[self._uids[slot]] = now
            self.release(slot)
        return StepOutput(slots, positions, tokens, logprobs, finished)

    def release(self, slot: int) -> None:
        """See Engine.release."""
        self._positions[slot] = -1

    def save(self, file: Path, requests: Sequence[tuple[int, Request]], *, limit_bytes: int) -> int:
        """Nothing to save: the request is its whole state."""
        return 0

    def restore(self, file: Path, requests: Sequence[Request]) -> list[tuple[str, float]]:
        """See save."""
        return []

    def close(self) -> None:
        """Nothing to free."""

    def _end_of_pause(self, uid: str, position: int) -> float:
        noise = np.random.default_rng((replay_key(uid), position))
        return self._pauses.setdefault((uid, position), time.monotonic() + noise.exponential(self._pause_s))
