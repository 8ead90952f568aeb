"""Conversations as samples: who said what, what is trained on, and where a chat template does not tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from advice import advises
from chat_templates import chat_tokenizer

from mopd_dataplane import Store, create_store
from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.exporter import export_samples
from mopd_dataplane.interchange.formats import FORMATS
from mopd_dataplane.interchange.importer import ImportReport, import_rollouts
from mopd_dataplane.interchange.rows import Row
from mopd_dataplane.interchange.vocabulary import TokenizerVocabulary
from mopd_dataplane.models.hf import tokenizer_digest
from mopd_dataplane.models.initial_weights import character_tokenizer

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% for c in m.get('tool_calls', []) %}"
    "{{ c['function']['name'] }}({{ c['function']['arguments']['a'] }}){% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "3+4="}
CALL = {
    "role": "assistant", "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}],
}  # fmt: skip
TOOL = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "7"}]}
SAYS = {"role": "assistant", "content": "It is 7"}


def rows_of(source: str, fields: dict[str, Any]) -> list[Row]:
    """The responses of one row."""
    return list(FORMATS[source](fields, "chats.jsonl:1"))


def vocabulary(template: str = CHATML) -> TokenizerVocabulary:
    """The character tokenizer with a chat template."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return TokenizerVocabulary(tokenizer, "characters")


def test_every_message_of_the_assistant_is_a_response_to_what_was_said_before() -> None:
    first, second = rows_of("sft", {"messages": [USER, SAYS, {"role": "user", "content": "Sure?"}, SAYS]})
    assert (first.prompt, first.response) == ([USER], "It is 7")
    assert [message["role"] for message in second.prompt or []] == ["user", "assistant", "user"]
    [shared] = rows_of("sft", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})
    assert (shared.prompt, shared.response) == ([{"role": "user", "content": "a"}], "b")
    [pair] = rows_of("sft", {"prompt": "a", "completion": "b"})
    assert (pair.prompt, pair.response) == ("a", "b")


def test_the_chosen_answer_has_reward_one_and_the_rejected_none() -> None:
    chosen, rejected = rows_of("preference", {"chosen": [USER, SAYS], "rejected": [USER, {**SAYS, "content": "8"}]})
    assert (chosen.prompt, chosen.response, chosen.rewards) == ([USER], "It is 7", {("preference", ""): 1.0})
    assert (rejected.prompt, rejected.response, rejected.rewards) == ([USER], "8", {("preference", ""): 0.0})
    rows = rows_of("preference", {"prompt": "3+4=", "chosen": "7", "rejected": "8"})
    assert [(row.prompt, row.response) for row in rows] == [("3+4=", "7"), ("3+4=", "8")]


def test_of_a_conversation_with_tools_only_the_assistants_tokens_are_trained_on() -> None:
    [row] = rows_of("trl", {"step": 1, "prompt": [USER], "completion": [CALL, TOOL, SAYS]})
    assert isinstance(row.prompt, list)
    assert isinstance(row.response, list)
    words = vocabulary()
    tokens = words.conversation(row.prompt, row.response)
    prompt, response, mask = tokens.prompt_ids, tokens.response_ids, tokens.loss_mask

    def text(ids: list[int]) -> str:
        return str(words._tokenizer.decode(ids))

    assert text(prompt).endswith("<user>3+4=</s>\n<assistant>")
    assert text(response) == "add(3)</s>\n<tool>7</s>\n<assistant>It is 7</s>"
    own = [token for token, trained in zip(response, mask, strict=True) if trained]
    assert text(own) == "add(3)</s>It is 7</s>"
    assert mask[-1] == 1


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    shown = "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}"
    last_only = "{% for m in messages %}" + shown + "{% endfor %}"
    [row] = rows_of("trl", {"step": 1, "prompt": [USER], "completion": [SAYS, TOOL, SAYS]})
    assert isinstance(row.prompt, list)
    assert isinstance(row.response, list)
    with pytest.raises(InputError, match="writes message 1 in another way once more messages follow"):
        vocabulary(last_only).conversation(row.prompt, row.response)


QUESTION = {"role": "user", "content": "2+2?"}
THOUGHT = {"role": "assistant", "content": "four", "reasoning_content": "Two and two."}
ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def bring(
    folder: Path, rows: list[dict[str, Any]], *, source: str, family: str = "qwen3.5", rewritten: Any = "refuse"
) -> tuple[Store, ImportReport, list[tuple[str, str]]]:
    """Import rows with the tokenizer of a chat family. Returns (store, report, each sample's prompt and answer)."""
    tokenizer = chat_tokenizer(family)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = create_store(str(folder / "store"))
    settings = ImportSettings(format=source, stage="s", domain="d", rewritten=rewritten)
    words = TokenizerVocabulary(tokenizer, tokenizer_digest(tokenizer), template="chat")
    report = import_rollouts(store, file, settings, words)
    lengths = store.samples(["prompt_len"])["prompt_len"].to_pylist()
    tokens = store.read_tokens(range(len(lengths)), columns=["tokens"])["tokens"].to_pylist()
    texts = [
        (tokenizer.decode(ids[:length]), tokenizer.decode(ids[length:]))
        for ids, length in zip(tokens, lengths, strict=True)
    ]
    return store, report, texts


