"""A deterministic engine without a model: a Markov chain with a heavy-tailed distribution of lengths.

It implements the Engine protocol, samples with the product's own noise, and its logits are rows of a table, so the same
request gives the same bits in any batch. The length-bias experiment and the fault tests run on it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.sampling_masks import sampling_masks_of
from mopd_dataplane.errors import EngineError
from mopd_dataplane.rollout.engines.engine import GOING, LENGTH, RESCORED, STOP, Request, StepOutput
from mopd_dataplane.rollout.engines.philox import key_words
from mopd_dataplane.rollout.engines.sampling import SAMPLERS, by_sampler, sampler

EOS = 0


class ToyEngine:
    """Token t + 1 is drawn from a row that tokens t - 1 and t choose; the first prompt token sets the chance of EOS.

    A prompt that begins with token h ends each position with probability about 1 / mean_length(h), where the means of
    the prompts are log-normal: most samples are short, a few are very long.
    """

    lockstep = True
    samplers = tuple(SAMPLERS)

    def __init__(self, *, slots: int, vocab: int = 12, mean_length: float = 30.0, spread: float = 0.9) -> None:
        self.slots = slots
        self.vocab_size = vocab
        self.context_length = 1 << 20
        self.tokenizer_digest = "toy"
        self._mean_length = mean_length
        self._spread = spread
        self._live: dict[int, tuple[Request, list[int]]] = {}
        self.load_policy(Path(), 0)

    def load_policy(self, folder: Path, version: int) -> None:
        """Another version is another table."""
        self.policy_version = version
        self.policy_digest = f"toy-{version}"
        draw = np.random.Generator(np.random.Philox(key=version))
        self._table = draw.normal(0, 1, (self.vocab_size, self.vocab_size, self.vocab_size)).astype(np.float32)
        means = self._mean_length * draw.lognormal(-(self._spread**2) / 2, self._spread, self.vocab_size)
        self._hazard = 1 / np.maximum(means, 2.0)

    def admit(self, requests: Sequence[tuple[int, Request]]) -> dict[int, NDArray[np.float32]]:
        """See Engine.admit."""
        rescored = {}
        for slot, request in requests:
            if slot in self._live:
                raise EngineError(f"slot {slot} is not free")
            self._live[slot] = (request, request.prefix_ids.tolist())
            if len(request.prefix_ids):
                rescored[slot] = self._rescore(request)
        return rescored

    def step(self) -> StepOutput:
        """See Engine.step."""
        slots = np.array(list(self._live), np.int64)
        live = [self._live[slot] for slot in slots]
        positions = np.array([len(response) for _, response in live], np.int64)
        logits = np.stack([self._logits(request, response) for request, response in live])
        requests = [request for request, _ in live]
        keys = np.stack([key_words(request.key) for request in requests])
        temperature, top_k, top_p = _settings(requests)
        tokens, logprobs = np.zeros(len(live), np.int32), np.zeros(len(live), np.float32)
        inside = np.zeros(logits.shape, np.bool_)
        for kind, rows in by_sampler([request.sampler for request in requests]):
            distribution = kind.of(logits[rows], temperature[rows], top_k[rows], top_p[rows])
            tokens[rows] = distribution.draw(keys[rows], positions[rows], temperature[rows])
            logprobs[rows], inside[rows] = distribution.logprobs(tokens[rows]), distribution.kept()
        needs_mask = np.array([request.sampling_mask for request in requests])
        inside_masks = sampling_masks_of(inside, needs_mask) if needs_mask.any() else None
        finished = np.zeros(len(slots), np.uint8)
        for row, (request, response) in enumerate(live):
            response.append(int(tokens[row]))
            full = len(response) >= request.max_new_tokens
            finished[row] = STOP if tokens[row] == EOS else LENGTH if full else GOING
            if finished[row]:
                del self._live[int(slots[row])]
        return StepOutput(slots, positions.astype(np.int32), tokens, logprobs, finished, inside_masks)

    def release(self, slot: int) -> None:
        """See Engine.release."""
        self._live.pop(slot, None)

    def save(self, file: Path, requests: Sequence[tuple[int, Request]], *, limit_bytes: int) -> int:
        """Nothing to save: its whole state is the request."""
        return 0

    def restore(self, file: Path, requests: Sequence[Request]) -> list[tuple[str, float]]:
        """See save."""
        return []

    def close(self) -> None:
        """Nothing to free."""

    def _logits(self, request: Request, response: list[int]) -> NDArray[np.float32]:
        """[V] of the next token: the hazard of EOS is exact, the rest is the table's row."""
        head = int(request.prompt_ids[0]) % self.vocab_size
        last = response[-1] if response else head
        before = response[-2] if len(response) > 1 else head
        row = self._table[before, last].astype(np.float64)
        row[EOS] = -np.inf
        hazard = self._hazard[head]
        row[EOS] = np.log(hazard / (1 - hazard)) + np.log(np.exp(row).sum())
        logits: NDArray[np.float32] = row.astype(np.float32)
        return logits

    def _rescore(self, request: Request) -> NDArray[np.float32]:
        ids = request.prefix_ids.tolist()
        count = min(len(ids), RESCORED)
        logits = np.stack([self._logits(request, ids[:length]) for length in range(len(ids) - count, len(ids))])
        distribution = sampler(request.sampler).of(logits, *_settings([request] * count))
        return distribution.logprobs(request.prefix_ids[-count:])


def _settings(requests: list[Request]) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    return (
        np.array([request.temperature for request in requests]),
        np.array([request.top_k for request in requests], np.int64),
        np.array([request.top_p for request in requests]),
    )
