"""A simulated fleet on one real store: engines, scorers and trainers as processes that are killed and started again.

Real: processes, SIGKILL, the token log, the committer, commits, plans, reads, checksums. Simulated: the models.
Engines replay scripted lengths and tokens at a given rate, a teacher's values are noise, a training step is a pause.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.base.processes import KILLED_S
from mopd_dataplane.bench.fleet_audit import audit
from mopd_dataplane.bench.fleet_member import expected_samples, run_member
from mopd_dataplane.bench.fleet_settings import Fleet
from mopd_dataplane.bench.forked import fork_server, start
from mopd_dataplane.bench.size import LIST_OVERHEAD, READS_PER_ROW, RESPONSE_BYTES, TOKEN_BYTES
from mopd_dataplane.bench.synthetic import bench_teacher
from mopd_dataplane.errors import DeadlineError, EngineError
from mopd_dataplane.store.dataset import Store

DAY_S = 86_400.0
LOOK_S = 0.1
KILL_WITHIN_S = 0.5
"""A kill comes at a random time of so many seconds after the commit at which it is due."""
STALL_S = 300.0
"""Longest time without any commit."""
STEADY = (0.1, 0.9)
"""Shares of the samples between whose commits the rates are measured: without the start, and without the last long
samples, for which most slots wait."""
LEAST_COMMITS = 8
"""Fewest commits between these two."""
OBJECTS_PER_VERSION = 4
"""Data file, transaction, manifest and acknowledgement of one version of a table."""
VERIFIED = ("lost", "duplicated", "changed", "foreign", "acknowledged and lost", "audit findings")
"""Counts of the audit that must be 0."""


@dataclass
class _Run:
    """The processes of a fleet and what they have acknowledged."""

    fleet: Fleet
    folder: Path
    context: ForkServerContext
    processes: dict[str, ForkServerProcess] = field(default_factory=dict)
    """Process of each member, such as engine-0, that has not ended."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Acknowledgements of all members, with the member's role."""
    kills: dict[str, int] = field(default_factory=dict)
    """Kills by role."""
    _offsets: dict[Path, int] = field(default_factory=dict)

    def start(self, member: str) -> None:
        role, _, number = member.partition("-")
        self.processes[member] = start(self.context, run_member, self.fleet, self.folder, role, int(number))

    def kill(self, member: str) -> bool:
        """Kill a member with SIGKILL and start it again. Returns False if it had just ended by itself."""
        process = self.processes[member]
        process.kill()
        process.join(KILLED_S)
        if process.exitcode != -signal.SIGKILL:
            return False
        role = member.partition("-")[0]
        self.kills[role] = self.kills.get(role, 0) + 1
        self.start(member)
        return True

    def collect(self) -> None:
        """Read the acknowledgements that were written since the last call."""
        for file in (self.folder / "acknowledged").iterdir():
            with file.open("rb") as lines:
                lines.seek(self._offsets.get(file, 0))
                content = lines.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offsets[file] = self._offsets.get(file, 0) + len(whole)
            self.lines += [{"role": file.name.partition("-")[0], **json.loads(line)} for line in whole.splitlines()]

    def of(self, role: str) -> Iterator[dict[str, Any]]:
        """Yield the acknowledgements of a role, by time."""
        return iter(sorted((line for line in self.lines if line["role"] == role), key=lambda line: line["time"]))

    def drop_ended(self) -> None:
        """Forget members whose work is done. Raises EngineError when one has failed."""
        for member, process in list(self.processes.items()):
            if process.exitcode is None:
                continue
            if process.exitcode:
                raise EngineError(f"{member} ended with exit code {process.exitcode}; its messages are above")
            del self.processes[member]

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(KILLED_S)


