"""Files that real packages wrote (tests/data/peers, by tests/ecosystem/peer_files.py) become the samples they hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mopd_dataplane import Store, create_store
from mopd_dataplane.base.file_urls import files_at
from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.formats import FORMATS
from mopd_dataplane.interchange.importer import ImportReport, import_rollouts
from mopd_dataplane.interchange.row_files import SUFFIXES, read_rows
from mopd_dataplane.interchange.rows import Row
from mopd_dataplane.interchange.traces import read_traces
from mopd_dataplane.models.chat_template import AnswerTokens, ChatOptions
from mopd_dataplane.query.show import read_sample
from mopd_dataplane.query.show_terminal import render
from mopd_dataplane.records import Teacher
from mopd_dataplane.run.whole_copy import copy_whole

PEERS = Path(__file__).parents[2] / "data" / "peers"
END = 0


class Letters:
    """A tokenizer of one token a character, of which 0 ends a sequence; a prompt begins with 1, a message with 2."""

    digest, size, end, template = "letters", 1000, END, "{prompt}"

    def file(self) -> None:
        return None

    def prompt(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def response(self, text: str) -> list[int]:
        return list(map(ord, text))

    def conversation(self, prompt: Any, response: Any, *, options: ChatOptions, is_cut_off: bool) -> AnswerTokens:
        [answer] = response
        ids = [*map(ord, answer["content"]), *([] if is_cut_off else [END])]
        return AnswerTokens(
            prompt_ids=[*self._chat(prompt), 2],
            response_ids=ids,
            loss_mask=[1] * len(ids),
            is_terminated=not is_cut_off,
        )

    def _chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return [one for said in messages for one in (2, *map(ord, said["content"]))]


def rows_of(source: str, folder: Path) -> list[Row]:
    """All rows of a file or folder."""
    return [
        row
        for file in files_at(folder, SUFFIXES)
        for location, fields in read_rows(file)
        for row in FORMATS[source](fields, location)
    ]


def brought(store: Store | str, source: str, folder: str, **settings: str) -> ImportReport:
    """Import what a package wrote."""
    options = {"stage": "student", "domain": "sums", **settings}
    return import_rollouts(store, PEERS / folder, ImportSettings(format=source, **options), Letters())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return create_store(str(tmp_path / "store"))


def test_every_path_of_a_trace_is_a_sample_with_what_the_sampler_and_the_reference_said(store: Store) -> None:
    report = brought(store, "prime-rl", "verifiers", domain="", teacher="big")
    assert report == ImportReport(
        rows=2, samples=3, inserted=3, tokenised=1, ended=1, with_logprobs=2, rewards=2, signals=1
    )
    tools, branch, texts = store.read_tokens([0, 1, 2], verify=True).to_pylist()
    assert tools["tokens"] == [50, 51, 52, 53, 60, 61, 62, 63, 54, 60, 64]
    assert tools["loss_mask"] == [1, 1, 1, 0, 0, 1]
    assert tools["logprobs"] == [-0.125, -0.25, -0.375, 0, 0, -0.125]
    assert (branch["tokens"], branch["loss_mask"]) == ([50, 51, 52, 53, 60, 65, 66], [1, 1])
    assert texts["tokens"] == [2, *map(ord, "1 + 1 ="), 2, ord("2"), END]
    assert texts["logprobs"] is None
    columns = ["domain", "iteration", "turns", "finish_reason", "temperature"]
    assert store.samples(columns).to_pylist() == [
        {"domain": "sums", "iteration": 9, "turns": 2, "finish_reason": "stop", "temperature": 0.5},
        {"domain": "sums", "iteration": 9, "turns": 1, "finish_reason": "unknown", "temperature": 1.0},
        {"domain": "sums", "iteration": 9, "turns": 1, "finish_reason": "unknown", "temperature": 1.0},
    ]
    assert store.table("rewards", ["reward"])["reward"].to_pylist()[:2] == [1.5, 1.5]
    assert store.prompts()[0].text == "system: Add.\nuser: 3 + 4 ="
    [score] = store.table("scores", ["teacher", "kind", "sample_row", "mean_reverse_kl"]).to_pylist()
    assert (score["teacher"], score["kind"], score["sample_row"]) == ("big", "logprob", 0)
    assert score["mean_reverse_kl"] == pytest.approx(0.25)
    np.testing.assert_allclose(store.read_signal("big", "logprob", [0])[0], [-0.375, -0.5, -0.625, 0, 0, -0.375])
    assert store.verify().findings == []
    again = brought(store, "prime-rl", "verifiers", domain="", teacher="big")
    assert (again.inserted, again.rewards, again.signals) == (0, 0, 0)


def test_a_store_with_imported_signals_is_copied_whole(store: Store, tmp_path: Path) -> None:
    brought(store, "prime-rl", "verifiers")
    assert list(copy_whole(store, str(tmp_path / "copy")))
    copied = Store.open(str(tmp_path / "copy"))
    assert copied.verify().findings == []
    assert list(copied.read_signal("imported", "logprob", [0])[0]) == list(
        store.read_signal("imported", "logprob", [0])[0]
    )


def test_log_probs_of_a_reference_never_join_those_of_a_teacher_that_scored_here(store: Store) -> None:
    store.add_teacher(
        Teacher(
            name="big", source="models/big", weights_digest="1" * 64, tokenizer_digest="letters", vocab_size=1000,
            hidden_size=8, dtype="float32", head_file="heads/big.safetensors", head_digest="2" * 64,
        )
    )  # fmt: skip
    with pytest.raises(InputError, match=r"traces\.jsonl:1: .*teacher 'big' has weights with digest 'imported'"):
        brought(store, "prime-rl", "verifiers", teacher="big")
    assert store.samples(["uid"]).num_rows == store.table("prompts").num_rows == 0


def test_verl_texts_get_the_end_of_sequence_token_that_the_dump_leaves_out(store: Store) -> None:
    report = brought(store, "verl", "verl")
    assert (report.samples, report.tokenised, report.ended, report.rewards) == (2, 2, 2, 2)
    assert store.read_tokens([0])["tokens"][0].as_py() == [1, *map(ord, "3 + 4 ="), *map(ord, " 7"), END]
    assert store.samples(["iteration"])["iteration"].to_pylist() == [5, 5]


def test_skyrl_texts_are_read_as_the_model_did_and_one_that_was_cut_off_gets_no_end(store: Store) -> None:
    report = brought(store, "skyrl", "skyrl", domain="")
    assert (report.rows, report.samples, report.ended) == (2, 2, 1)
    whole, cut = store.read_tokens([0, 1]).to_pylist()
    assert whole["tokens"] == [*map(ord, "3 + 4 ="), *map(ord, " 7"), END]
    assert cut["tokens"] == [*map(ord, "1 + 1 ="), *map(ord, " 2, and so on")]
    assert store.samples(["domain", "finish_reason"]).to_pylist() == [
        {"domain": "math/sums", "finish_reason": "stop"},
        {"domain": "math/sums", "finish_reason": "length"},
    ]
    assert [prompt.answer for prompt in store.prompts()] == ["7", ""]
    assert store.table("rewards", ["reward"])["reward"].to_pylist() == [1.0, 0.25]


def test_tinker_calls_keep_tokens_and_log_probs_and_evaluations_are_text(store: Store) -> None:
    report = brought(store, "tinker", "tinker_cookbook")
    assert (report.samples, report.tokenised, report.with_logprobs) == (2, 1, 1)
    [call] = [row for row in store.samples().to_pylist() if row["mean_logprob"] is not None]
    assert (call["iteration"], call["finish_reason"], call["temperature"]) == (4, "stop", pytest.approx(0.7))
    [sampled] = [row for row in store.read_tokens([0, 1]).to_pylist() if row["logprobs"] is not None]
    assert (sampled["tokens"], sampled["logprobs"]) == ([50, 51, 60, 61, 62], [-0.5, -0.25, -0.125])
    assert store.table("rewards", ["reward"])["reward"].to_pylist() == [1.0]


def test_trl_logs_of_text_and_of_messages(store: Store) -> None:
    report = brought(store, "trl", "trl")
    assert (report.samples, report.tokenised, report.ended, report.rewards) == (8, 8, 8, 8)
    texts = [row.response for row in rows_of("trl", PEERS / "trl" / "messages.parquet")]
    stored = {tuple(row["tokens"]) for row in store.read_tokens(range(8)).to_pylist()}
    prompts = [2, *map(ord, "3 + 4 ="), 2], [2, *map(ord, "1 + 1 ="), 2]
    assert all(any((*ids, *map(ord, text), END) in stored for ids in prompts) for text in texts)


def test_chat_completions_with_and_without_the_servers_token_ids(store: Store) -> None:
    assert brought(store, "openai", "openai").with_logprobs == 1
    text, ids = store.read_tokens([0, 1]).to_pylist()
    assert text["tokens"] == [2, *map(ord, "3 + 4 ="), 2, ord("7"), END]
    assert (ids["tokens"], ids["logprobs"]) == ([50, 51, 60, 61], [-0.5, -0.25])
    assert set(store.samples(["temperature"])["temperature"].to_pylist()) == {0.5}


def test_a_question_that_two_packages_asked_is_one_prompt(store: Store) -> None:
    brought(store, "tinker", "tinker_cookbook")
    brought(store, "openai", "openai")
    table = store.sql("select messages, count(*) as samples from samples join prompts using (prompt_id) group by all")
    counts = {row["messages"]: row["samples"] for row in table.to_pylist()}
    assert counts == {"": 1, '[{"role": "user", "content": "3 + 4 ="}]': 2}, "of two equal answers one is kept"


def test_a_sample_without_the_samplers_log_probs_is_shown_by_what_its_teacher_said(
    store: Store, tmp_path: Path
) -> None:
    """No colour and no strongest token would say that its teacher agreed with it everywhere."""
    lines = (PEERS / "verifiers" / "traces.jsonl").read_text().splitlines()
    stripped = tmp_path / "stripped"
    shutil.copytree(PEERS / "verifiers", stripped)
    (stripped / "traces.jsonl").write_text(lines[0].replace('"logprobs":[-', '"unknown":[-') + "\n")
    import_rollouts(store, stripped, ImportSettings(format="prime-rl", stage="student"), Letters())
    uid = store.samples(["uid"])["uid"][0].as_py()
    view = read_sample(store, uid)
    assert {token.sampler_logprob for token in view.tokens} == {None}
    console = Console(width=160, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(render(view))
    shown = capture.get()
    assert "teacher log-prob, nats" in shown
    assert "least likely for its teacher" in shown
    assert "-0.625" in shown


def test_an_attempt_at_a_shorter_context_counts_once_it_was_taken_up() -> None:
    def node(parent: int | None, token: int, *links: tuple[str, int]) -> dict[str, object]:
        said = {"role": "user" if parent is None else "assistant", "content": str(token)}
        return {
            "parent": parent, "message": said, "sampled": parent is not None, "token_ids": [token],
            "mask": [parent is not None], "semantic_parents": [{"type": kind, "node": at} for kind, at in links],
        }  # fmt: skip

    dropped, final_attempt = node(0, 12, ("compaction_attempt", 1)), node(0, 13, ("compaction_attempt", 1))
    trace = {"nodes": [node(None, 10), node(0, 11), dropped, final_attempt, node(0, 14, ("compaction", 3))]}
    assert [row.response_ids for row in read_traces(trace, "here")] == [[11], [13], [14]]


def test_the_reward_of_a_trace_is_the_weighted_sum_of_its_rewards() -> None:
    question, answer_message = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    nodes = [{"message": question, "token_ids": [1]},
             {"message": answer_message, "parent": 0, "sampled": True, "token_ids": [2], "mask": [True]}]  # fmt: skip
    rewards = {"right": {"score": 0.5, "weight": 2.0}, "short": {"score": 1.0}, "seen": {"score": 9.0, "weight": 0.0}}
    [row] = read_traces({"nodes": nodes, "rewards": rewards}, "here")
    assert row.rewards == {("verifiers", ""): 2.0}
