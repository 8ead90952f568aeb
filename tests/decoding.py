"""What tests of every engine share: a tiny model's shape, requests for it, a decode loop, and a store in a list."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.engines.engine import Engine, Request, StepOutput, check_step
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.sampling import sample_key

Answer = tuple[list[int], list[float], int]
"""Tokens, log-probs, and how it ended."""

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
TOLERANCE = 2e-5
"""For TINY by two implementations, or in two batches: float32 through two layers and a 64-wide sum leaves a few units
of 2^-24 relative on logits of size ~10, and the softmax adds their rounding up."""


def make_requests(count: int, *, longest: int = 40, **settings: Any) -> list[Request]:
    """Requests with random prompts of fewer than `longest` tokens, the same ones every time."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(4, 100, rng.integers(1, longest)).astype(np.int32) for _ in range(count)]
    options = {"max_new_tokens": 30} | settings
    return [Request(uid=str(i), prompt_ids=ids, key=sample_key(str(i)), **options) for i, ids in enumerate(prompts)]


def decode(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    """Run requests to their end, refilling each slot as it gets free; answers by uid."""
    waiting, free = list(requests), list(range(engine.slots))
    running: dict[int, Request] = {}
    answers: dict[str, Answer] = {request.uid: ([], [], 0) for request in requests}
    while waiting or running:
        admitted = []
        while waiting and free:
            slot, request = free.pop(), waiting.pop(0)
            running[slot] = request
            admitted.append((slot, request))
        engine.admit(admitted)
        output = engine.step()
        check_step(output, engine.vocab_size)
        columns = (output.slots, output.positions, output.token_ids, output.logprobs, output.finished)
        for slot, position, token, logprob, finished in zip(*(column.tolist() for column in columns), strict=True):
            uid = running[slot].uid
            tokens, logprobs, _ = answers[uid]
            assert position == len(tokens)
            tokens.append(token)
            logprobs.append(logprob)
            if finished:
                answers[uid] = (tokens, logprobs, finished)
                del running[slot]
                free.append(slot)
    return answers


def assert_same(ours: dict[str, Answer], theirs: dict[str, Answer], *, tolerance: float = TOLERANCE) -> None:
    """Same tokens and endings; log-probs within the tolerance."""
    assert {uid: (answer[0], answer[2]) for uid, answer in ours.items()} == {
        uid: (answer[0], answer[2]) for uid, answer in theirs.items()
    }
    for uid, (_, logprobs, _) in ours.items():
        np.testing.assert_allclose(logprobs, theirs[uid][1], rtol=0, atol=tolerance)


class Shelf:
    """A store in a list that, like the real one, keeps each uid once."""

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}
        self.offered = 0

    def commit(self, samples: list[Sample]) -> None:
        """Keep what is new."""
        self.offered += len(samples)
        for sample in samples:
            self.samples.setdefault(sample.uid, sample)


class Preempted(HfEngine):
    """Gets a real SIGTERM at its n-th step; the rollout ends politely after it."""

    def __init__(self, folder: Path, *, at: int, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self._left = at

    def step(self) -> StepOutput:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step()


def content(samples: dict[str, Sample]) -> dict[str, tuple[bytes, ...]]:
    """Everything of each sample that an interruption must not change."""
    return {
        uid: (
            s.tokens.tobytes(), s.logprobs.tobytes(), s.loss_mask.tobytes(), s.version_starts.tobytes(),
            s.versions.tobytes(), s.finish_reason.encode(), str((s.prompt_id, s.writer_seq, s.turns)).encode(),
        )
        for uid, s in samples.items()
        if s.logprobs is not None
    }  # fmt: skip
