"""A conversation as tokens: whose each token is, and what the student reads of an environment's reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from mopd_dataplane.errors import PromptError
from mopd_dataplane.rollout.tools.environments import Conversation, Environment
from mopd_dataplane.rollout.tools.sandbox import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ReplyIds = Callable[[str], list[int]]
"""Text of a reply -> the tokens that follow the policy's end-of-sequence token, up to where the policy writes again."""


def answering(
    environments: Mapping[str, Environment], replies: Mapping[str, ReplyIds], decode: Callable[[list[int]], str]
) -> Callable[[Turn], list[int] | None]:
    """The environments of several domains as the one that a rollout asks.

    environments, replies: by domain; a domain without one has conversations of one turn. decode: text of tokens without
    special tokens.
    """

    def answer(turn: Turn) -> list[int] | None:
        environment = environments.get(turn.prompt.domain)
        if environment is None:
            return None
        said = [decode(ids) for ids, _ in whose_turns(turn.response, turn.loss_mask)]
        reply = environment.reply(Conversation(prompt=turn.prompt, said=said, run=turn.run))
        return None if reply is None else replies[turn.prompt.domain](reply)

    return answer


def whose_turns(response: Sequence[int], loss_mask: Sequence[int]) -> list[tuple[list[int], bool]]:
    """A response cut into turns, and whether each is the policy's.

    >>> whose_turns([7, 8, 9, 7], [1, 1, 0, 1])
    [([7, 8], True), ([9], False), ([7], True)]
    """
    pairs = groupby(zip(loss_mask, response, strict=True), key=lambda pair: bool(pair[0]))
    return [([token for _, token in run], own) for own, run in pairs]


def reply_ids(tokenizer: PreTrainedTokenizerBase, *, prompt_template: str, reply_template: str, role: str) -> ReplyIds:
    """How the student reads a reply: as a message of the chat template where `prompt_template` is `chat`, else through
    `reply_template`.

    Raises PromptError for a chat template that does not append messages, or one without end-of-sequence tokens.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    if prompt_template != "chat":
        return lambda text: encode(reply_template.replace("{reply}", text))
    end = str(tokenizer.eos_token)
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]

    def as_a_message(text: str) -> list[int]:
        heard = [*asked, {"role": role, "content": text}]
        before = str(tokenizer.apply_chat_template(asked, tokenize=False))
        after = str(tokenizer.apply_chat_template(heard, tokenize=False, add_generation_prompt=True))
        if not after.startswith(before) or end not in before:
            raise PromptError(
                f"the chat template does not append a message of {role!r} to what was said and end the assistant's "
                f"with {end!r}; set student.prompt_template and the domain's reply_template as text"
            )
        return encode(after[before.rindex(end) + len(end) :])

    as_a_message("")
    return as_a_message
