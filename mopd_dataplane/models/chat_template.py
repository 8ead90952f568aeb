"""Conversations as tokens, written by a tokenizer's chat template: where an answer begins, and the token that ends it.

The tokens of an answer are those that the template writes for that turn of the whole conversation: from the end of the
generation prompt, or earlier if the answer replaces its last part, up to and with the turn's terminator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import InputError, UnknownNameError
from mopd_dataplane.models.render_limits import RenderLimitError, bounded_rendering, check_rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that servers and templates use for the thought of a message; this package uses the first."""
_QUESTION: dict[str, Any] = {"role": "user", "content": "?"}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "!"}
_MARK = "{answer}"
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "000000000", "function": {"name": "f", "arguments": {"a": 1}}}],
}
_TOOL: dict[str, Any] = {"role": "tool", "name": "f", "tool_call_id": "000000000", "content": "?"}


class RewrittenTurnError(InputError):
    """The template writes an earlier turn of the assistant differently once more messages follow it."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Inputs of a template besides the messages."""

    tools: Sequence[Any] = ()
    """Tools of the conversation, as JSON schemas."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as `enable_thinking`."""


NO_OPTIONS = ChatOptions()
"""No tools and no variables."""


@dataclass(frozen=True, kw_only=True)
class AnswerTokens:
    """Token ids of a prompt and of its answer."""

    prompt_ids: list[int]
    """[P] token ids"""
    response_ids: list[int]
    """[R] token ids"""
    loss_mask: list[int]
    """[R] 1 on the assistant's tokens."""
    is_terminated: bool
    """True if the last token ends the answer; an answer that was cut off has no such token."""
    skips_opening: bool = False
    """True if the first answer begins before the end of the generation prompt, because the prompt opens a thought and
    the answer has none."""
    has_hidden_thought: bool = False
    """True if a message has a thought that the template does not write."""


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant: the policy writes text[start:end]."""

    text: str
    """The conversation up to and with this turn."""
    start: int
    end: int
    terminator: str
    """Text of the token that ends the turn; empty if the template writes none."""
    skips_opening: bool = False
    """See AnswerTokens."""


def answer_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    response: Messages,
    *,
    options: ChatOptions = NO_OPTIONS,
    is_cut_off: bool = False,
) -> AnswerTokens:
    """Encode a conversation, split into its prompt and the answer.

    response: the messages from the assistant's first on; the last is the assistant's. is_cut_off: the last answer
    reached a limit, so it gets no terminator.
    Raises RewrittenTurnError when the template writes an earlier turn differently once more messages follow it. Raises
    InputError for a template that fails, does not write `tools`, or does not write messages one after the other.
    """
    _check_tools(tokenizer, prompt, options)
    ends = {_text_of(tokenizer, index) for index in terminators(tokenizer)}
    response = [_without_end(message, ends) for message in response]
    messages = [*prompt, *response]
    own = [own_turns for own_turns in range(len(prompt), len(messages)) if messages[own_turns]["role"] == "assistant"]
    turns = [_turn(tokenizer, messages, own_turns, options) for own_turns in own]
    last = turns[-1]
    if is_cut_off:
        turns[-1] = last = _cut_off(last, messages[-1])
    ids = _encode(tokenizer, last.text[: turns[0].start])
    prompt_length, mask, end = len(ids), [0] * len(ids), turns[0].start
    for own_turns, turn in zip(own, turns, strict=True):
        if not last.text.startswith(turn.text[: turn.end]) or turn.start < end:
            raise RewrittenTurnError(
                f"the chat template writes message {own_turns} in another way once more messages follow it"
            )
        for stop, trained in ((turn.start, 0), (turn.end, 1)):
            ids = _extended(tokenizer, ids, last.text, end, stop)
            mask += [trained] * (len(ids) - len(mask))
            end = stop
    return AnswerTokens(
        prompt_ids=ids[:prompt_length],
        response_ids=(response_ids := ids[prompt_length:] + _own_end(tokenizer, last, is_cut_off)),
        loss_mask=mask[prompt_length:] + [1] * (len(response_ids) - len(mask) + prompt_length),
        is_terminated=not is_cut_off and (bool(last.terminator) or tokenizer.eos_token_id is not None),
        skips_opening=turns[0].skips_opening,
        has_hidden_thought=_has_hidden_thought(tokenizer, prompt, response, options),
    )


def terminators(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the special tokens that end an answer in the chat template, also one with a tool call.

    Empty for a tokenizer without a chat template, and for a template that ends answers with text.
    """
    ends = {_usual_end(tokenizer, answer) for answer in (_ANSWER, _CALL)} - {""}
    ids: Any = tokenizer.convert_tokens_to_ids(sorted(ends))
    return frozenset(ids)


