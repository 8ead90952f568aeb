"""The student's top-k read from SGLang's own API: the values of a local teacher, requests of bounded size, and answers
that are refused. The server is a stand-in: no answer of a real one has been recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_server import Misbehave, ModelServer, changes, fails, sends, serve_model
from numpy.typing import NDArray

from mopd_dataplane.base import http_client
from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models import hf
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.records import Signal
from mopd_dataplane.score import sglang_logprobs
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.server_use import ServerUse
from mopd_dataplane.score.sglang_logprobs import ChosenTokens, SglangLogprobs, ordered_segments, segments
from mopd_dataplane.score.signal_kinds import StudentTopk
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.2,
}  # fmt: skip
K = 4
TOLERANCE = 2e-5
"""Largest difference of a float32 log-prob from that of the stand-in, which takes the softmax of float32 logits in
float64. Logits of these models stay below 16, where float32 resolves 1e-6; a sum over 100 tokens, and another order of
the matrix products (a segment ends before the text does), add a few such steps."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of a policy, and a teacher."""
    root = tmp_path_factory.mktemp("models")
    student = sections.Student(config=CONFIG, tokenizer="characters")
    return {name: make_student(student, root / name, seed=seed) for seed, name in enumerate(("v0", "v1", "teacher"))}


@pytest.fixture(scope="module")
def shared_server(folders: dict[str, Path]) -> Iterator[ModelServer]:
    with serve_model(folders["teacher"]) as server:
        yield server


