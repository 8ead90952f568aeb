"""A reward function in a process of its own, so that an answer that takes too long can be given up.

The process is started on the first answer and again after each that was given up. It reads one JSON object a line
({"prompt": fields, "response": text or turns}) and answers with one; it ends with its parent.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from mopd_dataplane.base.processes import KILLED_S, end_with_parent, parent_named
from mopd_dataplane.errors import DeadlineError, InputError
from mopd_dataplane.records import Prompt
from mopd_dataplane.score.reward import Outcome, Reward, RewardError, Unscorable, resolve_reward

_START_S = 300.0
"""Longest time for importing the function, in seconds."""
_READY = "ready"


@dataclass
class TimedReward:
    """Calls a reward function in a child process; close() ends it."""

    reward: Reward
    timeout_s: float
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _unread: bytes = field(default=b"", init=False)

    def __call__(self, prompt: Prompt, response: str | list[str]) -> Outcome | Unscorable:
        """Score one response. Returns Unscorable when the function did not return in time.

        Raises RewardError for a function that raises or ends its process.
        """
        process = self._started()
        request = json.dumps({"prompt": asdict(prompt), "response": response}, default=str)
        assert process.stdin is not None
        try:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            reply = self._reply(process, self.timeout_s)
        except BrokenPipeError:
            reply = b""
        if reply is None:
            self.close()
            return Unscorable(f"no result after {self.timeout_s:g} s")
        if not reply:
            code = process.wait(KILLED_S)
            self.close()
            raise RewardError(
                f"reward {self.reward.name!r} ended its process with exit code {code} at prompt {prompt.prompt_id!r}, "
                f"answer {str(response)[:80]!r}; mend it, then run the same command again: what is rewarded stays"
            )
        said: dict[str, Any] = json.loads(reply)
        if "error" in said:
            raise RewardError(said["error"])
        return Unscorable(said["reason"]) if "reason" in said else Outcome(said["reward"], said["correct"])

    def close(self) -> None:
        """End the process, and every process that the function started in its session."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(KILLED_S)
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(BrokenPipeError):  # a request that was not read
                    assert pipe is not None
                    pipe.close()
        self._process, self._unread = None, b""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        command = [sys.executable, "-m", "mopd_dataplane.score.timed_reward", self.reward.name]
        path = os.pathsep.join(["", *sys.path])  # find a function beside the job file as this process does
        environment = {**parent_named(), "PYTHONPATH": path.lstrip(os.pathsep)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        reply = self._reply(self._process, _START_S)
        if reply is None or json.loads(reply or b'""') != _READY:
            self.close()
            raise DeadlineError(
                f"reward {self.reward.name!r} did not start in a process of its own; see its messages above"
            )
        return self._process

    def _reply(self, process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
        """Read one line of the process. Returns an empty one when it has ended, None when it is silent for too long."""
        assert process.stdout is not None
        descriptor, deadline = process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            read = os.read(descriptor, 1 << 16)
            if not read:
                return b""
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _serve(name: str) -> None:
    """Answer requests on stdin until it closes. The function's own prints go to stderr, and it reads an empty stdin."""
    requests, replies = os.fdopen(os.dup(sys.stdin.fileno())), os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    reward = resolve_reward(name)
    print(json.dumps(_READY), file=replies, flush=True)
    for line in requests:
        request = json.loads(line)
        print(json.dumps(_answer(reward, Prompt(**request["prompt"]), request["response"])), file=replies, flush=True)


def _answer(reward: Reward, prompt: Prompt, response: Any) -> dict[str, Any]:
    try:
        outcome = reward(prompt, response)
    except InputError as error:
        return {"error": str(error)}
    return {"reason": outcome.reason} if isinstance(outcome, Unscorable) else outcome._asdict()


if __name__ == "__main__":
    end_with_parent()
    _serve(sys.argv[1])