def reply_text(tokenizer: PreTrainedTokenizerBase, role: str, text: str) -> str:
    """Return the text that follows an answer's terminator when a message replies, up to where the policy continues.

    Raises InputError for a template that does not append messages, or does not end an answer with a special token.
    """
    answer = {**_ANSWER, "content": _MARK}
    messages = [_QUESTION, answer, {"role": role, "content": text}]
    _, reply, rest = render_messages(tokenizer, messages, add_generation_prompt=True).partition(_MARK)
    end = _special_pattern(tokenizer).match(rest.lstrip())
    if not reply or not end:
        raise InputError(
            f"the chat template does not end an answer with a special token and append a message of {role!r} to it"
        )
    return rest.lstrip()[end.end() :]


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    options: ChatOptions = NO_OPTIONS,
    add_generation_prompt: bool = False,
) -> str:
    """Return the text of messages as the chat template writes them. Raises InputError if there is no template or it
    fails."""
    if not tokenizer.chat_template:
        raise InputError("the rows hold messages, and the tokenizer has no chat template; give one that has")
    try:
        with bounded_rendering():
            text = tokenizer.apply_chat_template(
                [_with_thought(message) for message in messages],
                tools=list(options.tools) or None,  # type: ignore[arg-type]  # whatever JSON the row holds
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options.variables,
            )
    except RenderLimitError:
        raise
    except Exception as error:  # a template is a foreign program and may raise anything
        raise InputError(
            f"the chat template fails on this conversation ({type(error).__name__}: {error!s:.200}); "
            "change the messages, or give a tokenizer whose template writes them"
        ) from None
    return check_rendered(str(text))


def _turn(tokenizer: PreTrainedTokenizerBase, messages: Messages, index: int, options: ChatOptions) -> _Turn:
    """Return the assistant's message at `index`, rendered as the last of the conversation."""
    question = render_messages(tokenizer, messages[:index], options=options, add_generation_prompt=True)
    text = render_messages(tokenizer, messages[: index + 1], options=options)
    skips_opening = not text.startswith(question)
    if skips_opening:
        # The template opens a thought here, which this answer does not have, so the answer begins before it.
        shared = _whole_tokens(tokenizer, question, _shared_length(question, text))
        before = render_messages(tokenizer, messages[:index], options=options)
        if not text.startswith(before) or shared < len(before):
            raise RewrittenTurnError(
                f"the chat template writes the messages before {index} in another way once an answer follows"
            )
        question = text[:shared]
    usual, tail = _usual_end(tokenizer, messages[index]), _last_special(tokenizer, text, len(question))
    end = next((end for end in tail if end.group() == usual), tail[0] if tail else None)
    if end:
        return _Turn(text, len(question), end.end(), end.group(), skips_opening)
    if usual:
        return _Turn(text + usual, len(question), len(text + usual), usual, skips_opening)
    content = str(messages[index].get("content") or "").rstrip()
    length = len(text.rstrip()) if content and text.rstrip().endswith(content) else len(text)
    return _Turn(text, len(question), length, "", skips_opening)


def _last_special(tokenizer: PreTrainedTokenizerBase, text: str, start: int) -> list[re.Match[str]]:
    """Return the special tokens after the last word of text[start:], the last first."""
    tail: list[re.Match[str]] = []
    behind = len(text)
    for end in reversed(list(_special_pattern(tokenizer).finditer(text, start))):
        if text[end.end() : behind].strip():
            break
        tail.append(end)
        behind = end.start()
    return tail


def _usual_end(tokenizer: PreTrainedTokenizerBase, answer: Mapping[str, Any]) -> str:
    """Return the text of the special token that ends such an answer, with or without a tool call; empty for none."""
    template = tokenizer.chat_template
    return _usual_ends(tokenizer, template)[bool(answer.get("tool_calls"))] if isinstance(template, str) else ""


