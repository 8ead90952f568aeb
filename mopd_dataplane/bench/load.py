"""Benchmark of the loader: tokens a second, processor time and memory at several numbers of trainers.

`measure()` builds a store in a temporary folder, starts a real loader and real trainer processes (bench/trainer.py)
that touch every byte, and measures in the same run what plain copies and `preadv` reach. CPU seconds count every
process; one pass warms up the ring and the page cache before the measured one, and every pass reads the store anew.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.bench.clock import seconds
from mopd_dataplane.bench.crowd import Crowd, measure_crowd
from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.job import sections
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.ring import Slot, make_slot
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.store.dataset import Store

TEACHERS = ("adder", "speller")
CAP = 32_768
PACKS_PER_STEP = 16
HIDDEN_ROW_BYTES = 8192
"""bf16 states of a teacher with hidden size 4096."""
HIDDEN_CAP = 2048
SLOTS = 8
RANKS = (1, 2, 4, 8)
ROUNDS = 3
"""Best of so many for the limits."""
SPEC = LoadSpec(stage=STAGE, slots=SLOTS, deadline_s=120.0)
HIDDEN_SPEC = SPEC.model_copy(update={"signals": ("hidden",)})


def measure(
    samples: int = 12_000, hidden_samples: int = 48, ranks: tuple[int, ...] = RANKS, folder: str | None = None
) -> dict[str, Any]:
    """Token payload of `samples` samples (lognormal, mean 4.3 k tokens) and hidden states of `hidden_samples`.

    Returns {tokens_per_s, cpu_s_per_mtoken, hidden_bytes_per_s, preadv_bytes_per_s, memcpy_bytes_per_s,
    hidden_ratio_to_preadv, pss_bytes: {ranks: bytes}}. pss_bytes is the memory of the loader and of all trainers
    together when every trainer reads the same packs, from the kernel's proportional set sizes. The limits write into
    slots like the loader's: memcpy from memory, preadv as many bytes as the hidden states from the page cache.
    """
    with tempfile.TemporaryDirectory(prefix=".bench-load-", dir=folder) as scratch:
        root = Path(scratch)
        tokens = token_store(root / "tokens", samples)
        runs = {count: deliver(tokens.uri, root, SPEC, members=count) for count in ranks}
        states = deliver(hidden_store(root / "hidden", hidden_samples).uri, root, HIDDEN_SPEC)
        hidden_bytes = states.answers[0]["hidden_bytes"]
        preadv, memcpy = slot_limits(root / "limit", hidden_bytes)
    speed = runs[ranks[0]]
    count = speed.answers[0]["tokens"]
    return {
        "tokens_per_s": count / speed.seconds,
        "cpu_s_per_mtoken": speed.cpu_seconds / count * 1e6,
        "hidden_bytes_per_s": hidden_bytes / states.seconds,
        "preadv_bytes_per_s": preadv,
        "memcpy_bytes_per_s": memcpy,
        "hidden_ratio_to_preadv": hidden_bytes / states.seconds / preadv,
        "pss_bytes": {str(count): run.pss_bytes for count, run in runs.items()},
    }


def token_store(root: Path, samples: int) -> Store:
    """Samples without signals, one planned window of full packs."""
    return _planned(root, lengths_of(samples, longest=CAP), CAP, PACKS_PER_STEP)


def hidden_store(root: Path, samples: int) -> Store:
    """Samples of HIDDEN_CAP tokens with hidden states, one a pack."""
    lengths = np.full(samples, HIDDEN_CAP, dtype=np.int32)
    return _planned(root, lengths, HIDDEN_CAP, 4, signals=("hidden",), row_bytes=HIDDEN_ROW_BYTES)


def deliver(uri: str, root: Path, spec: LoadSpec, *, members: int = 1) -> Crowd:
    """One pass over window 0 by `members` trainers that read the same packs."""
    with start_server(uri, root / "l.sock", spec) as loader:
        command = [sys.executable, "-m", "mopd_dataplane.bench.trainer", str(loader.socket), STAGE]
        commands = [[*command, str(member), str(members)] for member in range(members)]
        return measure_crowd(commands, helpers=[loader.pid])


def slot_limits(path: Path, nbytes: int) -> tuple[float, float]:
    """Bytes per second of one thread into slots whose pages are there: (preadv from the page cache, memcpy)."""
    slots = [make_slot(number, HIDDEN_CAP * HIDDEN_ROW_BYTES) for number in range(SLOTS)]
    block = np.ones(slots[0].capacity, dtype=np.uint8)
    blocks = max(1, nbytes // len(block))
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(block.data)
    fd = os.open(path, os.O_RDONLY)

    def read(slot: Slot, place: int) -> None:
        os.preadv(fd, [slot.memory], place * len(block))

    def copy(slot: Slot, place: int) -> None:
        slot.memory[:] = block.data

    def all_blocks(work: Callable[[Slot, int], None]) -> None:
        for place in range(blocks):
            work(slots[place % SLOTS], place)

    least_s = [min(seconds(partial(all_blocks, work)) for _ in range(ROUNDS)) for work in (read, copy)]
    os.close(fd)
    for slot in slots:
        os.close(slot.fd)
    return blocks * len(block) / least_s[0], blocks * len(block) / least_s[1]


def _planned(root: Path, lengths: Any, cap: int, packs_per_step: int, **options: Any) -> Store:
    """A new store with one planned window."""
    store = make_store(root, lengths, teachers=TEACHERS, **options)
    rule = sections.Plan(pack_tokens=cap, batch_tokens=packs_per_step * cap, strict_batches=False)
    plan = build_window(
        plan_columns(store, TEACHERS), rule, seed=0, stage=STAGE, window=0, snapshot=store.snapshot(),
        teachers=list(TEACHERS),
    )  # fmt: skip
    store.add_plan(plan)
    return store
