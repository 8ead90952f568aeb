"""Benchmark of the loader: tokens a second, processor time and memory at several numbers of trainers; and beside other
loaders (bench/peers.py) on the same samples in the same packs.

`measure()` builds a store in a temporary folder, starts a real loader and real trainer processes (bench/trainer.py)
that touch every byte, and measures in the same run what plain copies and `preadv` reach. CPU seconds count every
process; one pass warms up the ring and the page cache before the measured one, and every pass reads the store anew.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.base.files import publish_figure
from mopd_dataplane.bench.calls import seconds
from mopd_dataplane.bench.crowd import Crowd, measure_crowd
from mopd_dataplane.bench.peers import PEERS, write_work
from mopd_dataplane.bench.synthetic import STAGE, lengths_of, make_store, plan_columns
from mopd_dataplane.errors import MopdError
from mopd_dataplane.job import sections
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.payload import PLAIN
from mopd_dataplane.load.ring import Slot, make_slot
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.records import PlanWindow
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
SAME_PACKS = 4
"""Trainers that need the same packs, for memory."""
MODULES = {"memmap": "torch", "memmap-plain": "torch", "transferqueue": "transfer_queue"}
"""Module a peer needs, where its name is another."""


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

    def read(slot: Slot, block_index: int) -> None:
        os.preadv(fd, [slot.memory], block_index * len(block))

    def copy(slot: Slot, block_index: int) -> None:
        slot.memory[:] = block.data

    def all_blocks(work: Callable[[Slot, int], None]) -> None:
        for block in range(blocks):
            work(slots[block % SLOTS], block)

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


def compare(
    samples: int, hidden_samples: int, *, report: Callable[[str, dict[str, Any]], None], folder: str | None = None
) -> dict[str, dict[str, Any]]:
    """{loader: {tokens_per_s, cpu_s_per_mtoken, packing_cpu_s_per_mtoken, pss_bytes, hidden_bytes_per_s}}, and
    {"missing": why} for one not here.

    packing_cpu_s_per_mtoken is what a loader that follows no plan takes beforehand, to write the packs of each plan in
    their order of use. pss_bytes is the memory of everything when SAME_PACKS trainers read the same packs. report: gets
    each loader's name and figures as they come.
    """
    with tempfile.TemporaryDirectory(prefix=".bench-peers-", dir=folder) as scratch:
        root = Path(scratch)
        tokens, hidden = token_store(root / "tokens", samples), hidden_store(root / "hidden", hidden_samples)
        total = int(tokens.samples(["total_len"])["total_len"].to_numpy().sum())
        _write_token_work(tokens, root / "token-work")
        _write_hidden_work(hidden, root / "hidden-work")
        alone, together = (deliver(tokens.uri, root, SPEC, members=count) for count in (1, SAME_PACKS))
        results = {"mopd": _figures(alone, together, deliver(hidden.uri, root, HIDDEN_SPEC), total)}
        report("mopd", results["mopd"])
        for name in PEERS:
            results[name] = _peer(name, root, total)
            report(name, results[name])
    return results


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars of every loader that ran: CPU time of tokens, hidden states, memory."""
    from matplotlib.figure import Figure

    ran = {name: figures_of_loader for name, figures_of_loader in figures.items() if "missing" not in figures_of_loader}
    reading, packing = (
        [figures_of_loader[name] * 1e3 for figures_of_loader in ran.values()]
        for name in ("cpu_s_per_mtoken", "packing_cpu_s_per_mtoken")
    )
    bars = {
        "CPU s per $10^9$ tokens": [sum(both) for both in zip(reading, packing, strict=True)],
        "hidden states, GB/s": [figures_of_loader["hidden_bytes_per_s"] / 1e9 for figures_of_loader in ran.values()],
        f"memory at {SAME_PACKS} trainers, MB": [
            figures_of_loader["pss_bytes"] / 1e6 for figures_of_loader in ran.values()
        ],
    }
    figure = Figure(figsize=(11, 0.5 + 0.4 * len(ran)), layout="constrained")
    axes = figure.subplots(1, len(bars), sharey=True)
    for axis, (title, values) in zip(axes, bars.items(), strict=True):
        axis.barh(list(ran), values, color=["tab:blue" if name == "mopd" else "lightgrey" for name in ran])
        axis.set_title(title, fontsize=10)
        axis.bar_label(axis.containers[0], fmt=_label, fontsize=8, padding=2)
        axis.set_xlim(0, 1.2 * max(values))
    for index, (read, wrote) in enumerate(zip(reading, packing, strict=True)):
        if wrote:
            axes[0].barh(index, wrote, left=read, color="white", edgecolor="grey", hatch="///")
    axes[0].set_xlabel("hatched: writing the packs of each plan", fontsize=8)
    axes[0].invert_yaxis()
    publish_figure(figure, path, dpi=130)


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _peer(name: str, root: Path, tokens: int) -> dict[str, Any]:
    module = MODULES.get(name, name)
    if importlib.util.find_spec(module) is None:
        return {"missing": f"{module} is not installed"}

    def run(work: str, copies: int = 1) -> Crowd:
        command = [sys.executable, "-m", "mopd_dataplane.bench.peers", name, str(root / work)]
        return measure_crowd([command] * copies)

    try:
        return _figures(run("token-work"), run("token-work", SAME_PACKS), run("hidden-work"), tokens)
    except MopdError as error:
        return {"missing": str(error)}


def _figures(alone: Crowd, together: Crowd, states: Crowd, tokens: int) -> dict[str, Any]:
    hidden = states.answers[0]
    delivered = hidden["hidden_bytes" if "hidden_bytes" in hidden else "bytes"]
    return {
        "tokens_per_s": tokens / alone.seconds,
        "cpu_s_per_mtoken": alone.cpu_seconds / tokens * 1e6,
        "packing_cpu_s_per_mtoken": alone.answers[0].get("packing_cpu_s", 0.0) / tokens * 1e6,
        "pss_bytes": together.pss_bytes,
        "hidden_bytes_per_s": delivered / states.seconds,
    }


def _packs(store: Store) -> tuple[PlanWindow, list[list[int]]]:
    """The planned window, and the samples of its packs."""
    plan = store.plan(STAGE, 0)
    assert plan is not None
    return plan, [rows.tolist() for rows in np.split(plan.sample_rows, plan.pack_starts[1:-1])]


def _write_token_work(store: Store, folder: Path) -> None:
    """Records of nine bytes a token."""
    table = store.read_tokens(np.arange(store.samples(["uid"]).num_rows), PLAIN)
    columns = [table[name].to_pylist() for name in PLAIN]
    dtypes = (np.int32, np.float32, np.uint8)
    records = [
        np.concatenate([np.array(v, d).view(np.uint8) for v, d in zip(row, dtypes, strict=True)])
        for row in zip(*columns, strict=True)
    ]
    write_work(folder, records, _packs(store)[1])


def _write_hidden_work(store: Store, folder: Path) -> None:
    plan, packs = _packs(store)
    records = {
        row: store.read_signal(plan.teachers[teacher], "hidden", [row])[0].reshape(-1)
        for teacher, rows in zip(plan.pack_teachers.tolist(), packs, strict=True)
        for row in rows
    }
    write_work(folder, [records[row] for row in sorted(records)], packs)
