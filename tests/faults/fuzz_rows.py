"""Row 15 of the fault list: parsers under coverage-guided fuzzing (atheris), each for its share of the time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from deaths import folder
from figures import Row, Tally

TARGETS = ("segment_bytes", "records", "tool_records", "cursor", "protocol", "slot")


def fuzzed(count: int, seed: int) -> Tally:
    """No crash, no call over a second, no memory beyond 64 MiB; `count` is seconds, what is tried are executions."""
    tally = Tally()
    for target in TARGETS:
        with folder() as scratch:
            found = scratch / "found"
            found.mkdir(parents=True)
            command = [
                sys.executable, str(Path(__file__).with_name("fuzz_targets.py")), target, str(scratch),
                f"-seed={seed + 1}", f"-max_total_time={max(1, count // len(TARGETS))}", f"-artifact_prefix={found}/",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
            said = done.stderr + done.stdout
            executions = re.search(r"stat::number_of_executed_units: (\d+)", said)
            tally.tried += int(executions[1]) if executions else 0
            inputs = [file.read_bytes()[:200] for file in found.iterdir()]
            trace = [line for line in said.splitlines() if "Error" in line or "ERROR" in line or "ALARM" in line]
            tally.case(done.returncode == 0, f"{target}: exit code {done.returncode}, {trace[:3]}, input {inputs}")
    return tally


ROWS = [
    Row(
        15, "coverage-guided fuzzing of recovery, log, cursor, protocol", "no crash, no hang, memory bounded",
        fuzzed, (3, 180, 28_800),
    ),
]  # fmt: skip