@pytest.fixture
def server(shared_server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    """A server that behaves until a test says otherwise."""
    monkeypatch.setattr(http_client, "PATIENCE_S", 3.0)
    monkeypatch.setattr(http_client, "_PAUSE_S", 0.05)
    shared_server.asked.clear()
    yield shared_server
    shared_server.misbehave = None


@pytest.fixture
def teacher(server: ModelServer, folders: dict[str, Path]) -> Iterator[SglangLogprobs]:
    size = int(hf.model_shape(folders["teacher"])["vocab_size"])
    tokenizer = hf.load_tokenizer(folders["teacher"])
    with closing(SglangLogprobs(folders["teacher"], url=server.url, vocab_size=size, tokenizer=tokenizer)) as reader:
        yield reader


def make_texts(count: int = 3, length: int = 24) -> list[ChosenTokens]:
    """Texts of different lengths with tokens chosen at some of their positions, such as every one after a gap."""
    rng = np.random.default_rng(5)
    texts = []
    for number in range(count):
        tokens = rng.integers(4, 90, length + 3 * number)
        positions = np.setdiff1d(np.arange(4, len(tokens)), np.arange(8, 8 + 2 * number))
        ids = np.stack([rng.choice(90, K, replace=False) for _ in positions])
        texts.append(ChosenTokens(tokens, positions, ids))
    return texts


def make_samples() -> list[Scorable]:
    """Samples of mixed lengths and policy versions; some with tokens of a tool, one without trained tokens."""
    rng = np.random.default_rng(1)
    samples = []
    for number in range(5):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(4, 20))
        mask = np.ones(response, np.uint8) if number < 4 else np.zeros(response, np.uint8)
        mask[1:3] = (number + 1) % 2 if number < 4 else 0
        versions = np.repeat([[0, 0], [1, 1], [0, 1]][number % 3], [response // 2, response - response // 2])
        samples.append(
            Scorable(
                uid=f"{number:032x}", sample_row=number, prompt_id=f"p{number}", prompt_len=prompt, loss_mask=mask,
                tokens=rng.integers(4, 90, prompt + response).astype(np.int32), versions=versions.astype(np.int32),
                logprobs=-np.ones(response, np.float32),
            )
        )  # fmt: skip
    return samples


def generate_bodies(server: ModelServer) -> list[Any]:
    return [body for path, body in server.asked if path == "/generate"]


def assert_values_of_the_model(server: ModelServer, teacher: SglangLogprobs, texts: list[ChosenTokens]) -> None:
    for text, result in zip(texts, teacher.read_chosen(texts), strict=True):
        values = server.logprobs(text.tokens.tolist())[text.positions - 1]
        own = values[np.arange(len(values)), text.tokens[text.positions]]
        np.testing.assert_allclose(result.token_logprobs, own, atol=TOLERANCE)
        np.testing.assert_array_equal(result.ids, text.ids)
        np.testing.assert_allclose(result.logprobs, np.take_along_axis(values, text.ids, 1), atol=TOLERANCE)
        assert result.topk_source == "student"


@pytest.mark.parametrize("most", [1, 40, 200, 1 << 16])
def test_values_are_those_of_the_model(
    server: ModelServer, teacher: SglangLogprobs, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(sglang_logprobs, "SEGMENT_LOGPROBS", most)
    texts = make_texts()
    assert_values_of_the_model(server, teacher, texts)
    bodies = generate_bodies(server)
    split = [list(segments(text, most)) for text in texts]
    assert len(bodies) == sum(map(len, split))
    assert {body["sampling_params"]["max_new_tokens"] for body in bodies} == {1}
    if most == 1:
        assert len(bodies) == sum(len(text.positions) for text in texts)


def test_a_later_segment_finds_the_text_before_it_in_a_cache() -> None:
    """Other texts are between two segments of a text, which are in its order."""
    texts = make_texts()
    order = ordered_segments(texts, 100)
    assert [index for index, _ in order[: 2 * len(texts)]] == [0, 1, 2, 0, 1, 2]
    for index, text in enumerate(texts):
        assert [part for number, part in order if number == index] == list(segments(text, 100))


@pytest.mark.parametrize("most", [1, 30, 100, 1000, 1 << 16])
def test_segments_cover_every_position_once(most: int) -> None:
    for text in make_texts(4, 60):
        parts = list(segments(text, most))
        covered = [index for part in parts for index in range(part.first, part.last + 1)]
        assert covered == list(range(len(text.positions)))
        for part in parts:
            rows = len(part) - 1 - part.start
            assert rows * len(part.ids) <= most or part.first == part.last
            assert part.ids == tuple(np.unique(text.ids[part.first : part.last + 1]).tolist())
            assert part.prompt == text.tokens[: text.positions[part.last] + 1].tolist()


def test_positions_are_split_where_they_cost_less() -> None:
    """Log-probs grow with the positions, not with their square; a gap is not read."""
    rng = np.random.default_rng(0)
    text = ChosenTokens(np.zeros(2100, np.int64), np.arange(100, 2100), rng.integers(0, 30_000, (2000, 16)))
    returned = sum((len(part) - 1 - part.start) * len(part.ids) for part in segments(text, 1 << 16))
    assert returned < 0.06 * len(text.positions) * len(np.unique(text.ids))
    gap = ChosenTokens(np.zeros(9000, np.int64), np.array([5, 6, 8000, 8001]), np.tile(np.arange(16), (4, 1)))
    assert [(part.start, len(part)) for part in segments(gap, 1 << 16)] == [(4, 7), (7999, 8002)]
    assert list(segments(ChosenTokens(text.tokens, text.positions[:0], text.ids[:0]), 64)) == []


def pool_of(folders: dict[str, Path], url: str = "", *, is_remote: bool = False, reads: Any = "sglang") -> TeacherPool:
    """The teacher behind the server, or in this process without a url."""
    settings = sections.Teacher(source="" if is_remote else "x", url=url)
    spec = TeacherSpec(None if is_remote else folders["teacher"], settings)
    where: dict[str, Any] = {"engine": "vllm", "reads": reads} if url else {}
    return TeacherPool({"teacher": spec}, student_tokenizer=hf.load_tokenizer(folders["v0"]), **where)


def scored(
    folders: dict[str, Path], pool: TeacherPool, settings: sections.Score, kinds: tuple[str, ...] = ("topk", "logprob"),
    **others: Any,
) -> dict[tuple[str, str], Signal]:  # fmt: skip
    student = StudentTopk(lambda version: folders[f"v{version}"])
    with closing(pool):
        signals = list(score_samples(pool, "teacher", kinds, make_samples(), settings, student=student, **others))
    return {(signal.uid, signal.kind): signal for signal in signals}


@pytest.mark.parametrize(
    ("is_remote", "is_told", "most"), [(False, False, 30), (True, False, 1 << 16), (True, True, 30)]
)
def test_signals_are_those_of_a_teacher_here(
    server: ModelServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch,
    is_remote: bool, is_told: bool, most: int,
) -> None:  # fmt: skip
    """The teacher may read another prompt; the policy always reads its own."""
    torch.set_num_threads(1)
    monkeypatch.setattr(sglang_logprobs, "SEGMENT_LOGPROBS", most)

    def privileged(sample: Scorable) -> NDArray[Any]:
        return np.concatenate([np.arange(20, 27), sample.tokens[: sample.prompt_len]])

    renderer = {"render_prompt": privileged} if is_told else {}
    common: dict[str, Any] = {"batch_tokens": 64, "topk": K, "topk_source": "student"}
    local = scored(folders, pool_of(folders), sections.Score(**common), **renderer)
    served = sections.Score(engine="vllm", reads="sglang", **common)
    remote = scored(folders, pool_of(folders, server.url, is_remote=is_remote), served, **renderer)
    assert remote.keys() == local.keys()
    assert len(local) == 2 * len(make_samples())
    for key, signal in remote.items():
        other = local[key]
        assert (signal.topk_source, signal.is_first_choice) == (other.topk_source, None)
        if signal.kind == "topk":
            assert signal.topk_source == "student"
            np.testing.assert_array_equal(signal.topk_ids, other.topk_ids)
        for name in ("topk_ids", "topk_logprobs", "logprob"):
            mine, theirs = getattr(signal, name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
                np.testing.assert_allclose(mine, theirs, atol=TOLERANCE)
    assert any("token_ids_logprob" in body for body in generate_bodies(server))


def test_the_teachers_own_top_k_is_read_as_before(server: ModelServer, folders: dict[str, Path]) -> None:
    settings = sections.Score(engine="vllm", reads="sglang", batch_tokens=64, topk=K)
    for signal in scored(folders, pool_of(folders, server.url), settings).values():
        assert signal.kind != "topk" or signal.topk_source == "teacher"
        assert signal.kind != "logprob" or signal.is_first_choice is not None
    assert not any("token_ids_logprob" in body for body in generate_bodies(server))


def of_rows(name: str, change: Callable[[list[Any]], Any]) -> Misbehave:
    """Replace a list of `meta_info`."""

    def change_list(reply: Any) -> None:
        reply["meta_info"][name] = change(reply["meta_info"][name])

    return changes(change_list)


def in_row_1(change: Callable[[list[Any]], Any]) -> Misbehave:
    """Replace the log-probs of chosen tokens at one position."""
    return of_rows("input_token_ids_logprobs", lambda rows: [rows[0], change(rows[1]), *rows[2:]])


OWN, CHOSEN = "input_token_logprobs", "input_token_ids_logprobs"
WRONG: dict[str, tuple[Misbehave, str]] = {
    "chosen ids are ignored": (
        changes(lambda reply: reply["meta_info"].pop(CHOSEN) and None),
        r"input_token_ids_logprobs is missing, so the server ignores `token_ids_logprob`.*update the server",
    ),
    "log-probs are ignored": (of_rows(OWN, lambda rows: None), "input_token_logprobs is missing"),
    "the start is ignored": (
        of_rows(CHOSEN, lambda rows: [None, *rows]), "input_token_ids_logprobs has 22 rows, expected 21.* from 3 ",
    ),
    "a row too few": (of_rows(OWN, lambda rows: rows[:-1]), "input_token_logprobs has 20 rows, expected 21"),
    "another text": (
        of_rows(OWN, lambda rows: [rows[0], [-1.0, 95, None], *rows[2:]]), r"logprobs\.1 is of token 95, and the ",
    ),
    "a null row": (in_row_1(lambda row: None), r"row 1 \(position 4 of the prompt\): input_token_ids_logprobs is null"),
    "an id too few": (in_row_1(lambda row: row[1:]), r"has \d+ entries, expected one for .*missing: \[\d+\], not req"),
    "an id too many": (in_row_1(lambda row: [*row, [-9.0, 96, None]]), r"missing: none, not requested: \[96\]"),
    "an id twice": (in_row_1(lambda row: [*row, row[0]]), "entries, expected one for each"),
    "another id": (in_row_1(lambda row: [[-9.0, 96, None], *row[1:]]), r"missing: \[\d+\], not requested: \[96\]"),
    "a null log-prob": (in_row_1(lambda row: [[None, *row[0][1:]], *row[1:]]), "has log-prob None; allowed are finite"),
    "a log-prob above 0": (in_row_1(lambda row: [[0.5, *row[0][1:]], *row[1:]]), r"has log-prob 0\.5, above 0"),
    "the sign for impossible": (in_row_1(lambda row: [[-9999.0, *row[0][1:]], *row[1:]]), "sign for an impossible"),
    "text for a log-prob": (in_row_1(lambda row: [["-1", *row[0][1:]], *row[1:]]), r"valid number \(found '-1'\)"),
    "probabilities above 1": (in_row_1(lambda row: [[-0.01, *entry[1:]] for entry in row]), "add up to"),
    "a null own log-prob": (of_rows(OWN, lambda rows: [rows[0], [None, *rows[1][1:]], *rows[2:]]), "log-prob None"),
    "rows of the next position": (
        of_rows(CHOSEN, lambda rows: [None, *rows[2:], rows[1]]), "in input_token_logprobs, -.* in input_token_ids",
    ),
    "HTML": (sends(b"<html>", kind="text/html"), "200 text/html '<html>"),
    "status 400": (sends(b'{"message": "out-of-vocabulary"}', status=400), "400 application/json.*out-of-vocabulary"),
    "status 404": (sends(b"", status=404), "check the url: it is that of the API root of an SGLang server"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_refused_at_the_first_request(
    server: ModelServer, teacher: SglangLogprobs, kind: str
) -> None:
    texts = make_texts()
    server.misbehave, expected = WRONG[kind]
    with pytest.raises(EngineError, match=expected) as refused:
        teacher.read_chosen(texts)
    (body,) = generate_bodies(server)
    purpose = f"log-probs of {len(body['token_ids_logprob'])} chosen tokens at 20 positions"
    assert str(refused.value).startswith(f"POST {server.url.removesuffix('/v1')}/generate ({purpose}) failed: ")
    server.misbehave = None
    assert_values_of_the_model(server, teacher, texts)


def test_a_wrong_answer_is_refused_later_too(server: ModelServer, teacher: SglangLogprobs) -> None:
    teacher.read_chosen(make_texts())
    server.misbehave = in_row_1(lambda row: row[1:])
    with pytest.raises(EngineError, match="entries, expected one for each"):
        teacher.read_chosen(make_texts())


def test_another_order_of_the_ids_is_read(server: ModelServer, teacher: SglangLogprobs) -> None:
    server.misbehave = of_rows(CHOSEN, lambda rows: [None, *(row[::-1] for row in rows[1:])])
    assert_values_of_the_model(server, teacher, make_texts())


def test_requests_retries_and_tokens_are_counted(
    server: ModelServer, teacher: SglangLogprobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text in several segments is sent up to the end of each; a pause that the server names is waited for."""
    monkeypatch.setattr(sglang_logprobs, "SEGMENT_LOGPROBS", 200)
    texts = make_texts()
    sent = [len(part) for text in texts for part in segments(text, 200)]
    before = teacher.use
    server.misbehave = fails(2, sends(b"slow down", status=429, Retry_After="1"))
    assert_values_of_the_model(server, teacher, texts)
    assert teacher.use.minus(before) == ServerUse(requests=len(sent), retries=2, tokens=sum(sent))
    assert len(sent) > len(texts)


def test_tokens_that_the_teacher_does_not_have_are_not_requested(
    server: ModelServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old servers end on an id outside their vocabulary, and new ones refuse the whole request."""
    settings = sections.Score(engine="vllm", reads="sglang", batch_tokens=64, topk=K, topk_source="student")
    size = int(hf.model_shape(folders["teacher"])["vocab_size"])
    monkeypatch.setattr(StudentTopk, "ids", lambda student, samples, k: torch.full((trained(samples), k), size))
    with pytest.raises(MismatchError, match=f"token id {size} is among the student's 4 likeliest, but teacher "):
        scored(folders, pool_of(folders, server.url), settings)
    assert generate_bodies(server) == []


def trained(samples: Any) -> int:
    return sum(int(sample.loss_mask.sum()) for sample in samples)


def test_a_missing_student_is_named(server: ModelServer, folders: dict[str, Path]) -> None:
    settings = sections.Score(engine="vllm", reads="sglang", topk_source="student")
    with closing(pool_of(folders, server.url)) as pool, pytest.raises(MismatchError, match="pass `student`"):
        list(score_samples(pool, "teacher", ("topk",), [replace(make_samples()[0])], settings))
