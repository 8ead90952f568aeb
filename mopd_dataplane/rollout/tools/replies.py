"""A conversation as tokens: which tokens are the policy's, and how the student reads an environment's reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from mopd_dataplane.errors import InputError, PromptError
from mopd_dataplane.models.chat_template import reply_text
from mopd_dataplane.rollout.tools.environments import Conversation, Environment
from mopd_dataplane.rollout.tools.sandbox import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "{reply}"


@dataclass(frozen=True)
class ReplyForm:
    """How the student reads a reply.

    Example: reply_template "\\n{reply}\\n" -> ids("46") are the tokens of "\\n46\\n", before = after = "\\n".
    """

    ids: Callable[[str], list[int]]
    """Encodes a reply as the tokens that follow the policy's turn, up to where the policy writes again."""
    before: str = ""
    """Text before a reply's own text in its decoded tokens, without special tokens."""
    after: str = ""
    """Text after a reply's own text."""

    def text(self, decoded: str) -> str:
        """Extract a reply's own text from its decoded tokens."""
        return decoded.removeprefix(self.before).removesuffix(self.after)


def answering(
    environments: Mapping[str, Environment], replies: Mapping[str, ReplyForm], decode: Callable[[list[int]], str]
) -> Callable[[Turn], list[int] | None]:
    """Combine the environments of several domains into the one function that a rollout calls.

    environments, replies: by domain; a domain without one has conversations of one turn. decode: decodes tokens without
    special tokens.
    """

    def answer(turn: Turn) -> list[int] | None:
        environment = environments.get(turn.prompt.domain)
        if environment is None:
            return None
        form = replies[turn.prompt.domain]
        said = turn_texts(turn.response, turn.loss_mask, form, decode)
        reply = environment.reply(Conversation(prompt=turn.prompt, said=said, run=turn.run))
        return None if reply is None else form.ids(reply)

    return answer


def turn_texts(
    response: Sequence[int], loss_mask: Sequence[int], form: ReplyForm, decode: Callable[[list[int]], str]
) -> list[str]:
    """Return the texts of the policy and its environment in turn, without special tokens and without a reply's
    frame."""
    return [decode(ids) if own else form.text(decode(ids)) for ids, own in whose_turns(response, loss_mask)]


def whose_turns(response: Sequence[int], loss_mask: Sequence[int]) -> list[tuple[list[int], bool]]:
    """Cut a response into turns. Returns the tokens of each, with True for the policy's.

    >>> whose_turns([7, 8, 9, 7], [1, 1, 0, 1])
    [([7, 8], True), ([9], False), ([7], True)]
    """
    pairs = groupby(zip(loss_mask, response, strict=True), key=lambda pair: bool(pair[0]))
    return [([token for _, token in run], own) for own, run in pairs]


def reply_form(
    tokenizer: PreTrainedTokenizerBase, *, prompt_template: str, reply_template: str, role: str
) -> ReplyForm:
    """Return how the student reads a reply: as a message of the chat template if `prompt_template` is `chat`, else by
    `reply_template`.

    Raises PromptError for a chat template that does not append messages, or does not end answers with special tokens.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def framed(ids: Callable[[str], list[int]]) -> ReplyForm:
        whole = str(tokenizer.decode(ids(_MARK), skip_special_tokens=True))
        before, _, after = whole.partition(_MARK) if _MARK in whole else ("", "", "")
        return ReplyForm(ids, before, after)

    if prompt_template != "chat":
        return framed(lambda text: encode(reply_template.replace("{reply}", text)))

    def as_a_message(text: str) -> list[int]:
        try:
            return encode(reply_text(tokenizer, role, text))
        except InputError as error:
            raise PromptError(f"{error}; set student.prompt_template and the domain's reply_template as text") from None

    return framed(as_a_message)
