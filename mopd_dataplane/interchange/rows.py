"""Row, the common form of every format: one response, with as much as its source recorded, and its messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.row_files import Fields, check_text, integer, number, objects, part, text
from mopd_dataplane.models.chat_template import NO_OPTIONS, THOUGHT_FIELDS, ChatOptions, Messages

if TYPE_CHECKING:
    from mopd_dataplane.interchange.signal_entries import TeacherSignal


@dataclass(kw_only=True)
class Row:
    """One response, in the detail of its source; a field that is None was not recorded.

    Example: Row(location="7.jsonl:1", prompt="3 + 4 =", response=" 7", iteration=7, rewards={"score": 1.0}).
    """

    location: str
    """File and line or row number."""
    prompt: str | Messages | None = None
    rendered: bool = False
    """True if the prompt's text is what the model read, with chat template and special tokens."""
    response: str | Messages | None = None
    """Text, or the messages from the policy's first turn on; the assistant's are the policy's."""
    chat: ChatOptions = NO_OPTIONS
    """Tools of the conversation and variables of its template."""
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    """Token ids of the response, present if and only if those of the prompt are; else the text is tokenised."""
    logprobs: list[float] | None = None
    """Sampler log-prob of each response token."""
    loss_mask: list[int] | None = None
    """1 on response tokens that the policy wrote; None means all."""
    teacher_logprobs: list[float] | None = None
    """Log-prob of each response token under a reference model; values of untrained tokens are not read."""
    answer: str = ""
    domain: str = ""
    iteration: int = 0
    """Training step in which the response was sampled."""
    turns: int = 1
    rewards: dict[tuple[str, str], float] = field(default_factory=dict)
    """Rewards by verifier and its version."""
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further results of a verifier, by its name: `detail`, and `correct` if it judges correctness."""
    signals: list[TeacherSignal] = field(default_factory=list)
    """Signals of teachers for the response."""
    sample: dict[str, Any] = field(default_factory=dict)
    """Fields of records.Sample that the source has."""
    question: dict[str, Any] = field(default_factory=dict)
    """Fields of records.Prompt that the source has."""
    ignored: tuple[str, ...] = ()
    """Fields of the source's row that were not used, if a reader knows them all."""
    ended: bool = False
    """True if the import added the token that ends an answer; set by the import, not by readers."""
    from_text: bool = False
    """True if the import tokenised the row from text; set by the import, not by readers."""
    is_part: bool = False
    """True if the row is one answer of a conversation that was split; set by the import, not by readers."""
    without_thought: bool = False
    """True if the answer begins before the thought that the chat template opens; set by the import, not by readers."""


Reader = Callable[[Fields, str], Iterator[Row]]
"""(fields of one line or row, its location) -> its responses. Another package offers a reader as an entry point of
`mopd.importers`, or it is named as `package.module:function`."""

_FINISHED = {"stop": "stop", "tool_calls": "stop", "length": "length"}


def finish_reason(value: Any) -> dict[str, Any]:
    """Return the sample's fields for a source's finish reason; empty for an unknown one."""
    return {"finish_reason": _FINISHED[value]} if isinstance(value, str) and value in _FINISHED else {}


def drawn(fields: Fields, location: str) -> dict[str, Any]:
    """Return the sampling parameters that a source recorded."""
    stated: dict[str, Any] = {name: number(fields, name, location) for name in ("temperature", "top_p")}
    stated["top_k"] = max(0, integer(fields, "top_k", location)) or None
    return {name: value for name, value in stated.items() if value is not None}


def read_prompt(fields: Fields, name: str, location: str, *, optional: bool = False) -> str | Messages | None:
    """Return a prompt: text or messages. Raises InputError for another type, or if it is missing and not optional."""
    return None if optional and fields.get(name) is None else _said(fields, name, location, "a list of messages")


def read_response(fields: Fields, name: str, location: str) -> str | Messages:
    """Return a response: text, or messages of which the first is the assistant's."""
    content = _said(fields, name, location, "messages of the assistant")
    return content if isinstance(content, str) else as_response(content, name, location)


