"""Two versions of a tiny real model, requests for it, and a started engine that the tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_dataplane import config
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.engine import Engine, Request, check_step
from mopd_dataplane.rollout.sampling import sample_key
from mopd_dataplane.rollout.vllm import VllmEngine
from mopd_dataplane.run.student import make_student

sys.path.insert(0, str(Path(__file__).parent))  # helpers of these tests

Answer = tuple[list[int], list[float], int]
Decode = Callable[[Engine, Sequence[Request]], dict[str, Answer]]

SHAPE = {
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


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two versions of a random two-layer Qwen3 with one token per character."""
    home = tmp_path_factory.mktemp("models")
    first, second = (make_student(config.Student(config=SHAPE), home / f"v{i}", seed=3 + i) for i in range(2))
    return first, second


@pytest.fixture(scope="session")
def keyed(models: tuple[Path, Path]) -> Iterator[VllmEngine]:
    """vLLM with this package's noise, on the first version."""
    engine = VllmEngine(models[0], slots=8, threads=1)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def make_requests() -> Callable[..., list[Request]]:
    """make_requests(count, **settings): requests with random prompts, the same ones every time."""

    def made(count: int, *, longest: int = 40, **settings: Any) -> list[Request]:
        rng = np.random.default_rng(5)
        prompts = [rng.integers(4, 100, rng.integers(1, longest)).astype(np.int32) for _ in range(count)]
        given = {"max_new_tokens": 30} | settings
        return [Request(uid=str(i), prompt_ids=ids, key=sample_key(str(i)), **given) for i, ids in enumerate(prompts)]

    return made


@pytest.fixture(scope="session")
def decode() -> Decode:
    """decode(engine, requests): run requests to their end, refilling each slot as it gets free."""

    def decoded(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
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

    return decoded


class Shelf:
    """A store in a list that, like the real one, keeps each uid once."""

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}

    def commit(self, samples: list[Sample]) -> None:
        """Keep what is new."""
        for sample in samples:
            self.samples.setdefault(sample.uid, sample)


@pytest.fixture
def shelves() -> Callable[[], Shelf]:
    """An empty store at every call."""
    return Shelf
