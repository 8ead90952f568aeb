"""A teacher behind a server that answers in ways that no server should: nothing of it becomes a signal, and what can
pass is tried again."""

from __future__ import annotations

import email.utils
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_server import (
    Misbehave,
    ModelServer,
    changes,
    cuts_before,
    cuts_chunks,
    cuts_inside,
    fails,
    is_endless,
    is_silent,
    never_ends,
    sends,
    serve_model,
    speaks_no_http,
)

from mopd_dataplane.base import http_client
from mopd_dataplane.base.http_client import Call, HttpClient
from mopd_dataplane.errors import DeadlineError, EngineError, MopdError
from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import model_shape
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.run.steps.server_identity import TOLERANCE
from mopd_dataplane.score.vllm_logprobs import ServerLogprobs

SEQUENCES = [np.array([5, 6, 7, 8, 9], np.int64), np.array([30, 31, 32], np.int64)]
K = 3
CONFIG = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.2,
}  # fmt: skip


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
    yield shared_server
    shared_server.misbehave = None


@pytest.fixture
def teacher(server: ModelServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerLogprobs]:
    """A teacher whose client is patient for a second."""
    monkeypatch.setattr(http_client, "PATIENCE_S", 3.0)
    monkeypatch.setattr(http_client, "_PAUSE_S", 0.05)
    teacher = ServerLogprobs(folder, url=server.url, vocab_size=int(model_shape(folder)["vocab_size"]))
    yield teacher
    teacher.close()


def row(change: Callable[[dict[str, Any]], Any]) -> Misbehave:
    """Change the entries {token: {logprob, rank}} of the second token."""

    def change_row(reply: Any) -> None:
        rows = reply["choices"][0]["prompt_logprobs"]
        changed = change(rows[1])
        rows[1] = rows[1] if changed is None else changed

    return changes(change_row)


def entry(**values: Any) -> Misbehave:
    """Change what is said of the first token that the second row names."""
    return row(lambda entries: next(iter(entries.values())).update(values))


def rows(change: Callable[[list[Any]], Any]) -> Misbehave:
    """Replace prompt_logprobs."""

    def change_rows(reply: Any) -> None:
        choice = reply["choices"][0]
        choice["prompt_logprobs"] = change(choice["prompt_logprobs"])

    return changes(change_rows)


