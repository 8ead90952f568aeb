"""How fast batches reach trainer processes, what they cost and how much memory they take.

`measure()` builds a store in a temporary folder, starts a real loader and real trainer processes (bench/trainer.py)
that touch every byte, and measures in the same run what `preadv` reaches on as many bytes. CPU seconds count every
process; one pass warms up the ring and the page cache before the measured one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane import config
from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window

TEACHERS = ("adder", "speller")
CAP = 32_768
PACKS_PER_STEP = 16
HIDDEN_ROW_BYTES = 8192
"""bf16 states of a teacher with hidden size 4096."""
HIDDEN_CAP = 2048
DEADLINE_S = 120.0


def measure(
    samples: int = 3000, hidden_samples: int = 48, ranks: tuple[int, ...] = (1, 2, 4), folder: str | None = None
) -> dict[str, Any]:
    """Token payload of `samples` samples (lognormal, mean 4.3 k tokens) and hidden states of `hidden_samples`.

    Returns {tokens_per_s, cpu_s_per_mtoken, hidden_bytes_per_s, preadv_bytes_per_s, hidden_ratio_to_preadv,
    pss_bytes: {ranks: bytes}, …}. pss_bytes is the memory of the loader and of all trainers together when every
    trainer reads the same packs, from the kernel's proportional set sizes.
    """
    with tempfile.TemporaryDirectory(prefix="mopd-bench-", dir=folder) as scratch:
        root = Path(scratch)
        tokens = _planned(root / "tokens", lengths_of(samples, longest=CAP), CAP, PACKS_PER_STEP)
        spec = LoadSpec(stage=STAGE, slots=8, deadline_s=DEADLINE_S)
        speed = _run(tokens, root, spec, members=1)
        memory = {count: _run(tokens, root, spec, members=count)["pss_bytes"] for count in ranks}
        lengths = np.full(hidden_samples, HIDDEN_CAP, dtype=np.int32)
        hidden = _planned(root / "hidden", lengths, HIDDEN_CAP, 4, signals=("hidden",), row_bytes=HIDDEN_ROW_BYTES)
        states = _run(hidden, root, spec.model_copy(update={"signals": ("hidden",)}), members=1)
        limit = _preadv_speed(root / "limit", states["hidden_bytes"])
    hidden_speed = states["hidden_bytes"] / states["seconds"]
    return {
        "tokens": speed["tokens"],
        "tokens_per_s": speed["tokens"] / speed["seconds"],
        "cpu_s_per_mtoken": speed["cpu_seconds"] / speed["tokens"] * 1e6,
        "loader_cpu_s_per_mtoken": speed["loader_cpu_seconds"] / speed["tokens"] * 1e6,
        "hidden_bytes": states["hidden_bytes"],
        "hidden_bytes_per_s": hidden_speed,
        "preadv_bytes_per_s": limit,
        "hidden_ratio_to_preadv": hidden_speed / limit,
        "pss_bytes": {str(count): pss for count, pss in memory.items()},
    }


def _planned(root: Path, lengths: Any, cap: int, packs_per_step: int, **options: Any) -> str:
    """URI of a new store with one planned window."""
    store = make_store(root, lengths, teachers=TEACHERS, **options)
    rule = config.Plan(pack_tokens=cap, batch_tokens=packs_per_step * cap, strict_batches=False)
    plan = build_window(
        plan_columns(store, TEACHERS), rule, seed=0, stage=STAGE, window=0, snapshot=store.snapshot(),
        teachers=list(TEACHERS),
    )  # fmt: skip
    store.add_plan(plan)
    return store.uri


def _run(uri: str, root: Path, spec: LoadSpec, *, members: int) -> dict[str, Any]:
    """One pass over the window by `members` trainers that read the same packs."""
    with start_server(uri, root / "l.sock", spec) as loader:
        command = [sys.executable, "-m", "mopd_dataplane.bench.trainer", str(loader.socket), STAGE]
        trainers = [
            subprocess.Popen(
                [*command, str(member), str(members)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for member in range(members)
        ]
        for trainer in trainers:
            _line(trainer)
        before = _cpu_seconds(loader.pid)
        found = [json.loads(line) for line in _together(trainers)]
        loader_cpu = _cpu_seconds(loader.pid) - before
        pss = _pss(loader.pid) + sum(_pss(trainer.pid) for trainer in trainers)
        for trainer in trainers:
            trainer.communicate("\n")
    return {
        "tokens": found[0]["tokens"],
        "hidden_bytes": found[0]["hidden_bytes"],
        "seconds": max(f["seconds"] for f in found),
        "loader_cpu_seconds": loader_cpu,
        "cpu_seconds": loader_cpu + sum(f["cpu_seconds"] for f in found),
        "pss_bytes": pss,
    }


def _together(trainers: list[subprocess.Popen[str]]) -> list[str]:
    """Let all trainers go at once; the result line of each."""
    for trainer in trainers:
        assert trainer.stdin is not None
        trainer.stdin.write("\n")
        trainer.stdin.flush()
    return [_line(trainer) for trainer in trainers]


def _line(trainer: subprocess.Popen[str]) -> str:
    assert trainer.stdout is not None
    return trainer.stdout.readline()


def _preadv_speed(path: Path, nbytes: int) -> float:
    """Bytes per second of `preadv` from the page cache into memory that is already there: the limit for one thread."""
    block = np.ones(1 << 22, dtype=np.uint8)
    blocks = max(1, nbytes // len(block))
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(block.data)
    fd = os.open(path, os.O_RDONLY)
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        for place in range(blocks):
            os.preadv(fd, [block.data], place * len(block))
        best = max(best, blocks * len(block) / (time.perf_counter() - started))
    os.close(fd)
    return best


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss(pid: int) -> int:
    """Proportional set size in bytes: shared pages count once over all processes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m mopd_dataplane.bench.load", description=__doc__)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--folder", help="where the temporary stores go")
    options = parser.parse_args()
    print(json.dumps(measure(options.samples, folder=options.folder)))


if __name__ == "__main__":
    main()