def test_answers_begin_in_the_thought_that_the_template_opens_and_end_with_its_terminator(tmp_path: Path) -> None:
    called = {
        "messages": [QUESTION], "tools": ADD,
        "choices": [{"message": {**CALL, "reasoning": "A sum."}, "finish_reason": "tool_calls"}],
    }  # fmt: skip
    rows = [
        {"messages": [QUESTION], "choices": [{"message": THOUGHT, "finish_reason": "stop"}]},
        {"messages": [QUESTION], "choices": [{"message": {**THOUGHT, "content": ""}, "finish_reason": "length"}]},
        {"messages": [QUESTION, THOUGHT]},
        called,
    ]
    store, report, texts = bring(tmp_path, rows, source="openai")
    opening = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    answer = "Two and two.\n</think>\n\nfour<|im_end|>"
    assert texts[:3] == [(opening, answer), (opening, "Two and two."), (opening, answer)]
    assert '"name": "add"' in texts[3][0]
    assert texts[3][1].startswith('A sum.\n</think>\n\n<tool_call>\n{"name": "add"')
    assert texts[3][1].endswith("</tool_call><|im_end|>")
    assert (report.ended, report.tokenised, report.ignored) == (3, 4, [])
    prompt_texts = [prompt.text for prompt in store.prompts()]
    assert any(text.startswith("tools: [") and text.endswith("user: 2+2?") for text in prompt_texts)
    exported = tmp_path / "messages.jsonl"
    export_samples(store, str(exported), form="messages")
    said = [json.loads(line)["messages"][1]["content"] for line in exported.read_text().splitlines()]
    assert said[0] == "<think>\nTwo and two.\n</think>\n\nfour"


def test_a_thought_that_the_template_does_not_write_is_named(tmp_path: Path) -> None:
    _, report, texts = bring(tmp_path, [{"messages": [QUESTION, THOUGHT]}], source="openai", family="llama3")
    assert texts[0][1] == "four<|eot_id|>"
    assert report.ignored == ["reasoning_content"]


def test_an_answer_without_a_thought_begins_before_it_and_is_counted(tmp_path: Path) -> None:
    plain = {"messages": [QUESTION, {"role": "assistant", "content": "four"}]}
    _, report, texts = bring(tmp_path, [plain], source="sft", family="deepseek-r1")
    assert texts[0][0].endswith("<｜Assistant｜>")
    assert texts[0][1] == "four<｜end▁of▁sentence｜>"
    assert report.without_thought == 1


def test_a_rewritten_conversation_is_refused_or_cut_into_a_sample_for_each_answer(tmp_path: Path) -> None:
    sure = {"role": "user", "content": "Sure?"}
    rows = [{"step": 1, "prompt": [QUESTION], "completion": [THOUGHT, sure, THOUGHT], "right": 1.0}]
    with advises("; --rewritten split makes each answer a sample of its own, or give token ids"):
        bring(tmp_path, rows, source="trl")
    (tmp_path / "store").rename(tmp_path / "empty")
    _, report, texts = bring(tmp_path, rows, source="trl", rewritten="split")
    assert (report.rows, report.samples, report.split, report.rewards) == (1, 2, 1, 2)
    assert [answer for _, answer in texts] == ["Two and two.\n</think>\n\nfour<|im_end|>"] * 2
    assert "Two and two." not in texts[1][0]  # the thought of the earlier answer, which the template leaves out
    assert texts[1][0].count("four") == 1


def test_the_stored_text_of_a_prompt_shows_tool_calls(tmp_path: Path) -> None:
    row = {"messages": [QUESTION, CALL, TOOL, {"role": "user", "content": "So?"}, SAYS]}
    store, _, _ = bring(tmp_path, [row], source="openai", family="granite")
    [prompt] = store.prompts()
    assert prompt.text == 'user: 2+2?\nassistant: add({"a": 3})\ntool: 7\nuser: So?'


@pytest.mark.parametrize(
    ("source", "fields", "said"),
    [
        ("sft", {"messages": [USER]}, "no message of the assistant"),
        ("sft", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAYS]}, "only text is imported"),
        ("sft", {"messages": [USER, SAYS], "tools": "add"}, "field 'tools' is 'add', expected a list of JSON schemas"),
        ("openai", {"messages": [USER, SAYS], "tools": ["add"]}, "'tools' is .*expected a list of objects"),
        ("openai", {"messages": [USER, SAYS], "chat_template_kwargs": {"tokenize": 1}}, "no variable of a template"),
        ("preference", {"chosen": [USER, SAYS], "rejected": [SAYS]}, "begin with different messages"),
        ("openai", {"messages": [USER]}, "expected the assistant's"),
        ("openai", {"response": {"choices": []}}, "'messages' is None"),
        ("tinker", {"turns": [{"role": "user", "content": "a"}]}, "no turn of the assistant"),
        ("verifiers", {"traces": [{"version": 2, "nodes": []}]}, "trace version 2; this reads version 1"),
        ("verifiers", {"nodes": [{"parent": 0}]}, r"nodes\[0\].parent is 0"),
        (
            "verifiers",
            {"nodes": [{"sampled": True, "token_ids": [1, 2], "mask": [True]}]},
            "2 tokens and a mask of 1",
        ),
        (
            "verifiers",
            {"nodes": [{"sampled": True, "token_ids": [1], "mask": [True], "logprobs": [-1.0, -1.0]}]},
            "1 sampled tokens and 2 logprobs",
        ),
    ],
)
def test_a_row_of_no_use_is_named(source: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"chats\.jsonl:1: .*{said}"):
        rows_of(source, fields)
