"""Row 15 of the fault list: parsers under coverage-guided fuzzing (atheris), each for its share of the time."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from deaths import folder
from inject import Row, Tally

TARGETS = ("segment_bytes", "records", "tool_records", "cursor", "protocol", "slot")
EXECUTIONS = 150_000
"""Most executions of one process. atheris never frees what it notes of a comparison of arrays, some 0.2 KiB for
each log that is recovered: a target begins anew, with the inputs found so far, before that looks like the parser's."""


def fuzzed(count: int, seed: int) -> Tally:
    """No crash, no call over five seconds, no memory beyond 64 MiB; `count` is seconds, tried are executions."""
    tally = Tally()
    for target in TARGETS:
        with folder() as scratch:
            (scratch / "found").mkdir(parents=True)
            end, turn = time.monotonic() + max(1, count // len(TARGETS)), 0
            while not turn or (time.monotonic() < end - 1 and not tally.failures):
                turn += 1
                _process(target, scratch, seed=seed + turn, seconds=max(1, round(end - time.monotonic())), tally=tally)
    return tally


def _process(target: str, scratch: Path, *, seed: int, seconds: int, tally: Tally) -> None:
    artifact_dir = scratch / "found"
    command = [
        sys.executable, str(Path(__file__).with_name("fuzz_targets.py")), target, str(scratch), f"-seed={seed}",
        f"-runs={EXECUTIONS}", f"-max_total_time={seconds}", f"-artifact_prefix={artifact_dir}/",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stderr + done.stdout
    executions = re.search(r"stat::number_of_executed_units: (\d+)", said)
    tally.tried += int(executions[1]) if executions else 0
    inputs = [file.read_bytes()[:200] for file in artifact_dir.iterdir()]
    trace = [line for line in said.splitlines() if "Error" in line or "ERROR" in line or "ALARM" in line]
    tally.case(done.returncode == 0, f"{target}: exit code {done.returncode}, {trace[:3]}, input {inputs}")


ROWS = [
    Row(
        15, "coverage-guided fuzzing of recovery, log, cursor, protocol", "no crash, no hang, memory bounded",
        fuzzed, (3, 180, 28_800),
    ),
]  # fmt: skip
