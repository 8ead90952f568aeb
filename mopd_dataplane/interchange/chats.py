"""Readers of conversations: chat completions as served or logged, files for supervised fine-tuning and of
preferences."""

from collections.abc import Iterator
from typing import Any

from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.row_files import Fields, floats, integers, number, objects, part
from mopd_dataplane.interchange.rows import (
    Row,
    as_response,
    chat_options,
    drawn,
    finish_reason,
    read_messages,
    read_prompt,
    read_response,
)
from mopd_dataplane.models.chat_template import Messages

_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


def read_openai(fields: Fields, location: str) -> Iterator[Row]:
    """Read each choice of a chat completion, or the last message of a logged conversation.

    The request and the response are in one object, or under `request` and `response`. Token ids and the sampler's
    log-probs are read if the server returned them (vLLM: `return_token_ids`).
    """
    request, response = part(fields, "request", location), part(fields, "response", location)
    whole = {**fields, **request, **part(response, "body", location), **response}
    messages = read_messages(whole.get("messages"), "messages", location)
    reward = number(fields, "reward", location)
    token_fields = drawn(whole, location)
    rewards = {} if reward is None else {("reward", ""): reward}
    common: dict[str, Any] = {"location": location, "rewards": rewards, "chat": chat_options(whole, location)}
    if "choices" not in whole:
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise InputError(
                f"{location}: the last message is of {messages[-1]['role']!r:.40}, expected the assistant's"
            )
        answer = as_response(messages[-1:], "messages", location)
        sample = {**token_fields, **finish_reason(whole.get("finish_reason"))}
        yield Row(**common, prompt=messages[:-1], response=answer, sample=sample)
        return
    for choice in objects(whole, "choices", location):
        row = Row(**common, prompt=messages, sample={**token_fields, **finish_reason(choice.get("finish_reason"))})
        if choice.get("token_ids") is None or whole.get("prompt_token_ids") is None:
            row.response = as_response(read_messages([choice.get("message")], "message", location), "message", location)
        else:
            row.prompt_ids = integers(whole["prompt_token_ids"], "prompt_token_ids", location)
            row.response_ids = integers(choice["token_ids"], "token_ids", location)
            told = objects(part(choice, "logprobs", location), "content", location)
            row.logprobs = (
                floats([entry.get("logprob") for entry in told], "logprobs.content", location) if told else None
            )
        yield row


def read_sft(fields: Fields, location: str) -> Iterator[Row]:
    """Read a prompt with its completion, or a conversation.

    A conversation (`messages`, or `conversations` as ShareGPT names them) gives one response for every message of the
    assistant, with the messages before it as prompt.
    """
    chat = chat_options(fields, location)
    if fields.get("completion") is not None:
        prompt, completion = read_prompt(fields, "prompt", location), read_response(fields, "completion", location)
        _check_same_kind(prompt, completion, location)
        yield Row(location=location, prompt=prompt, response=completion, chat=chat)
        return
    if (listed := fields.get("conversations")) is not None and isinstance(listed, list):
        turns = [
            {
                "role": _SHAREGPT.get(str(turn.get("from")), turn.get("role")),
                "content": turn.get("value", turn.get("content")),
            }
            for turn in objects(fields, "conversations", location)
        ]
        messages = read_messages(turns, "conversations", location)
    else:
        messages = read_messages(fields.get("messages"), "messages", location)
    own_turns = [number_ for number_, message in enumerate(messages) if message["role"] == "assistant" and number_]
    if not own_turns:
        raise InputError(f"{location}: field 'messages' has no message of the assistant after a prompt")
    for turn in own_turns:
        answer = as_response(messages[turn : turn + 1], "messages", location)
        yield Row(location=location, prompt=messages[:turn], response=answer, chat=chat)


def read_preference(fields: Fields, location: str) -> Iterator[Row]:
    """Read the chosen answer with reward 1 and the rejected one with 0. Their common beginning is the prompt, unless
    the row has one."""
    chat = chat_options(fields, location)
    if fields.get("prompt") is not None:
        prompt = read_prompt(fields, "prompt", location)
        answers = [read_response(fields, name, location) for name in ("chosen", "rejected")]
    else:
        both = [read_messages(fields.get(name), name, location) for name in ("chosen", "rejected")]
        shared = 0
        while shared < min(map(len, both)) - 1 and both[0][shared] == both[1][shared]:
            shared += 1
        if not shared:
            raise InputError(f"{location}: chosen and rejected begin with different messages, and there is no 'prompt'")
        prompt, answers = (
            both[0][:shared],
            [as_response(said[shared:], "chosen or rejected", location) for said in both],
        )
    for answer, reward in zip(answers, (1.0, 0.0), strict=True):
        _check_same_kind(prompt, answer, location)
        yield Row(location=location, prompt=prompt, response=answer, chat=chat, rewards={("preference", ""): reward})


def _check_same_kind(prompt: str | Messages | None, response: str | Messages, location: str) -> None:
    if isinstance(prompt, str) and not isinstance(response, str):
        raise InputError(f"{location}: the prompt is text and the response has several messages; give both as messages")
