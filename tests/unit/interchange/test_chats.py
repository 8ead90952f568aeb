"""Conversations as samples: who said what, what is trained on, and where a chat template does not tell."""

from __future__ import annotations

from typing import Any

import pytest

from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.formats import FORMATS
from mopd_dataplane.interchange.rows import Row
from mopd_dataplane.interchange.vocabulary import TokenizerVocabulary
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
    given = rows_of("preference", {"prompt": "3+4=", "chosen": "7", "rejected": "8"})
    assert [(row.prompt, row.response) for row in given] == [("3+4=", "7"), ("3+4=", "8")]


def test_of_a_conversation_with_tools_only_the_assistants_tokens_are_trained_on() -> None:
    [row] = rows_of("trl", {"step": 1, "prompt": [USER], "completion": [CALL, TOOL, SAYS]})
    assert isinstance(row.prompt, list)
    assert isinstance(row.response, list)
    words = vocabulary()
    prompt, response, mask = words.conversation(row.prompt, row.response)

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
    with pytest.raises(InputError, match="writes message 1 another way when more follow"):
        vocabulary(last_only).conversation(row.prompt, row.response)


@pytest.mark.parametrize(
    ("source", "fields", "said"),
    [
        ("sft", {"messages": [USER]}, "no message of the assistant"),
        ("sft", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAYS]}, "only text is imported"),
        ("sft", {"messages": [USER, SAYS], "tools": [{"name": "add"}]}, "need token ids"),
        ("preference", {"chosen": [USER, SAYS], "rejected": [SAYS]}, "begin with other messages"),
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
