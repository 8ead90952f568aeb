"""Row 10 of the fault list: the wall clock jumps, stands still or slews in the middle of a run.

The clock is bent for the whole process, Lance's Rust included, by a shim that is compiled (cc) and preloaded.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from deaths import folder, told_by
from inject import Row, Tally
from power_rows import content, create, roll

from mopd_dataplane.base import fault_points
from mopd_dataplane.store.commit import fragments
from mopd_dataplane.store.dataset import Store

warnings.filterwarnings("ignore", message="lance is not fork-safe")

DAY_S = 86_400.0
KINDS: dict[str, tuple[float, float]] = {
    "a day ahead": (DAY_S, 1.0), "a day back": (-DAY_S, 1.0), "an hour back": (-3600.0, 1.0), "frozen": (0.0, 0.0),
    "slewed fast": (0.0, 1.5), "slewed slow": (0.0, 0.5), "two days ahead": (2 * DAY_S, 1.0),
}  # fmt: skip
"""offset in seconds, rate"""
CALM = "as it is"


class Clock:
    """The file that the shim reads."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR)
        self._bend = mmap.mmap(descriptor, 24)
        os.close(descriptor)

    def set(self, offset: float, rate: float) -> None:
        """Bend the clock from now on."""
        self._bend[:24] = struct.pack("ddd", 0.0, 1.0, 0.0)
        self._bend[:24] = struct.pack("ddd", offset, rate, time.time())


def bent_clock(scratch: Path) -> dict[str, str]:
    """Compile the shim. Returns the environment under which a process has the clock of CLOCK_FILE, calm at first."""
    shim, file = scratch / "clock.so", scratch / "clock"
    source = str(Path(__file__).with_name("clock_shim.c"))
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), source], check=True)
    file.write_bytes(struct.pack("ddd", 0.0, 1.0, 0.0))
    return {**os.environ, "LD_PRELOAD": str(shim), "CLOCK_FILE": str(file)}


def clock_bent(count: int, seed: int) -> Tally:
    """The same bytes as with a calm clock, and a pinned version that stays readable."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as scratch:
        bent = bent_clock(Path(scratch))
        done = subprocess.run(
            [sys.executable, __file__, str(count), str(seed)], env=bent, stdout=subprocess.PIPE, text=True, check=True
        )
    for line in done.stdout.splitlines():
        what, passed = json.loads(line)
        tally.case(passed, what)
    return tally


def main(count: int, seed: int) -> None:
    """Under the shim: one line of JSON per case."""
    clock = Clock(os.environ["CLOCK_FILE"])
    draw = random.Random(seed)
    with folder() as template:
        told_by(partial(create, template))
        expected = told_by(partial(one_life, template, clock, CALM, 0))
        for case in range(count):
            kind, moment = list(KINDS)[case % len(KINDS)], draw.randrange(400)
            clock.set(0.0, 1.0)
            outcome = told_by(partial(one_life, template, clock, kind, moment))
            same = outcome is not None and outcome["samples"] == expected["samples"] and outcome["pinned"]
            moved = outcome is not None and abs(outcome["moved"]) > (0.001 if KINDS[kind][0] == 0 else 1800)
            print(json.dumps([f"case {case}: clock {kind} at point {moment}: {outcome and outcome['moved']}",
                              bool(same and moved)]), flush=True)  # fmt: skip


def one_life(template: Path, clock: Clock, kind: str, moment: int) -> dict[str, Any]:
    """Roll out into a store that merges and cleans as it goes, with a version pinned; the clock bends at a point."""
    fragments.TIERS = ((4 << 20, 1),)
    left = moment
    real, steady = time.time(), time.monotonic()

    def bend(name: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            clock.set(*KINDS[kind])

    with folder() as home:
        shutil.copytree(template, home)
        store = Store.open(home)
        pinned = store.snapshot(tag="pinned")
        fault_points.observe(bend if kind != CALM else None)
        roll(store, home)
        fault_points.observe(None)
        if kind != CALM and left > 0:
            clock.set(*KINDS[kind])
        store.compact()
        readable = store.samples(snapshot=pinned).num_rows == 0 and store.verify().ok
        moved = (time.time() - real) - (time.monotonic() - steady)
        return {"samples": content(store), "pinned": readable, "moved": moved}


ROWS = [
    Row(
        10, "the wall clock jumps, stands still, slews", "the same bytes, a pinned version stays",
        clock_bent, (7, 50, 1_000),
    ),
]  # fmt: skip

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
