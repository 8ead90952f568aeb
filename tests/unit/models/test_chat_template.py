"""Answers as chat templates write them: where they begin, with which token they end, and what cannot be split."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import CHAT_FAMILIES, chat_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mopd_dataplane.errors import InputError
from mopd_dataplane.models.chat_template import (
    AnswerTokens,
    ChatOptions,
    Messages,
    RewrittenTurnError,
    answer_tokens,
    render_messages,
    terminators,
)
from mopd_dataplane.models.hf import stop_ids
from mopd_dataplane.prompts import render, render_answer

ALL = sorted(CHAT_FAMILIES)
WITH_TOOLS = [name for name in ALL if CHAT_FAMILIES[name].call_terminator]
ASKED: Messages = [{"role": "user", "content": "2+2?"}]
FOUR: Messages = [{"role": "assistant", "content": "four"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 2}}}],
}  # fmt: skip
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "4"}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """One tokenizer a family."""
    return {name: chat_tokenizer(name) for name in ALL}


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def spans(tokenizer: PreTrainedTokenizerBase, tokens: AnswerTokens) -> list[str]:
    """Texts that are trained on, in order."""
    texts, run = [], list[int]()
    for token, trained in [*zip(tokens.response_ids, tokens.loss_mask, strict=True), (0, 0)]:
        if trained:
            run.append(token)
        elif run:
            texts.append(text_of(tokenizer, run))
            run = []
    return texts


@pytest.mark.parametrize("name", ALL)
def test_an_answer_is_what_the_template_writes_up_to_its_terminator(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    tokenizer, family = tokenizers[name], CHAT_FAMILIES[name]
    tokens = answer_tokens(tokenizer, ASKED, FOUR)
    assert text_of(tokenizer, tokens.response_ids) == family.answer
    assert tokens.loss_mask == [1] * len(tokens.response_ids)
    assert tokens.is_terminated
    rendered_prompt = render_messages(tokenizer, ASKED, add_generation_prompt=True)
    prompt = text_of(tokenizer, tokens.prompt_ids)
    # An answer without a thought begins before the thought that the generation prompt opens.
    assert prompt == (rendered_prompt.removesuffix("<think>\n") if tokens.skips_opening else rendered_prompt)
    whole = render_messages(tokenizer, [*ASKED, *FOUR])
    if name != "glm4.5":  # which ends a turn with the token that begins the next
        assert whole.startswith(prompt + family.answer)
        assert not whole.removeprefix(prompt + family.answer).replace("<|endoftext|>", "").strip()


@pytest.mark.parametrize("name", ALL)
def test_terminators_are_stop_ids(tokenizers: dict[str, PreTrainedTokenizerBase], name: str, tmp_path: Any) -> None:
    tokenizer, family = tokenizers[name], CHAT_FAMILIES[name]
    expected = {family.terminator, *([family.call_terminator] if family.call_terminator else [])}
    assert {tokenizer.convert_ids_to_tokens(index) for index in terminators(tokenizer)} == expected
    (tmp_path / "config.json").write_text("{}")
    stops = {tokenizer.convert_ids_to_tokens(index) for index in stop_ids(tmp_path, tokenizer)}
    assert stops == {*expected, family.eos}


@pytest.mark.parametrize("name", ALL)
def test_an_answer_that_was_cut_off_has_no_terminator(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    tokenizer, family = tokenizers[name], CHAT_FAMILIES[name]
    tokens = answer_tokens(tokenizer, ASKED, FOUR, is_cut_off=True)
    assert text_of(tokenizer, tokens.response_ids) == family.answer.removesuffix(family.terminator)
    assert not tokens.is_terminated
    if family.shows_thoughts:
        thinking = [{"role": "assistant", "content": "", "reasoning_content": "Two and two"}]
        cut = text_of(tokenizer, answer_tokens(tokenizer, ASKED, thinking, is_cut_off=True).response_ids)
        assert cut.endswith("Two and two")


@pytest.mark.parametrize("name", ALL)
def test_empty_answers_and_answers_that_hold_their_terminator_end_once(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    tokenizer, family = tokenizers[name], CHAT_FAMILIES[name]
    empty = answer_tokens(tokenizer, ASKED, [{"role": "assistant", "content": ""}])
    assert text_of(tokenizer, empty.response_ids) == family.answer.replace("four", "")
    again = answer_tokens(tokenizer, ASKED, [{"role": "assistant", "content": "four" + family.terminator}])
    assert text_of(tokenizer, again.response_ids) == family.answer


@pytest.mark.parametrize("name", ALL)
def test_system_messages_and_earlier_turns_are_the_prompt(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    tokenizer, family = tokenizers[name], CHAT_FAMILIES[name]
    before = [{"role": "system", "content": "Be brief."}, *ASKED, *FOUR, {"role": "user", "content": "Sure?"}]
    if not family.takes_system:
        with pytest.raises(InputError, match=r"the chat template fails on this conversation .*Only user"):
            answer_tokens(tokenizer, before, FOUR)
        before = before[1:]
    tokens = answer_tokens(tokenizer, before, FOUR)
    assert text_of(tokenizer, tokens.response_ids) == family.answer
    prompt = text_of(tokenizer, tokens.prompt_ids)
    assert ("Be brief." in prompt) == family.takes_system
    assert prompt.index("four") < prompt.index("Sure?")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_of_a_conversation_with_tools_the_calls_and_answers_are_trained_on(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    tokenizer, family = tokenizers[name], CHAT_FAMILIES[name]
    options = ChatOptions(tools=TOOLS if family.writes_tools else ())
    tokens = answer_tokens(tokenizer, ASKED, [CALL, RESULT, *FOUR], options=options)
    call, answer = spans(tokenizer, tokens)
    assert "add" in call
    assert '"a": 2' in call
    assert call.endswith(family.call_terminator)
    assert call.count(family.call_terminator) == 1
    assert answer.endswith(family.answer.removeprefix("<think>\n\n</think>\n\n").removeprefix("\n</think>\n\n"))
    text = text_of(tokenizer, tokens.prompt_ids + tokens.response_ids)
    assert render_messages(tokenizer, [*ASKED, CALL, RESULT, *FOUR], options=options).startswith(
        text.removesuffix("<|user|>")
    )
    assert not any("tool_response" in span or "outputs" in span for span in (call, answer))


@pytest.mark.parametrize("name", ALL)
def test_a_thought_is_trained_on_where_the_template_writes_it_and_named_where_not(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    tokenizer, family = tokenizers[name], CHAT_FAMILIES[name]
    thinking = [{"role": "assistant", "content": "four", "reasoning_content": "Two and two."}]
    tokens = answer_tokens(tokenizer, ASKED, thinking)
    text = text_of(tokenizer, tokens.response_ids)
    assert tokens.has_hidden_thought != family.shows_thoughts
    assert ("Two and two." in text) == family.shows_thoughts
    assert text.endswith(family.terminator)
    if family.opens_thought and family.shows_thoughts:
        assert text.startswith("Two and two.")  # behind the thought that the prompt opens, which is not opened again
        assert text_of(tokenizer, tokens.prompt_ids).endswith("<think>\n")


@pytest.mark.parametrize("name", ALL)
def test_a_template_that_rewrites_earlier_turns_is_refused_by_name(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    tokenizer, family = tokenizers[name], CHAT_FAMILIES[name]
    thinking = {"role": "assistant", "content": "four", "reasoning_content": "Two and two."}
    response = [thinking, {"role": "user", "content": "Sure?"}, *FOUR]
    if family.drops_thoughts and family.shows_thoughts:
        with pytest.raises(RewrittenTurnError, match="writes message 1 in another way once more messages follow"):
            answer_tokens(tokenizer, ASKED, response)
        return
    tokens = answer_tokens(tokenizer, ASKED, response)
    first, second = spans(tokenizer, tokens)
    assert first.endswith(family.answer)
    assert second == family.answer


def test_tools_that_a_template_does_not_write_are_refused(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    for name in ("gemma3", "phi4-mini", "deepseek-r1"):
        with pytest.raises(InputError, match="has 1 tools, which the chat template does not write"):
            answer_tokens(tokenizers[name], ASKED, FOUR, options=ChatOptions(tools=TOOLS))


def test_a_template_without_special_tokens_ends_with_the_tokenizers_end() -> None:
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    tokens = answer_tokens(tokenizer, ASKED, FOUR)
    assert text_of(tokenizer, tokens.prompt_ids) == "User: 2+2?\nAssistant:"
    assert text_of(tokenizer, tokens.response_ids) == " four<|im_end|>"
    assert terminators(tokenizer) == frozenset()
    assert text_of(tokenizer, answer_tokens(tokenizer, ASKED, FOUR, is_cut_off=True).response_ids) == " four"


def test_merges_over_the_border_of_the_prompt_are_not_made() -> None:
    """The policy reads the prompt alone, so no token of the answer can begin in it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*alphabet, "ĊĊ"])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    tokens = answer_tokens(tokenizer, ASKED, [{"role": "assistant", "content": "\nfour"}])
    assert tokens.prompt_ids == render(ASKED, tokenizer, template="chat")
    assert text_of(tokenizer, tokens.prompt_ids).endswith("assistant\n")
    assert text_of(tokenizer, tokens.response_ids) == "\nfour</s>"
    assert vocabulary["ĊĊ"] not in tokens.prompt_ids + tokens.response_ids


@pytest.mark.parametrize("name", ALL)
def test_reference_answers_are_written_as_the_policy_would_write_them(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str
) -> None:
    tokenizer, family = tokenizers[name], CHAT_FAMILIES[name]
    prompt, response = render_answer("2+2?", "four", tokenizer, template="chat")
    assert text_of(tokenizer, response) == family.answer
    expected = render("2+2?", tokenizer, template="chat")
    assert prompt == expected or (family.opens_thought and prompt == expected[: len(prompt)])
    plain, said = render_answer("2+2?", "four", tokenizer, template="Q: {prompt}")
    assert (text_of(tokenizer, plain), text_of(tokenizer, said)) == ("Q: 2+2?", "four" + family.eos)


def test_saved_tokenizers_keep_their_terminators(tmp_path: Any) -> None:
    chat_tokenizer("qwen3-base").save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert {read.convert_ids_to_tokens(index) for index in terminators(read)} == {"<|im_end|>"}
    assert read.eos_token == "<|endoftext|>"
