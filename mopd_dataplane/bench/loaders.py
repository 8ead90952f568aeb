"""mopd's loader beside other loaders (bench/peers.py) on the same samples in the same packs."""

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.base.files import publish_figure
from mopd_dataplane.bench.crowd import Crowd, measure_crowd
from mopd_dataplane.bench.load import HIDDEN_SPEC, SPEC, deliver, hidden_store, token_store
from mopd_dataplane.bench.peers import PEERS, write_work
from mopd_dataplane.bench.synthetic import STAGE
from mopd_dataplane.errors import MopdError
from mopd_dataplane.load.payload import PLAIN
from mopd_dataplane.records import PlanWindow
from mopd_dataplane.store.dataset import Store

SAME_PACKS = 4
"""Trainers that need the same packs, for memory."""
MODULES = {"memmap": "torch", "memmap-plain": "torch", "transferqueue": "transfer_queue"}
"""Module a peer needs, where its name is another."""
FIELDS = PLAIN
"""Fields of a sample's record: nine bytes a token."""


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
        _write_token_work(tokens, root / "token-work")
        _write_hidden_work(hidden, root / "hidden-work")
        found = {
            "mopd": _figures(
                deliver(tokens.uri, root, SPEC), deliver(tokens.uri, root, SPEC, members=SAME_PACKS),
                deliver(hidden.uri, root, HIDDEN_SPEC), _total_tokens(tokens),
            )
        }  # fmt: skip
        report("mopd", found["mopd"])
        for name in PEERS:
            found[name] = _peer(name, root, _total_tokens(tokens))
            report(name, found[name])
    return found


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars of every loader that ran: CPU time of tokens, hidden states, memory."""
    from matplotlib.figure import Figure

    ran = {name: found for name, found in figures.items() if "missing" not in found}
    reading, packing = (
        [found[name] * 1e3 for found in ran.values()] for name in ("cpu_s_per_mtoken", "packing_cpu_s_per_mtoken")
    )
    bars = {
        "CPU s per $10^9$ tokens": [sum(both) for both in zip(reading, packing, strict=True)],
        "hidden states, GB/s": [found["hidden_bytes_per_s"] / 1e9 for found in ran.values()],
        f"memory at {SAME_PACKS} trainers, MB": [found["pss_bytes"] / 1e6 for found in ran.values()],
    }
    figure = Figure(figsize=(11, 0.5 + 0.4 * len(ran)), layout="constrained")
    axes = figure.subplots(1, len(bars), sharey=True)
    for axis, (title, values) in zip(axes, bars.items(), strict=True):
        axis.barh(list(ran), values, color=["tab:blue" if name == "mopd" else "lightgrey" for name in ran])
        axis.set_title(title, fontsize=10)
        axis.bar_label(axis.containers[0], fmt=_label, fontsize=8, padding=2)
        axis.set_xlim(0, 1.2 * max(values))
    for place, (read, wrote) in enumerate(zip(reading, packing, strict=True)):
        if wrote:
            axes[0].barh(place, wrote, left=read, color="white", edgecolor="grey", hatch="///")
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


def _total_tokens(store: Store) -> int:
    return int(store.samples(["total_len"])["total_len"].to_numpy().sum())


def _packs(store: Store) -> tuple[PlanWindow, list[list[int]]]:
    """The planned window, and the samples of its packs."""
    plan = store.plan(STAGE, 0)
    assert plan is not None
    return plan, [rows.tolist() for rows in np.split(plan.sample_rows, plan.pack_starts[1:-1])]


def _write_token_work(store: Store, folder: Path) -> None:
    table = store.read_tokens(np.arange(store.samples(["uid"]).num_rows), FIELDS)
    columns = [table[name].to_pylist() for name in FIELDS]
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