@lru_cache(maxsize=16)
def _usual_ends(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    """Return the usual ends of a plain answer and of one with a tool call."""
    plain = _end_in_form(tokenizer, _ANSWER, _QUESTION)
    return plain, _end_in_form(tokenizer, _CALL, _TOOL)


def _end_in_form(tokenizer: PreTrainedTokenizerBase, answer: dict[str, Any], following: dict[str, Any]) -> str:
    try:
        text = render_messages(tokenizer, [_QUESTION, answer])
    except InputError:  # a template without tool calls, for example
        return ""
    try:
        more = render_messages(tokenizer, [_QUESTION, answer, following])
    except InputError:
        more = text
    tail = _last_special(tokenizer, text, 0)
    if not tail:  # the model ends its turn with the token that begins the next (GLM)
        begins = _special_pattern(tokenizer).match(more, len(text)) if more.startswith(text) else None
        return begins.group() if begins else ""
    # Phi writes an end-of-text after the end of the turn; only the latter remains when a message follows.
    shared = _shared_length(text, more)
    return next((end for end in tail if end.end() <= shared), tail[0]).group()


def _shared_length(text: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


def _cut_off(turn: _Turn, message: Mapping[str, Any]) -> _Turn:
    """Remove from a turn the text that its template writes after the message's last words."""
    written = turn.text[turn.start : turn.end]
    words = str(message.get("content") or "").strip()
    thought = str(message.get("reasoning_content") or "").strip()
    spoken = "" if message.get("tool_calls") else words or thought
    position = written.rfind(spoken) if spoken else -1
    length = len(written) - len(turn.terminator) if position < 0 else position + len(spoken)
    return replace(turn, end=turn.start + length, terminator="")


def _own_end(tokenizer: PreTrainedTokenizerBase, turn: _Turn, is_cut_off: bool) -> list[int]:
    """Return the tokenizer's end token for an answer whose template writes none."""
    end = tokenizer.eos_token_id
    return [end] if not turn.terminator and not is_cut_off and end is not None else []


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _extended(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str, start: int, end: int) -> list[int]:
    """Extend the ids of text[:start] to those of text[:end].

    If a token would cross the border, which no policy can sample, the text after the border is encoded alone.
    """
    if start == end:
        return ids
    whole = _encode(tokenizer, text[:end])
    if whole[: len(ids)] == ids:
        return whole
    part = _encode(tokenizer, text[start:end])
    shown = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if shown != text[start:end]:
        raise InputError(
            f"the tokenizer does not split the conversation at {text[start - 10 : start]!r} | "
            f"{text[start : start + 10]!r}; such a row needs token ids"
        )
    return ids + part


def _whole_tokens(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> int:
    """Return the length of the longest prefix of text[:length] that ends with a whole token."""
    if not getattr(tokenizer, "is_fast", False):
        return length
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return max((end for _, end in offsets if end <= length), default=0)


def _special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that matches special tokens, the longest first."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    texts = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _text_of(tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(index))


def _with_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its thought under every name that templates use."""
    thought = message.get(THOUGHT_FIELDS[0])
    return dict(message) if thought is None else {**message, **dict.fromkeys(THOUGHT_FIELDS, thought)}


def _without_end(message: dict[str, Any], ends: set[str]) -> dict[str, Any]:
    """Return an assistant's message without the terminator that the template will write itself."""
    if message["role"] != "assistant":
        return message
    content = str(message.get("content") or "")
    return next(({**message, "content": content.removesuffix(end)} for end in ends if content.endswith(end)), message)


def _check_tools(tokenizer: PreTrainedTokenizerBase, prompt: Messages, options: ChatOptions) -> None:
    if not options.tools:
        return
    without = ChatOptions(variables=options.variables)
    if render_messages(tokenizer, prompt, options=options) == render_messages(tokenizer, prompt, options=without):
        raise InputError(
            f"the conversation has {len(options.tools)} tools, which the chat template does not write; give a "
            "tokenizer whose template does, or rows with token ids"
        )


def _has_hidden_thought(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, response: Messages, options: ChatOptions
) -> bool:
    if not any(message.get(THOUGHT_FIELDS[0]) for message in response):
        return False
    silent = [{name: said for name, said in message.items() if name not in THOUGHT_FIELDS} for message in response]
    whole, without = ([*prompt, *messages] for messages in (response, silent))
    return render_messages(tokenizer, whole, options=options) == render_messages(tokenizer, without, options=options)


def thought_ids(tokenizer: PreTrainedTokenizerBase, thought: tuple[str, str]) -> tuple[int, int]:
    """Token ids of the texts that begin and end a thought. Raises UnknownNameError for a text that is no single
    token."""
    begin, end = (tokenizer.encode(text, add_special_tokens=False) for text in thought)
    for text, ids in zip(thought, (begin, end), strict=True):
        if len(ids) != 1 or tokenizer.decode(ids) != text:
            raise UnknownNameError(
                f"{text!r:.80} is {len(ids)} tokens of the student, and a thought is recognised by single ones; set "
                'thought to the tokens of its chat template, or teacher_parts to "all"'
            )
    return begin[0], end[0]
