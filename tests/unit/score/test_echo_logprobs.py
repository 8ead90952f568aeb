"""A teacher behind OpenAI's completions API: values of the model, forms of requests, and answers that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_server import Misbehave, ModelServer, changes, fails, sends, serve_model

from mopd_dataplane.base import http_client
from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.models.echo_replies import echo_call, read_echoed_ids
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.run.steps.server_identity import TOLERANCE
from mopd_dataplane.score.echo_logprobs import EchoLogprobs
from mopd_dataplane.score.server_use import ServerUse
from mopd_dataplane.score.sglang_logprobs import SglangLogprobs
from mopd_dataplane.score.vllm_logprobs import ServerLogprobs, sequence_logprobs

SEQUENCES = [np.array([5, 6, 7, 8, 9], np.int64), np.array([30, 31, 32], np.int64), np.array([12, 12], np.int64)]
K = 3
CONFIG = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.2,
}  # fmt: skip
EXCHANGES = Path(__file__).parents[2] / "data" / "vllm-0.32-echo.json"
"""Exchanges recorded from a real server; tests/vllm/test_vllm_echo.py repeats their requests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with one token per character."""
    student = sections.Student(config=CONFIG, tokenizer="characters")
    return make_student(student, tmp_path_factory.mktemp("models") / "tiny", seed=3)


@pytest.fixture(scope="module")
def shared_server(folder: Path) -> Iterator[ModelServer]:
    with serve_model(folder) as server:
        yield server


@pytest.fixture
def server(shared_server: ModelServer) -> Iterator[ModelServer]:
    """A server that behaves until a test says otherwise."""
    shared_server.asked.clear()
    yield shared_server
    shared_server.misbehave = None
    shared_server.refused_fields = {}
    shared_server.names_ids = True


@pytest.fixture
def teacher(server: ModelServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EchoLogprobs]:
    monkeypatch.setattr(http_client, "PATIENCE_S", 3.0)
    monkeypatch.setattr(http_client, "_PAUSE_S", 0.05)
    teacher = EchoLogprobs(
        folder,
        url=server.url,
        vocab_size=int(hf.model_shape(folder)["vocab_size"]),
        tokenizer=hf.load_tokenizer(folder),
    )
    yield teacher
    teacher.close()


def completions(server: ModelServer) -> list[Any]:
    """Bodies of the requests for completions."""
    return [body for path, body in server.asked if path == "/v1/completions"]


def assert_values_of_the_model(server: ModelServer, teacher: ServerLogprobs, k: int) -> None:
    for ids, result in zip(SEQUENCES, teacher.read(SEQUENCES, k), strict=True):
        values = server.logprobs(ids.tolist())[:-1]
        np.testing.assert_allclose(result.token_logprobs, values[np.arange(len(values)), ids[1:]], atol=1e-6)
        np.testing.assert_array_equal(result.ids, np.argsort(-values)[:, :k])
        np.testing.assert_allclose(result.logprobs, -np.sort(-values)[:, :k], atol=1e-6)


@pytest.mark.parametrize("k", [0, 1, K, 97])
def test_values_are_those_of_the_model(server: ModelServer, teacher: EchoLogprobs, k: int) -> None:
    assert_values_of_the_model(server, teacher, k)
    assert {body["max_tokens"] for body in completions(server)} == {0}


FORMS: dict[str, dict[str, Any]] = {
    "max_tokens = 0": {"max_tokens": 0},
    "fields of vLLM": {"max_tokens": 0, "return_tokens_as_token_ids": None},
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_server_that_refuses_a_field_is_asked_without_it(
    server: ModelServer, teacher: EchoLogprobs, kind: str
) -> None:
    server.refused_fields = FORMS[kind]
    assert_values_of_the_model(server, teacher, 0)
    tries = 2 if kind == "max_tokens = 0" else 3
    bodies = completions(server)
    assert [body["prompt"] for body in bodies[:tries]] == [SEQUENCES[0].tolist()] * tries
    assert {body["max_tokens"] for body in bodies[tries - 1 :]} == {1}, "the generated token is dropped"
    assert len(bodies) == tries - 1 + len(SEQUENCES)
    assert ("return_tokens_as_token_ids" in bodies[-1]) == (tries == 2)


def test_a_server_that_names_tokens_by_text_gives_log_probs_only(server: ModelServer, teacher: EchoLogprobs) -> None:
    server.names_ids = False
    assert_values_of_the_model(server, teacher, 0)
    with pytest.raises(EngineError, match=r"names a token by its text.*return_tokens_as_token_ids"):
        teacher.read(SEQUENCES, K)


def test_both_ways_of_reading_agree(server: ModelServer, teacher: EchoLogprobs, folder: Path) -> None:
    other = ServerLogprobs(folder, url=server.url, vocab_size=int(hf.model_shape(folder)["vocab_size"]))
    for echoed, ranked in zip(teacher.read(SEQUENCES, K), other.read(SEQUENCES, K), strict=True):
        for mine, theirs in zip(echoed, ranked, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    tokenizer = server.tokenizer
    assert teacher.identity(tokenizer).difference(other.identity(tokenizer)) < 1e-6
    other.close()


def test_another_model_has_another_identity(
    server: ModelServer, teacher: EchoLogprobs, folder: Path, tmp_path: Path
) -> None:
    before = teacher.identity(server.tokenizer)
    other = make_student(sections.Student(config=CONFIG, tokenizer="characters"), tmp_path / "other", seed=4)
    server.exchange_weights(other)
    assert teacher.identity(server.tokenizer).difference(before) > TOLERANCE
    server.exchange_weights(folder)


@pytest.mark.parametrize("names_ids", [True, False])
def test_another_tokenizer_is_refused(server: ModelServer, teacher: EchoLogprobs, names_ids: bool) -> None:
    server.names_ids = names_ids
    teacher.check_tokenizer(server.tokenizer)
    tokenizer = server.tokenizer

    class Shifted:
        """Reads the same characters as other ids."""

        def encode(self, text: str, **settings: Any) -> list[int]:
            return [token + 1 for token in tokenizer.encode(text, **settings)]

        def decode(self, ids: list[int]) -> str:
            return str(tokenizer.decode([token - 1 for token in ids]))

    server.tokenizer = Shifted()
    with pytest.raises((MismatchError, EngineError), match=r"the student as|the prompt has token"):
        teacher.check_tokenizer(tokenizer)
    server.tokenizer = tokenizer


def test_a_token_before_the_text_is_no_other_tokenizer(server: ModelServer, teacher: EchoLogprobs) -> None:
    def begin(reply: Any) -> None:
        logprobs = reply["choices"][0]["logprobs"]
        if server.asked[-1][1]["prompt"] == "".join(server.asked[-1][1]["prompt"]):  # a text, not ids
            logprobs["tokens"].insert(0, "token_id:1")
            logprobs["token_logprobs"].insert(0, None)

    server.misbehave = lambda connection, reply: (
        isinstance((server.asked[-1][1] or {}).get("prompt"), str) and changes(begin)(connection, reply)
    )
    teacher.check_tokenizer(server.tokenizer)


def field(name: str, change: Callable[[list[Any]], Any]) -> Misbehave:
    """Replace a list of `logprobs`."""

    def change_field(reply: Any) -> None:
        logprobs = reply["choices"][0]["logprobs"]
        logprobs[name] = change(logprobs[name])

    return changes(change_field)


def every(change: Callable[[list[Any]], list[Any]]) -> Misbehave:
    """Change every list of `logprobs` in the same way."""

    def change_all(reply: Any) -> None:
        logprobs = reply["choices"][0]["logprobs"]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            logprobs[name] = change(logprobs[name])

    return changes(change_all)


def at_1(value: Any) -> Callable[[list[Any]], list[Any]]:
    """Replace the second entry."""
    return lambda entries: [entries[0], value, *entries[2:]]


def of_choice(value: Any) -> Misbehave:
    return changes(lambda reply: {"choices": [{"text": "a", **value}]})


WRONG: dict[str, tuple[Misbehave, str]] = {
    "no logprobs": (of_choice({}), r"choices\.0\.logprobs is missing"),
    "null for logprobs": (of_choice({"logprobs": None}), r"choices\.0\.logprobs is missing"),
    "echo is ignored": (every(lambda rows: rows[-1:]), "1 rows for 5 tokens of the prompt: the server ignores `echo`"),
    "nothing is returned": (every(lambda rows: []), "0 rows for 5 tokens.*ignores `echo`"),
    "a row too few": (every(lambda rows: rows[:-1]), "has 4 rows for 5 tokens of the prompt"),
    "rows too many": (every(lambda rows: [*rows, *rows[-2:]]), "has 7 rows for 5 tokens of the prompt and one"),
    "fewer log-probs than tokens": (field("token_logprobs", lambda v: v[:-1]), "has 5 tokens and 4 token_logprobs"),
    "fewer likeliest than tokens": (field("top_logprobs", lambda v: v[:-1]), "top_logprobs has 4 rows for 5 tokens"),
    "no likeliest": (field("top_logprobs", lambda v: None), "top_logprobs has 0 rows for 5 tokens, with 3 likeliest"),
    "another token": (field("tokens", at_1("token_id:60")), r"tokens\.1 is 'token_id:60', and the prompt has token 6 "),
    "another text": (field("tokens", at_1("many")), r"tokens\.1 is 'many', and the prompt has token 6 "),
    "a token before the prompt": (
        every(lambda rows: [rows[0], *rows]), r"tokens\.1 is 'token_id:5', and the prompt has token 6",
    ),
    "a null row": (field("token_logprobs", at_1(None)), r"token_logprobs\.1 is null"),
    "a null row of likeliest": (field("top_logprobs", at_1(None)), r"top_logprobs\.1 is null"),
    "too few likeliest": (
        field("top_logprobs", at_1({"token_id:6": -40.0})), r"has 1 of the 3 likeliest.*--max-logprobs 3.*score\.topk",
    ),
    "a likeliest token twice": (
        field("top_logprobs", at_1({"token_id:60": -9.0, "token_id:060": -9.0, "token_id:61": -9.0})),
        "has 2 of the 3 likeliest",
    ),
    "a log-prob above 0": (field("token_logprobs", at_1(0.5)), r"row 1: token 6 has log-prob 0\.5, above 0"),
    "the sign for impossible": (field("token_logprobs", at_1(-9999.0)), "log-prob -9999, which is vLLM's sign"),
    "NaN": (field("token_logprobs", at_1(float("nan"))), "log-prob nan; allowed are finite"),
    "text for a log-prob": (field("token_logprobs", at_1("-1")), r"valid number \(found '-1'\)"),
    "another log-prob than among the likeliest": (
        field("token_logprobs", at_1(-0.25)), r"token 6 has -0\.25 in token_logprobs, -\d+\.?\d* in top_logprobs",
    ),
    "a token likelier than the likeliest": (
        field("top_logprobs", at_1({f"token_id:{token}": -50.0 for token in (70, 71, 72)})),
        "is not among the 3 likeliest, which end at -50",
    ),
    "probabilities above 1": (
        field("top_logprobs", at_1({f"token_id:{token}": -0.01 for token in (70, 71, 72)})), "add up to 2.97",
    ),
    "a token outside the vocabulary": (
        field("top_logprobs", at_1({f"token_id:{token}": -5.0 for token in (70, 71, 5000)})), "5000 of a vocabulary",
    ),
    "an impossible likeliest token": (
        field("top_logprobs", at_1({f"token_id:{token}": -9999.0 for token in (70, 71, 72)})), "vLLM's sign",
    ),
    "HTML": (sends(b"<html>", kind="text/html"), "200 text/html '<html>"),
    "status 400": (sends(b'{"message": "too long"}', status=400), "400 application/json.*too long"),
    "status 404": (sends(b"", status=404), "check the url: it is that of the API root of a server that answers `echo`"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_refused_at_the_first_request(server: ModelServer, teacher: EchoLogprobs, kind: str) -> None:
    server.misbehave, expected = WRONG[kind]
    with pytest.raises(EngineError, match=expected) as refused:
        teacher.read(SEQUENCES, K)
    assert str(refused.value).startswith(f"POST {server.url}/completions (log-probs of 5 tokens) failed: ")
    assert "internal error" not in str(refused.value)
    prompts = [body["prompt"] for body in completions(server)]
    assert prompts == [SEQUENCES[0].tolist()] * (3 if kind == "status 400" else 1), "no other text is sent"
    server.misbehave = None
    assert_values_of_the_model(server, teacher, K)


def test_a_wrong_answer_is_refused_later_too(server: ModelServer, teacher: EchoLogprobs) -> None:
    teacher.read(SEQUENCES, K)
    server.misbehave = field("token_logprobs", at_1(None))
    with pytest.raises(EngineError, match=r"token_logprobs\.1 is null"):
        teacher.read(SEQUENCES, K)


def test_requests_retries_and_tokens_are_counted(server: ModelServer, teacher: EchoLogprobs) -> None:
    before = teacher.use
    teacher.read(SEQUENCES, K)
    assert teacher.use.minus(before) == ServerUse(requests=3, retries=0, tokens=10)
    server.misbehave = fails(2, sends(b"slow down", status=429))
    teacher.read(SEQUENCES, K)
    assert teacher.use.minus(before) == ServerUse(requests=6, retries=2, tokens=20)


@pytest.fixture
def sglang(server: ModelServer, folder: Path) -> Iterator[SglangLogprobs]:
    """A teacher read by SGLang's own API, from a stand-in: no answer of a real server has been recorded."""
    size = int(hf.model_shape(folder)["vocab_size"])
    tokenizer = hf.load_tokenizer(folder)
    teacher = SglangLogprobs(folder, url=server.url, vocab_size=size, tokenizer=tokenizer)
    yield teacher
    teacher.close()