def unranked(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries of a row, with ranks beyond the likeliest."""
    return {token: value | {"rank": value["rank"] + 50} for token, value in entries.items()}


def without(name: str) -> Misbehave:
    """The first choice lacks a field."""
    return changes(lambda reply: {"choices": [{k: v for k, v in reply["choices"][0].items() if k != name}]})


def every_row_likely(reply: Any) -> None:
    for entries in reply["choices"][0]["prompt_logprobs"][1:]:
        for value in entries.values():
            value["logprob"] = -0.1


WRONG: dict[str, tuple[Misbehave, str]] = {
    "a row of null": (rows(lambda all_rows: [None, None, *all_rows[2:]]), "prompt_logprobs.1 is null"),
    "a row too few": (rows(lambda all_rows: all_rows[:-1]), "prompt_logprobs has [24] rows for [35] tokens"),
    "a row too many": (rows(lambda all_rows: [*all_rows, {}]), "prompt_logprobs has [46] rows"),
    "no rows": (rows(lambda all_rows: []), "prompt_logprobs has 0 rows"),
    "rows of lists": (rows(lambda all_rows: [[] for _ in all_rows]), "should be an object"),
    "null for the rows": (rows(lambda all_rows: None), "choices.0.prompt_logprobs: Input should be a valid array"),
    "no prompt_logprobs": (without("prompt_logprobs"), "Field required"),
    "no choices": (changes(lambda reply: {"id": "x"}), "choices: Field required"),
    "an empty list of choices": (changes(lambda reply: {"choices": []}), "at least 1 item"),
    "null for the choices": (changes(lambda reply: {"choices": None}), "choices: Input should be a valid array"),
    "a list": (changes(lambda reply: [reply]), "should be an object"),
    "an error with status 200": (changes(lambda reply: {"error": "no room"}), "no room"),
    "HTML": (sends(b"<html><body>Sign in</body></html>", kind="text/html"), "200 text/html '<html>"),
    "nothing": (sends(b""), "EOF while parsing"),
    "half of the JSON": (sends(b'{"choices": [{"prompt_logpr'), "EOF while parsing"),
    "bytes that are no text": (sends(b'{"choices": "\xff\xfe"}'), "Invalid JSON"),
    "a deep nesting": (sends(b"[" * 100_000), "recursion limit"),
    "a wrong encoding": (sends(b"no gzip", Content_Encoding="gzip"), "DecodingError"),
    "a log-prob above 0": (entry(logprob=0.5), r"log-prob 0\.5, above 0"),
    "vLLM's sign for impossible": (entry(logprob=-9999.0), "log-prob -9999, which is vLLM's sign for an impossible"),
    "a log-prob below that": (entry(logprob=-1e30), "sign for an impossible token"),
    "NaN": (entry(logprob=float("nan")), "log-prob nan; allowed are finite"),
    "minus infinity": (entry(logprob=float("-inf")), "log-prob -inf; allowed are finite"),
    "null for a log-prob": (entry(logprob=None), r"logprob: Input should be a valid number \(found None\)"),
    "text for a log-prob": (entry(logprob="-1"), r"logprob: Input should be a valid number \(found '-1'\)"),
    "rank 0": (entry(rank=0), "rank: Input should be greater than or equal to 1"),
    "no rank": (row(lambda entries: next(iter(entries.values())).pop("rank") and None), "rank: Field required"),
    "another token": (row(lambda entries: {"60": next(iter(entries.values()))}), "no log-prob of token"),
    "too few likeliest tokens": (
        row(unranked),
        "of the 3 likeliest tokens.*--max-logprobs of at least 3",
    ),
    "a token outside the vocabulary": (
        row(lambda entries: entries | {"5000": {"logprob": -20.0, "rank": 70}}), "token 5000 of a vocabulary of",
    ),
    "a token that is no number": (
        row(lambda entries: entries | {"x": {"logprob": -20.0, "rank": 70}}), "valid integer",
    ),
    "probabilities above 1": (changes(every_row_likely), "probabilities that add up to"),
    "status 400": (sends(b'{"message": "too long"}', status=400), "400 application/json.*too long"),
    "status 401": (sends(b"", status=401), "set the server's key in the environment variable VLLM_API_KEY"),
    "status 404": (sends(b"", status=404), "check the url"),
    "status 501": (sends(b"", status=501), "501"),
    "a redirect": (sends(b"", status=307, Location="/elsewhere"), "307.*check the url"),
    "another protocol": (speaks_no_http, "no HTTP.*SSH-2"),
    "a body without end": (is_endless, "more than [0-9]+ bytes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_an_error_that_names_it(server: ModelServer, teacher: ServerLogprobs, kind: str) -> None:
    server.misbehave, said = WRONG[kind]
    with pytest.raises(EngineError, match=said) as refused:
        teacher.read(SEQUENCES, K)
    assert str(refused.value).startswith(f"POST {server.url}/completions (log-probs of ")
    assert "internal error" not in str(refused.value)


def test_a_good_answer_has_the_numbers_of_the_model(server: ModelServer, teacher: ServerLogprobs) -> None:
    for ids, said in zip(SEQUENCES, teacher.read(SEQUENCES, K), strict=True):
        values = server.logprobs(ids.tolist())[:-1]
        np.testing.assert_allclose(said.token_logprobs, values[np.arange(len(values)), ids[1:]], atol=1e-6)
        np.testing.assert_array_equal(said.ids, np.argsort(-values)[:, :K])
        np.testing.assert_allclose(said.logprobs, -np.sort(-values)[:, :K], atol=1e-6)


def test_rounding_above_0_is_read_as_0(server: ModelServer, teacher: ServerLogprobs) -> None:
    def certain(reply: Any) -> None:
        for entries in reply["choices"][0]["prompt_logprobs"][1:]:
            for value in entries.values():
                value["logprob"] = 5e-4 if value["rank"] == 1 else -30.0

    server.misbehave = changes(certain)
    for said in teacher.read(SEQUENCES, K):
        assert said.logprobs[:, 0].tolist() == [0.0] * len(said.token_logprobs)
        assert (said.token_logprobs <= 0).all()


PASSING: dict[str, Misbehave] = {
    "429": sends(b"slow down", status=429),
    "429 with a pause": sends(b"slow down", status=429, Retry_After="1"),
    "500": sends(b'{"error": "engine"}', status=500),
    "502": sends(b"<html>bad gateway</html>", status=502, kind="text/html"),
    "503": sends(b"loading", status=503),
    "a cut before the answer": cuts_before,
    "a cut inside the answer": cuts_inside,
    "a cut between chunks": cuts_chunks,
}


@pytest.mark.parametrize("kind", PASSING)
def test_what_can_pass_is_tried_again(server: ModelServer, teacher: ServerLogprobs, kind: str) -> None:
    good = teacher.read(SEQUENCES, K)
    before = len(server.asked)
    server.misbehave = fails(2, PASSING[kind])
    for said, expected in zip(teacher.read(SEQUENCES, K), good, strict=True):
        np.testing.assert_array_equal(said.token_logprobs, expected.token_logprobs)
    assert len(server.asked) - before == len(SEQUENCES) + 2


def test_a_pause_that_the_server_names_may_exceed_patience(
    server: ModelServer, teacher: ServerLogprobs, capfd: pytest.CaptureFixture[str]
) -> None:
    teacher._server._client._patience_s = 0.2
    before = replace(teacher._server.traffic)
    server.misbehave = fails(1, sends(b"slow down", status=429, Retry_After="1"))
    began = time.monotonic()
    teacher.read(SEQUENCES, K)
    assert time.monotonic() - began >= 1
    traffic = teacher._server.traffic
    assert (traffic.requests - before.requests, traffic.retries - before.retries) == (len(SEQUENCES), 1)
    assert not capfd.readouterr().err
    server.misbehave = sends(b"quota", status=429, Retry_After="9000")
    with pytest.raises(EngineError, match=r"failed 1 times in 0 s: .*429.*quota.*run again to continue"):
        teacher.read(SEQUENCES, K)


def test_a_long_pause_is_announced(
    server: ModelServer, teacher: ServerLogprobs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_client, "_LONGEST_PAUSE_S", 0.5)
    server.misbehave = fails(1, sends(b"slow down", status=429, Retry_After="1"))
    teacher.read(SEQUENCES, K)
    assert re.search(r"failed once: .*429.*; tried again for another 600 s, next in 1 s", capfd.readouterr().err)


def test_forms_of_retry_after() -> None:
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    for text, low, high in (
        ("7", 7, 7),
        (in_a_minute, 55, 61),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        ("soon", 0, 0),
    ):
        assert low <= http_client._retry_after_s({"retry-after": text}) <= high, text
    assert http_client._retry_after_s({}) == 0


@pytest.mark.parametrize("kind", ["500", "a cut before the answer"])
def test_patience_ends(
    server: ModelServer, teacher: ServerLogprobs, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server.misbehave = PASSING[kind]
    with pytest.raises(EngineError, match=r"failed \d+ times in [123] s: .*(500|cut).*run again to continue"):
        teacher.read(SEQUENCES, K)
    assert "tried again for another" in capfd.readouterr().err, "the user is told what the run waits for"


def test_a_server_that_is_started_anew_is_waited_for(folder: Path) -> None:
    client = HttpClient(headers={"Connection": "close"}, most=1, patience_s=1)
    with serve_model(folder) as first:
        call = Call(method="GET", url=f"{first.url}/models")
        client.request(call)
    with pytest.raises(EngineError, match=r"failed \d+ times in [01] s: the server does not answer"):
        client.request(call)
    client._patience_s = 30
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(client.request, call)
        time.sleep(0.3)
        assert not later.done()
        with serve_model(folder, port=first.server_port):
            assert later.result(timeout=30).is_success
    client.close()


@pytest.mark.parametrize(("misbehave", "limit", "said"), [
    (never_ends, "BODY_S", r"had not ended 0\.5 s after its headers"),
    (is_silent, "WORK_S", r"was not answered in 0\.5 s"),
    (sends(b"", status=503), "WORK_S", r"was not answered in 0\.5 s \(\d+ failed tries, the last: .* 503"),
])  # fmt: skip
def test_a_deadline_ends_the_wait(
    server: ModelServer, teacher: ServerLogprobs, monkeypatch: pytest.MonkeyPatch, misbehave: Misbehave, limit: str,
    said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(http_client, limit, 0.5)
    server.misbehave = misbehave
    with pytest.raises(DeadlineError, match=said):
        teacher.read(SEQUENCES, K)


def test_the_first_failure_cancels_the_other_requests(server: ModelServer, teacher: ServerLogprobs) -> None:
    def one_is_silent(connection: Any, reply: Any) -> bool:
        if len(reply["choices"][0]["prompt_logprobs"]) == len(SEQUENCES[0]):
            return is_silent(connection, reply)
        return sends(b"", status=400)(connection, reply)

    server.misbehave = one_is_silent
    with pytest.raises(EngineError, match="400"):
        teacher.read(SEQUENCES, K)


@pytest.fixture
def usual_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whatever handler a test before has left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_ctrl_c")
@pytest.mark.parametrize("misbehave", [is_silent, never_ends, sends(b"", status=503)])
def test_ctrl_c_ends_the_wait(server: ModelServer, teacher: ServerLogprobs, misbehave: Misbehave) -> None:
    teacher._server._client._patience_s = 600
    server.misbehave = misbehave
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        teacher.read(SEQUENCES, K)
    teacher.close()
    assert time.monotonic() - began < http_client.BODY_S / 3


def test_one_model_is_recognised_and_another_is_not(
    server: ModelServer, teacher: ServerLogprobs, folder: Path, tmp_path: Path
) -> None:
    tokenizer = server.tokenizer
    before = teacher.identity(tokenizer)
    assert (before.name, before.root) == (server.name, str(folder))
    assert teacher.identity(tokenizer).difference(before) == 0
    other = make_student(sections.Student(config=CONFIG, tokenizer="characters"), tmp_path / "other", seed=4)
    server.exchange_weights(other)
    assert teacher.identity(tokenizer).difference(before) > TOLERANCE
    server.exchange_weights(folder)
    assert before._replace(logprobs=before.logprobs[1:]).difference(before) == float("inf")


def test_keys_in_an_answer_are_not_repeated(
    server: ModelServer, teacher: ServerLogprobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret-key-of-a-team")
    server.misbehave = sends(json.dumps({"message": "key s3cret-key-of-a-team is wrong"}).encode(), status=403)
    with pytest.raises(MopdError, match=r"key \*\*\* is wrong"):
        teacher.read(SEQUENCES, K)
