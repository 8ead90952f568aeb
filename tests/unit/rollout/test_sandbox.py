"""A command that must not run twice: appended lines are counted after every kind of death."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mopd_dataplane.base import fault_points
from mopd_dataplane.job import sections
from mopd_dataplane.records import sample_uid
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.runner import RolloutReport
from mopd_dataplane.rollout.tools.sandbox import OUTPUT_BYTES, Call, Command, Result, SubprocessSandbox, Turn
from mopd_dataplane.testing.toy_engine import EOS

Roll = Callable[..., RolloutReport]
SETTINGS = {"count": 4, "slots": 4, "rollout": sections.Rollout(max_new_tokens=400)}
TURNS = 2


class Died(BaseException):
    """Stands for SIGKILL."""


def append_line(turn: Turn) -> list[int] | None:
    """The tool: append the turn's number to a file and say how many lines it has now."""
    turns = turn.response.count(EOS)
    if turns > TURNS:
        return None
    done = turn.run(["sh", "-c", f"echo {turns} >> log.txt; wc -l < log.txt"])
    return [9, 1 + int(done.stdout) % 8]


def lines(folder: Path, ordinal: int) -> list[str]:
    """What the sample's file says in the end."""
    return (folder / sample_uid(7, "student", f"p{ordinal}", 0, 1) / "log.txt").read_text().split()


def dying_at(point: str, visit: int) -> Callable[[str], None]:
    left = visit

    def die(name: str) -> None:
        nonlocal left
        left -= name == point
        if left == 0:
            raise Died

    return die


@pytest.mark.slow
@pytest.mark.parametrize("point", ["tool.dispatch", "tool.executed", "wal.append", "rollout.step"])
def test_every_command_runs_once_whenever_the_rollout_dies(roll: Roll, shelf: Any, tmp_path: Path, point: str) -> None:
    whole = type(shelf)()
    roll(whole, home=tmp_path / "a", environment=append_line, sandbox=SubprocessSandbox(tmp_path / "whole"), **SETTINGS)
    sandbox = SubprocessSandbox(tmp_path / "broken")
    for visit in (1, 3):
        fault_points.observe(dying_at(point, visit))
        try:
            with pytest.raises(Died):
                roll(shelf, home=tmp_path / "b", environment=append_line, sandbox=sandbox, **SETTINGS)
        finally:
            fault_points.observe(None)
    report = roll(shelf, home=tmp_path / "b", environment=append_line, sandbox=sandbox, **SETTINGS)
    assert report.abandoned == {}
    assert {u: s.tokens.tolist() for u, s in shelf.samples.items()} == {
        u: s.tokens.tolist() for u, s in whole.samples.items()
    }
    ran = [lines(tmp_path / "broken", i) for i in range(4)]
    assert ran == [lines(tmp_path / "whole", i) for i in range(4)]
    assert ["1", "2"] in ran


def test_the_example_job_kills_itself_and_runs_every_command_once() -> None:
    example = Path(__file__).parents[3] / "jobs" / "sandbox" / "append_once.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ended with exit code -9" in done.stdout
    assert "every command ran once" in done.stdout


def test_a_call_in_doubt_is_not_repeated_but_recorded(roll: Roll, shelf: Any, tmp_path: Path) -> None:
    """The agent of one command died after it had begun: nobody can know what came of it."""
    sandbox = SubprocessSandbox(tmp_path / "box")
    fault_points.observe(dying_at("tool.dispatch", 1))
    try:
        with pytest.raises(Died):
            roll(shelf, environment=append_line, sandbox=sandbox, **SETTINGS)
    finally:
        fault_points.observe(None)
    uids = [sample_uid(7, "student", f"p{i}", 0, 1) for i in range(4)]
    for uid in uids:
        records = tmp_path / "box" / f"{uid}.calls"
        records.mkdir(parents=True)
        (records / f"{uid}-0.claim").write_bytes(b"started")
    report = roll(shelf, environment=append_line, sandbox=sandbox, **SETTINGS)
    assert report.abandoned == {"tool_in_doubt": 4}
    assert {sample.finish_reason for sample in shelf.samples.values()} == {"abandoned"}
    assert not list((tmp_path / "box").rglob("log.txt"))
    assert roll(shelf, environment=append_line, sandbox=sandbox, **SETTINGS).samples == 0


def test_an_environment_that_changes_its_mind_is_caught(roll: Roll, shelf: Any, tmp_path: Path) -> None:
    sandbox = SubprocessSandbox(tmp_path / "box")
    commands: list[Sequence[str]] = []

    def fickle(turn: Turn) -> list[int] | None:
        command = ["echo", str(len(commands))]
        commands.append(command)
        turn.run(command)
        return None

    fault_points.observe(dying_at("tool.executed", 1))
    try:
        with pytest.raises(Died):
            roll(shelf, environment=fickle, sandbox=sandbox, **SETTINGS)
    finally:
        fault_points.observe(None)
    assert roll(shelf, environment=fickle, sandbox=sandbox, **SETTINGS).abandoned == {"tool_diverged": 1}


def test_what_a_command_does_is_a_result(tmp_path: Path) -> None:
    sandbox = SubprocessSandbox(tmp_path)

    def run(key: str, *argv: str, timeout_s: float = 10) -> Result:
        result = sandbox.run("s", key, Command(argv, timeout_s))
        assert result is not None
        return result

    assert run("a", "sh", "-c", "echo out; echo err >&2; exit 3") == Result(3, "out\n", "err\n")
    assert run("a", "echo", "something else") == Result(3, "out\n", "err\n"), "the key decides"
    assert run("b", "no-such-program").exit_code == 127
    late = run("c", "sleep", "5", timeout_s=0.2)
    assert late.timed_out
    began = time.monotonic()
    late = run("f", "sh", "-c", "sleep 40 & echo $!; sleep 40", timeout_s=2)
    assert late.timed_out
    assert time.monotonic() - began < 30, "a process that the command started does not hold the result back"
    stat = Path(f"/proc/{int(late.stdout)}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z", "nor does it live on"
    big = run("d", sys.executable, "-c", f"print('x' * {OUTPUT_BYTES + 9})")
    assert (len(big.stdout), big.truncated) == (OUTPUT_BYTES, True)
    assert "SECRET" not in run("e", "env").stdout


def test_calls_travel_through_the_log() -> None:
    call = Call(5, Command(("a", "b c"), 1.5), Result(0, "é\x1b", "\ufffd", True, True))
    for said in (call, replace(call, result=None)):
        message = log_records.Tool(3, 1, said)
        assert log_records.decode(message.kind, message.encode()) == message