def _said(fields: Fields, name: str, location: str, or_messages: str) -> str | Messages:
    value = fields.get(name)
    if isinstance(value, str):
        return text(fields, name, location)
    if isinstance(value, list) and value:
        return read_messages(value, name, location)
    raise InputError(f"{location}: field {name!r} is {value!r:.60}, expected text or {or_messages}")


def as_response(messages: Messages, name: str, location: str) -> str | Messages:
    """Return messages from the policy's first turn on as a response: a single one without tool calls becomes its text.

    Messages after the assistant's last one are dropped, because no token of the policy follows them.
    """
    if not messages or messages[0]["role"] != "assistant":
        role = messages[0]["role"] if messages else "no message"
        raise InputError(f"{location}: field {name!r} begins with {role!r:.40}, expected a message of the assistant")
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    own = messages[: last + 1]
    if len(own) == 1 and set(own[0]) == {"role", "content"}:
        return str(own[0]["content"])
    return own


def chat_options(fields: Fields, location: str) -> ChatOptions:
    """Read tools and template variables of a conversation, named as in requests to servers and files for training.

    `tools`: a list of JSON schemas, or its JSON. `chat_template_kwargs`: variables of the template.
    """
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise InputError(f"{location}: field 'tools' is {tools!r:.60}, expected a list of JSON schemas") from None
    variables = part(fields, "chat_template_kwargs", location)
    if taken := sorted(_OPTIONS & variables.keys()):
        raise InputError(
            f"{location}: chat_template_kwargs holds {taken[0]!r}, which is an argument of apply_chat_template and no "
            "variable of a template"
        )
    return ChatOptions(tools=objects({"tools": tools}, "tools", location), variables=variables)


_OPTIONS = {"conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"}
"""Arguments of `apply_chat_template` that are not variables of a template."""


def conversation_text(messages: Messages) -> str:
    """Format messages as text for people, with the arguments of tool calls."""
    return "\n".join(f"{message['role']}: {_spoken(message)}" for message in messages)


def _spoken(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join(text for text in (str(message["content"]), *written) if text)


def read_messages(value: Any, name: str, location: str) -> Messages:
    """Parse chat messages for templates: text in `content`, arguments of tool calls as objects.

    Raises InputError for a value that is no message, or holds more than text.
    """
    if not isinstance(value, list) or not value:
        raise InputError(f"{location}: field {name!r} is {value!r:.60}, expected a list of messages")
    return [_message(message, f"{name}[{at}]", location) for at, message in enumerate(value)]


def _message(value: Any, name: str, location: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise InputError(f"{location}: {name} is {value!r:.60}, expected a message with role and content")
    message = {"role": value["role"], "content": _content(value.get("content"), f"{name}.content", location)}
    for key in ("name", "tool_call_id"):
        if isinstance(value.get(key), str):
            message[key] = value[key]
    thought = next((value[key] for key in THOUGHT_FIELDS if isinstance(value.get(key), str)), "")
    if thought:
        message[THOUGHT_FIELDS[0]] = thought
    calls = value.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise InputError(f"{location}: {name}.tool_calls is {calls!r:.60}, expected a list")
    if calls:
        message["tool_calls"] = [_call(call, f"{name}.tool_calls", location) for call in calls]
    return message


def _content(value: Any, name: str, location: str) -> str:
    parts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(parts, list):
        raise InputError(f"{location}: {name} is {value!r:.60}, expected text")
    texts = []
    for piece in parts:
        text_of_piece = piece.get("text") if isinstance(piece, dict) and piece.get("type", "text") == "text" else piece
        if not isinstance(text_of_piece, str):
            raise InputError(f"{location}: {name} holds {piece!r:.60}; only text is imported")
        check_text(text_of_piece, name, location)
        texts.append(text_of_piece)
    return "".join(texts)


def _call(value: Any, name: str, location: str) -> dict[str, Any]:
    """Convert a tool call for chat templates. verifiers writes name and arguments flat, OpenAI under `function`."""
    function = value.get("function") or value if isinstance(value, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{location}: {name} holds {value!r:.60}, expected a call with a function's name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None  # the model wrote no JSON: keep its text
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif isinstance(arguments, dict):  # Parquet gives every call the arguments of all, null if unused
        arguments = {key: value for key, value in arguments.items() if value is not None}
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {**call, "id": value["id"]} if isinstance(value.get("id"), str) else call
