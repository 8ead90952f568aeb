"""A teacher behind vLLM's real server, read by OpenAI's completions API; and the exchanges that other tests read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from serving import Server, serving

from mopd_dataplane.errors import EngineError
from mopd_dataplane.models import hf
from mopd_dataplane.score.echo_logprobs import EchoLogprobs
from mopd_dataplane.score.vllm_logprobs import ServerLogprobs

EXCHANGES = Path(__file__).parents[1] / "data" / "vllm-0.32-echo.json"
SEQUENCES = [np.array([5, 6, 7, 8, 9], np.int64), np.array([30, 31, 32], np.int64)]
CLOSE = 2e-5


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path]) -> Iterator[Server]:
    with serving(models[0]) as running:
        yield running


@pytest.fixture
def teacher(server: Server, models: tuple[Path, Path]) -> Iterator[EchoLogprobs]:
    tokenizer = hf.load_tokenizer(models[0])
    vocab_size = int(hf.model_shape(models[0])["vocab_size"])
    teacher = EchoLogprobs(models[0], url=server.url, vocab_size=vocab_size, tokenizer=tokenizer)
    yield teacher
    teacher.close()


@pytest.mark.parametrize("k", [0, 1, 3, 20])
def test_values_are_those_of_transformers(teacher: EchoLogprobs, models: tuple[Path, Path], k: int) -> None:
    model = hf.load_model(models[0], dtype="float32")
    for ids, result in zip(SEQUENCES, teacher.read(SEQUENCES, k), strict=True):
        with torch.no_grad():
            plain = model(torch.from_numpy(ids)[None]).logits[0, :-1].double().log_softmax(-1).numpy()
        np.testing.assert_allclose(result.token_logprobs, plain[np.arange(len(plain)), ids[1:]], atol=CLOSE)
        np.testing.assert_allclose(result.logprobs, -np.sort(-plain)[:, :k], atol=CLOSE)


def test_more_than_the_server_names_is_refused(teacher: EchoLogprobs) -> None:
    with pytest.raises(EngineError, match="logprobs"):
        teacher.read(SEQUENCES, 64)


def test_tokenizer_and_identity(teacher: EchoLogprobs, server: Server, models: tuple[Path, Path]) -> None:
    tokenizer = hf.load_tokenizer(models[0])
    teacher.check_tokenizer(tokenizer)
    other = ServerLogprobs(models[0], url=server.url, vocab_size=teacher.vocab_size)
    assert teacher.identity(tokenizer).difference(other.identity(tokenizer)) < 1e-4
    other.close()


def test_recorded_exchanges_are_those_of_this_server(server: Server, models: tuple[Path, Path]) -> None:
    for exchange in json.loads(EXCHANGES.read_text())["exchanges"]:
        body = exchange["request"] | {"model": str(models[0])}
        response = httpx2.post(f"{server.url}/completions", json=body, timeout=120)
        assert response.status_code == exchange["status"]
        if response.is_success:
            mine, theirs = (_logprobs(answer) for answer in (response.json(), exchange["answer"]))
            assert mine["tokens"] == theirs["tokens"]
            np.testing.assert_allclose(mine["token_logprobs"][1:], theirs["token_logprobs"][1:], atol=CLOSE)
            assert [row and list(row) for row in mine["top_logprobs"]] == [
                row and list(row) for row in theirs["top_logprobs"]
            ]


def _logprobs(answer: Any) -> Any:
    return answer["choices"][0]["logprobs"]