def measure(fleet: Fleet, folder: Path, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Run the fleet in an empty folder until every sample is committed, scored and trained, then audit the store.

    note: called with a line about every kill. Returns figures by name, see docs/benchmarks/fleet.md. Raises EngineError
    when a member ends with an error or the audit counts anything that must be 0, DeadlineError when nothing is
    committed for STALL_S.
    """
    store = make_store(fleet, folder)
    run = _Run(fleet, folder, fork_server("mopd_dataplane.bench.fleet_member"))
    start_s = time.monotonic()
    try:
        _drive(run, note)
    finally:
        run.stop()
    run.collect()
    elapsed_s = time.monotonic() - start_s
    acknowledged = {uid for line in run.of("engine") for uid in line["uids"]}
    checked = audit(store, fleet, acknowledged)
    if any(checked[name] for name in VERIFIED):
        raise EngineError(f"the store differs from what the fleet committed: {checked}")
    return {
        "fleet": asdict(fleet),
        "cpus": os.cpu_count(),
        "wall time, s": elapsed_s,
        "kills": run.kills,
        "audit": checked,
        **_rates(run, store),
        **_waits(run),
        "staleness": _staleness(run, store),
        **_storage(run, store),
    }


def make_store(fleet: Fleet, folder: Path) -> Store:
    """Make the store of a fleet with its teachers, and the folders that its members share."""
    store = Store.create(folder / "store")
    for number in range(fleet.scorers):
        store.add_teacher(replace(bench_teacher(f"teacher-{number}", 8), head_file="", head_digest=""))
    for name in ("acknowledged", "policies"):
        (folder / name).mkdir()
    return store


def _drive(run: _Run, note: Callable[[str], None]) -> None:
    """Start every member and kill them in turn, until all have done their work."""
    fleet = run.fleet
    counts = {"engine": fleet.engines, "scorer": fleet.scorers, "trainer": fleet.trainers}
    members = [f"{role}-{number}" for role, count in counts.items() for number in range(count)]
    noise = np.random.default_rng(0)
    order = [members[index] for _ in range(fleet.kills) for index in noise.permutation(len(members))]
    total = sum(1 for _ in expected_samples(fleet))
    due = [total * (number + 1) // (fleet.kills + 1) for number in range(fleet.kills)]
    for member in members:
        run.start(member)
    seen, seen_at = 0, time.monotonic()
    while run.processes:
        time.sleep(LOOK_S)
        run.drop_ended()
        run.collect()
        if len(run.lines) > seen:
            seen, seen_at = len(run.lines), time.monotonic()
        if time.monotonic() - seen_at > STALL_S:
            raise DeadlineError(f"the fleet committed nothing for {STALL_S:g} s; running: {', '.join(run.processes)}")
        committed = len({uid for line in run.of("engine") for uid in line["uids"]})
        if due and committed >= due[0] and run.processes:
            due.pop(0)
            time.sleep(noise.uniform(0, KILL_WITHIN_S))
            member = next(name for name in order if name in run.processes)
            order.remove(member)
            if run.kill(member):
                note(f"killed {member} after {committed:,} of {total:,} samples")


def _rates(run: _Run, store: Store) -> dict[str, Any]:
    """Tokens and commits a second between the two shares of STEADY, and requests of the whole run.

    A run with too few commits for that is measured from its first to its last commit.
    """
    lines = list(run.of("engine"))
    committed = np.cumsum([len(line["uids"]) - line["dropped"] for line in lines])
    first, last = (int(np.searchsorted(committed, share * committed[-1])) for share in STEADY)
    if last - first < LEAST_COMMITS:
        first, last = 0, len(lines) - 1
    steady = lines[first + 1 : last + 1] or lines
    seconds = lines[last]["time"] - lines[first]["time"] or lines[0]["commit_s"]
    tokens_per_s = sum(line["tokens"] for line in steady) / seconds
    lengths = store.samples(["total_len", "response_len"])
    versions = {name: store.dataset(name).version for name in store.names()}
    scored, trained = (sum(line["tokens"] for line in run.of(role)) for role in ("scorer", "trainer"))
    kinds = run.fleet.kinds
    reads = sum(len(line["uids"]) for line in run.of("scorer") if line["kind"] == kinds[0])  # tokens
    reads += sum((1 + len(kinds)) * len(line["rows"]) for line in run.of("trainer"))  # tokens and signals
    elapsed_s = lines[-1]["time"] - lines[0]["time"] or seconds
    puts = OBJECTS_PER_VERSION * sum(versions.values())
    return {
        "tokens": sum(lengths["total_len"].to_pylist()),
        "mean response": float(np.mean(lengths["response_len"])),
        "longest response": int(np.max(lengths["response_len"])),
        "tokens/s": tokens_per_s,
        "tokens/day": tokens_per_s * DAY_S,
        "tokens/day of the simulated fleet (computed)": tokens_per_s * DAY_S / run.fleet.speed,
        "tokens read by scorers": scored,
        "tokens read by trainers": trained,
        "sample commits/s": len(steady) / seconds,
        "samples in a commit": float(np.mean([len(line["uids"]) for line in steady])),
        "versions of all tables": sum(versions.values()),
        "requests (computed)": {
            "PUT/s": puts / elapsed_s,
            "GET/s": READS_PER_ROW * reads / elapsed_s,
        },
    }


def _waits(run: _Run) -> dict[str, Any]:
    """Percentiles of the time until samples and signals were acknowledged, in ms.

    The wait of a sample that ended in a process which was then killed is not known.
    """
    waits = [wait for line in run.of("engine") for wait in line["waits_s"]]
    commits = [line["commit_s"] for line in run.of("engine")]
    signals = [line["commit_s"] for line in run.of("scorer")]
    return {
        "sample: end to committed, ms": {**_percentiles(waits, 1e3), "samples measured": len(waits)},
        "commit of samples, ms": _percentiles(commits, 1e3),
        "commit of signals, ms": _percentiles(signals, 1e3),
        "read of a training batch, ms": _percentiles([line["read_s"] for line in run.of("trainer")], 1e3),
    }


def _staleness(run: _Run, store: Store) -> dict[str, Any]:
    """Versions and seconds between sampling and training."""
    steps = store.table("steps", ["staleness_mean", "staleness_max", "loss_tokens"]).to_pydict()
    rows = {uid: row for part in _uid_rows(store) for uid, row in part}
    committed: dict[int, float] = {}
    for line in run.of("engine"):
        for uid in line["uids"]:
            committed.setdefault(rows[uid], line["time"])
    ages = [line["time"] - committed[row] for line in run.of("trainer") for row in line["rows"] if row in committed]
    return {
        "steps": len(steps["loss_tokens"]),
        "versions, mean": float(np.average(steps["staleness_mean"], weights=steps["loss_tokens"])),
        "versions, most": max(steps["staleness_max"]),
        "committed to trained, s": _percentiles(ages, 1.0),
    }


def _uid_rows(store: Store) -> Iterator[Iterator[tuple[str, int]]]:
    for rows, part in store.scan_samples(["uid"]):
        yield zip(part["uid"].to_pylist(), rows.tolist(), strict=True)


def _storage(run: _Run, store: Store) -> dict[str, Any]:
    """Files before and after a clean-up, bytes that the newest versions need, and what `mopd bench size` computes."""
    files_before = sum(len(names) for _, _, names in os.walk(run.folder / "store"))
    store.compact(now=True)
    tables = store.info()["tables"]
    needed = {name: facts["bytes"] - facts["freeable_bytes"] for name, facts in tables.items() if facts["rows"]}
    tokens = store.samples(["total_len", "response_len"])
    total, responses = (sum(tokens[name].to_pylist()) for name in ("total_len", "response_len"))
    computed = LIST_OVERHEAD * (TOKEN_BYTES * total + RESPONSE_BYTES * responses)
    return {
        "files while running": files_before,
        "files after compact": sum(len(names) for _, _, names in os.walk(run.folder / "store")),
        "bytes": needed,
        "bytes/token of tokens": needed["tokens"] / total,
        "bytes/token of tokens (computed)": computed / total,
    }


def _percentiles(values: list[float], factor: float) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(values, percent) * factor) if values else 0.0 for percent in (50, 99)}
