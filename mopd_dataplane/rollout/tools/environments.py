"""Environments, which reply to the policy at the end of its turn, by the name that a domain gives.

Another package offers one as an entry point of `mopd.environments`, or it is named `package.module:Name` as a domain's
`environment`. It works on text. The chat template, or the domain's `reply_template`, turns a reply into tokens for the
student (replies.py), which are masked in the loss.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.errors import InputError, UnknownNameError
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.tools.sandbox import Result


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """An environment's view of a conversation at the end of the policy's turn.

    Example: said = ["add 3 4", "7", "The sum is 7."]: two turns of the policy, and the reply between them.
    """

    prompt: Prompt
    said: list[str]
    """Texts of policy and environment in turn, the policy first and last, without special tokens."""
    run: Callable[..., Result]
    """run(argv, timeout_s=10.0) runs a command in the sample's sandbox, at most once over all lives of the rollout."""

    @property
    def turns(self) -> int:
        """Number of the policy's turns so far."""
        return (len(self.said) + 1) // 2


class Environment(ABC):
    """An environment, created once in each process that samples, with the domain's `environment_args` as keywords.

    A turn may be replayed after a crash, so `reply` must be a function of the conversation and of the output of its
    commands: no clock, no random numbers, no state of its own. Side effects go through `Conversation.run`.
    """

    role: ClassVar[str] = "tool"
    """Role of its replies in a chat template."""

    @abstractmethod
    def reply(self, conversation: Conversation) -> str | None:
        """Return the reply to the policy's last turn; None ends the conversation."""


class CommandTool(Environment):
    """One tool: if the policy's turn matches `call`, a command runs in its sandbox, and the output is the reply.

    call: regular expression that is searched in the turn. argv: the command, its words with the groups of `call` as
    placeholders, `["expr", "{a}", "+", "{b}"]`: the policy's text never becomes another word, and no shell reads it.
    turns: largest number of calls in a conversation. timeout_s: longest time of a command, in seconds. A command that
    fails replies with its exit code and its stderr.
    """

    def __init__(self, *, call: str, argv: Sequence[str], turns: int = 4, timeout_s: float = 10.0) -> None:
        try:
            self._call = re.compile(call)
        except re.error as error:
            raise InputError(f"call {call!r:.80} is no regular expression: {error}") from None
        self._argv = tuple(argv)
        if not self._argv or isinstance(argv, str) or not all(isinstance(word, str) for word in self._argv):
            raise InputError(f'argv is {argv!r:.80}, expected a list of words, as in ["expr", "{{a}}", "+", "{{b}}"]')
        try:
            self._command(dict.fromkeys(self._call.groupindex, ""))
        except (KeyError, IndexError, ValueError) as error:
            raise InputError(
                f"argv names {error}; the groups of call are {sorted(self._call.groupindex)}; write {{{{ for a brace"
            ) from None
        self._turns, self._timeout_s = turns, timeout_s

    def _command(self, groups: dict[str, str]) -> list[str]:
        return [word.format(**groups) for word in self._argv]

    def reply(self, conversation: Conversation) -> str | None:
        match = self._call.search(conversation.said[-1])
        if match is None or conversation.turns > self._turns:
            return None
        groups = {name: (value or "").replace("\0", "") for name, value in match.groupdict().items()}
        done = conversation.run(self._command(groups), timeout_s=self._timeout_s)
        if done.timed_out:
            return f"no result after {self._timeout_s:g} s"
        return done.stdout.strip() if done.exit_code == 0 else f"exit code {done.exit_code}: {done.stderr.strip()}"


ENVIRONMENTS: dict[str, type[Environment] | str] = {
    "command": CommandTool,
    "verifiers": "mopd_dataplane.integrations.verifiers:TasksetTools",
}
"""Built-in environments by their names in a domain's `environment`: a class, or where it is."""


def find_environment(name: str) -> type[Environment]:
    """Return the class that a domain names. Raises UnknownNameError."""
    plugin: Any = find_plugin("mopd.environments", name, ENVIRONMENTS)
    if isinstance(plugin, str):
        plugin = find_plugin("mopd.environments", plugin, {})
    if not (isinstance(plugin, type) and issubclass(plugin, Environment)):
        raise UnknownNameError(f"environment {name!r} is no class derived from {__name__}.Environment")
    return plugin


def make_environment(name: str, arguments: dict[str, Any]) -> Environment:
    """Create the environment that a domain names. Raises UnknownNameError for the name, InputError for the
    arguments."""
    environment_class = find_environment(name)
    try:
        return environment_class(**arguments)
    except TypeError as error:
        raise InputError(f"environment {name!r} refuses environment_args {arguments!r:.120}: {error}") from None
