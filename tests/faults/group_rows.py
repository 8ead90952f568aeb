"""Row 23 of the fault list: light writers whose batches one process commits, and that process is killed repeatedly.

The clock of the process that commits is a day off in every second race, Lance's own included (clock_shim.c).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from clock_rows import DAY_S, Clock, bent_clock
from deaths import folder, told_by
from inject import Row, Tally

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "store"))

import store_builders as build

from mopd_dataplane.store.dataset import Store

WRITERS, BATCHES, BATCH = 4, 24, 3
KILLS = 3
DEADLINE_S = 300.0
WRITER = """
import json, sys
sys.path.insert(0, sys.argv[2])
import store_builders as build
from mopd_dataplane.store.group_commit.writer import GroupWriter
numbers = json.loads(sys.argv[3])
with GroupWriter(sys.argv[1]) as writer:
    for numbers_of_batch in numbers:
        rows = writer.commit_samples([build.sample(number) for number in numbers_of_batch]).rows
        print(json.dumps([numbers_of_batch, rows]), flush=True)
"""


def killed_committers(count: int, seed: int) -> Tally:
    """Races of writers; a case is a sample that was acknowledged, or a row of the store."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as scratch:
        bent = bent_clock(Path(scratch))
        clock = Clock(bent["CLOCK_FILE"])
        for race in range(seed, seed + count):
            with folder() as home:
                leap = partial(clock.set, DAY_S if race % 4 == 1 else -DAY_S, 1.0)
                _race(tally, home, race, bent if race % 2 else dict(os.environ), leap)
                clock.set(0.0, 1.0)
    return tally


def _race(tally: Tally, home: Path, seed: int, environment: dict[str, str], leap: Callable[[], object]) -> None:
    """Writers of own samples and of some that all of them commit, and kills of the process that commits for them."""
    told_by(partial(_create, home))
    draw = random.Random(seed)
    acknowledged: list[tuple[int, int]] = []
    writers = [_start(home, draw, number, environment) for number in range(WRITERS)]
    threads = [threading.Thread(target=_listen, args=(writer, acknowledged)) for writer in writers]
    for thread in threads:
        thread.start()
    kills = sorted(draw.sample(range(5, WRITERS * BATCHES * BATCH * 3 // 4), KILLS))
    until = time.monotonic() + DEADLINE_S
    while any(writer.poll() is None for writer in writers) and time.monotonic() < until:
        if kills and len(acknowledged) >= kills[0]:
            time.sleep(draw.uniform(0, 0.2))
            _kill_committers(home)
            leap()
            kills.pop(0)
        time.sleep(0.002)
    for writer in writers:
        writer.kill()
    for thread in threads:
        thread.join(60)
    codes = [writer.wait() for writer in writers]
    tally.case(codes == [0] * WRITERS, f"seed {seed}: writers ended with {codes}")
    _kill_committers(home)
    for what in told_by(partial(_wrong, home, acknowledged)):
        tally.case(False, f"seed {seed}: {what}")
    tally.tried += len(acknowledged)


def _create(home: Path) -> None:
    Store.create(home)


def _start(home: Path, draw: random.Random, number: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    own = list(range(1000 * (number + 1), 1000 * (number + 1) + BATCHES * BATCH))
    for index in draw.sample(range(len(own)), len(own) // 6):
        own[index] = index  # all writers have these numbers
    batches = [own[first : first + BATCH] for first in range(0, len(own), BATCH)]
    command = [sys.executable, "-c", WRITER, str(home), str(Path(build.__file__).parent), json.dumps(batches)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _listen(writer: subprocess.Popen[str], acknowledged: list[tuple[int, int]]) -> None:
    assert writer.stdout is not None
    for line in writer.stdout:
        acknowledged.extend(zip(*json.loads(line), strict=True))


def _kill_committers(home: Path) -> None:
    listing = subprocess.run(["pgrep", "-f", f"group_commit {home}"], capture_output=True, text=True, check=False)
    for pid in listing.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def _wrong(home: Path, acknowledged: list[tuple[int, int]]) -> list[str]:
    """What the store has otherwise than was acknowledged."""
    store = Store.open(home)
    stored = store.samples(["uid"])["uid"].to_pylist()
    wrong = [f"{uid} is there {times} times" for uid, times in Counter(stored).items() if times > 1]
    for number, row in sorted(set(acknowledged)):
        sample = build.sample(number)
        if store.take_samples([row], ["uid"])["uid"].to_pylist() != [sample.uid]:
            wrong.append(f"row {row} was acknowledged as that of sample {number}")
        elif store.read_tokens([row], ["tokens"], verify=True)["tokens"].to_pylist() != [sample.tokens.tolist()]:
            wrong.append(f"sample {number} has other tokens")
    acknowledged_uids = {build.sample(number).uid for number, _ in acknowledged}
    wrong += [f"{uid} was acknowledged to nobody" for uid in set(stored) - acknowledged_uids]
    wrong += [str(finding) for finding in store.verify().findings]
    return wrong


ROWS = [
    Row(
        23, "group commit: the process that commits for others is killed, its clock leaps",
        "each acknowledged sample is there once, in the row that was acknowledged", killed_committers, (1, 10, 100),
    ),
]  # fmt: skip
