"""The environments of a job's domains, ready to be asked: in a rollout, where every command is logged, and in an
evaluation, where none is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mopd_dataplane.job.job import Job
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.tools.environments import find_environment, make_environment
from mopd_dataplane.rollout.tools.replies import ReplyForm, answering, reply_form
from mopd_dataplane.rollout.tools.sandbox import Call, SubprocessSandbox, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answer = Callable[[Turn], list[int] | None]


def environments_of(
    job: Job, domains: Sequence[str], tokenizer: PreTrainedTokenizerBase, decode: Callable[[list[int]], str]
) -> Answer | None:
    """The environments of some domains as one function; None where every conversation has one turn.

    Raises UnknownNameError or InputError for an environment that cannot be made, PromptError for a chat template that
    cannot write its replies.
    """
    named = {name: job.domains[name] for name in domains if job.domains[name].environment}
    if not named:
        return None
    environments = {name: make_environment(own.environment, own.environment_args) for name, own in named.items()}
    replies = {name: reply_form_of(job, name, tokenizer) for name in named}
    return answering(environments, replies, decode)


def reply_form_of(job: Job, domain: str, tokenizer: PreTrainedTokenizerBase) -> ReplyForm:
    """Form in which the student reads replies in a domain that has an environment. Raises as environments_of does."""
    own = job.domains[domain]
    return reply_form(
        tokenizer,
        prompt_template=job.student.prompt_template,
        reply_template=own.reply_template,
        role=find_environment(own.environment).role,
    )


class UnloggedTurns:
    """Environments asked in an evaluation: its commands run in a folder of its own, and again when it is repeated."""

    def __init__(self, answer: Answer, folder: Path) -> None:
        self._answer = answer
        self._sandbox = SubprocessSandbox(folder)
        self._calls: dict[str, list[Call]] = {}

    def reply(self, prompt: Prompt, uid: str, response: list[int], loss_mask: list[int]) -> list[int] | None:
        """Tokens of the reply to a turn that ended, None where the conversation is over."""
        calls = self._calls.setdefault(uid, [])

        def remember(call: Call, ordinal: int) -> None:
            calls[ordinal : ordinal + 1] = [call]

        turn = Turn(prompt, response, loss_mask=loss_mask, uid=uid, calls=calls, sandbox=self._sandbox, say=remember)
        return self._answer(turn)