@pytest.mark.parametrize("k", [0, K])
def test_values_by_the_api_of_sglang(server: ModelServer, sglang: EchoLogprobs, k: int) -> None:
    assert_values_of_the_model(server, sglang, k)
    assert {path for path, body in server.asked if body} == {"/generate"}
    sglang.check_tokenizer(server.tokenizer)


def test_wrong_answers_by_the_api_of_sglang(server: ModelServer, sglang: EchoLogprobs) -> None:
    def changed(name: str, change: Callable[[list[Any]], Any]) -> Misbehave:
        return changes(lambda reply: reply["meta_info"].update({name: change(reply["meta_info"][name])}))

    for name, change, expected in (
        ("input_token_logprobs", lambda rows: None, "input_token_logprobs is missing"),
        ("input_token_logprobs", lambda rows: rows[1:], "4 rows for 5 tokens"),
        ("input_token_logprobs", at_1([-1.0, 60, None]), "the prompt has token 6"),
        ("input_token_logprobs", at_1([None, 6, None]), "is null; only the first"),
        ("input_top_logprobs", lambda rows: None, "top_logprobs has 0 rows"),
        ("input_top_logprobs", at_1([[None, token, None] for token in (60, 61, 62)]), "log-prob nan"),
        ("input_top_logprobs", at_1([[-9.0, 60, None]]), "has 1 of the 3 likeliest"),
    ):
        server.misbehave = changed(name, change)
        with pytest.raises(EngineError, match=expected) as refused:
            sglang.read(SEQUENCES, K)
        assert str(refused.value).startswith(f"POST {server.url.removesuffix('/v1')}/generate (log-probs of 5 tokens)")


