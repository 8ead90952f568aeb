"""Commands that a sample runs, each at most once however often the rollout dies.

    intent durable  ->  dispatch  ->  result durable  ->  its tokens may enter the sample

Calls of one sample are totally ordered. When a turn is replayed after a crash, calls that have a result return it and
execute nothing. A call with an intent but no result is *in doubt*: the sandbox is asked by the call's key. If it does
not know, the sample is abandoned; a command is never run on a guess. A call that differs from the logged one means that
the environment is not a function of the conversation: the sample has diverged and is abandoned too.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import DeadlineError, ResourceError
from mopd_dataplane.records import Prompt

OUTPUT_BYTES = 64 << 10
"""Number of bytes of stdout and of stderr that are stored, each."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments; never a shell line."""

    argv: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a command. A time-out is a result, not an error: it is logged and replayed like any other."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a sample. Without a result it is in doubt."""

    position: int
    """Length of the response when the call was made, which identifies its turn."""
    command: Command
    result: Result | None = None


class Sandbox(Protocol):
    """Runs commands, and remembers by key which ones it ran."""

    def run(self, sandbox: str, key: str, command: Command) -> Result | None:
        """Run a command once per key in the named sandbox, or return the result of that key's earlier run.

        Returns None when the key's command was started but its outcome cannot be determined.
        """


class Abandoned(Exception):
    """The sample cannot continue; `reason` is one of log_records.ABANDON_REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Turn:
    """An environment's view of the end of a policy's turn: the conversation, and a way to run commands."""

    prompt: Prompt
    response: list[int]
    """Response tokens so far, all of them durable."""
    loss_mask: list[int]
    """1 on response tokens that the policy wrote."""
    uid: str
    calls: Sequence[Call]
    """Commands that the sample ran before, including those of this turn when it is replayed."""
    sandbox: Sandbox | None
    say: Callable[[Call, int], None]
    """Records a call with its ordinal."""

    def __post_init__(self) -> None:
        self._next = sum(call.position < len(self.response) for call in self.calls)

    def run(self, argv: Sequence[str], *, timeout_s: float = 10.0) -> Result:
        """Run a command in the sample's sandbox, at most once over all lives of this rollout.

        The environment must run the same commands in the same order when the same turn is replayed.
        Raises ResourceError when the rollout has no sandbox.
        """
        if self.sandbox is None:
            raise ResourceError("this rollout has no sandbox; give run_rollout(sandbox=SubprocessSandbox(folder))")
        command = Command(tuple(argv), timeout_s)
        ordinal = self._next
        self._next += 1
        earlier = self.calls[ordinal] if ordinal < len(self.calls) else None
        if earlier is not None and earlier.command != command:
            raise Abandoned("tool_diverged")
        if earlier is not None and earlier.result is not None:
            return earlier.result
        if earlier is None:
            earlier = Call(len(self.response), command)
            self.say(earlier, ordinal)
        fault_point("tool.dispatch")
        result = self.sandbox.run(self.uid, f"{self.uid}-{ordinal}", command)
        fault_point("tool.executed")
        if result is None:
            raise Abandoned("tool_in_doubt")
        self.say(Call(earlier.position, command, result), ordinal)
        return result


class SubprocessSandbox:
    """One folder per sample; commands run there as plain processes with an empty environment.

    An agent process (sandbox_agent.py) that outlives the rollout claims each command's key before it starts and writes
    its result durably, so a key is never run twice. It is no protection from hostile commands; a container is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def run(self, sandbox: str, key: str, command: Command) -> Result | None:
        """See Sandbox.run. Raises DeadlineError when the agent does not answer, ResourceError when it cannot start."""
        workspace = self._folder / sandbox
        workspace.mkdir(parents=True, exist_ok=True, mode=0o700)
        task = {"workspace": str(workspace), "key": key, "output_bytes": OUTPUT_BYTES} | asdict(command)
        agent = [sys.executable, "-m", "mopd_dataplane.rollout.tools.sandbox_agent"]
        deadline = command.timeout_s + 60
        try:
            done = subprocess.run(
                agent, input=json.dumps(task), capture_output=True, text=True, timeout=deadline, start_new_session=True
            )
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"the sandbox agent of {key} has not answered in {deadline:.0f} s") from None
        if done.returncode:
            raise ResourceError(f"the sandbox agent of {key} failed: {done.stderr.strip()[-400:]}")
        answer: dict[str, Any] | None = json.loads(done.stdout)
        return None if answer is None else Result(**answer)