def test_answers_of_a_real_vllm_server() -> None:
    """Recorded with vLLM's server; the log-probs beside them are transformers'."""
    recorded = json.loads(EXCHANGES.read_text())
    plain, ids, texts = np.array(recorded["plain"]), recorded["ids"], recorded["texts"]
    for exchange in recorded["exchanges"]:
        k = exchange["k"]
        call = echo_call("http://127.0.0.1:8000/v1", "models/v0", ids, k, {})
        content = json.dumps(exchange["answer"]).encode()
        answer = http_client.Answer(call, exchange["status"], "application/json", content)
        if exchange["refused"]:
            with pytest.raises(EngineError, match=exchange["refused"]):
                read_echoed_ids(answer, ids, k, plain.shape[1], lambda token: (texts[str(token)],))
            continue
        rows = read_echoed_ids(answer, ids, k, plain.shape[1], lambda token: (texts[str(token)],))
        result = sequence_logprobs(np.array(ids), rows, k)
        np.testing.assert_allclose(result.token_logprobs, plain[np.arange(len(ids) - 1), ids[1:]], atol=2e-5)
        np.testing.assert_allclose(result.logprobs, -np.sort(-plain[:-1])[:, :k], atol=2e-5)
        np.testing.assert_array_equal(result.ids, np.argsort(-plain[:-1])[:, :k])
