"""Density by the number of samples packed together, balance over ranks, and how samples that share a pack depend on
each other.

    python -m mopd_dataplane.bench.packing --plot docs/images/packing.svg

prints one JSON object. Lengths are lognormal with a mean of 4.3 k tokens, packs have 32,768 tokens.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.bench.synthetic import lengths_of
from mopd_dataplane.job import sections
from mopd_dataplane.plan.balance import straggler_ratio, work_of
from mopd_dataplane.plan.columns import Columns
from mopd_dataplane.plan.packing import pack
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.records import PlanWindow, Snapshot

CAP = 32_768
AT_ONCE = (64, 256, 1_024, 4_096, 16_384, 65_536, 262_144)
PACKS_PER_RANK = (1, 2, 4, 8, 16)
RANKS = 64
BATCH = 512
"""Samples of a step where batches are compared."""
SEEDS = 40


def measure(samples: int = 65_536) -> dict[str, Any]:
    """density: {samples packed at once: share of pack tokens used}. straggler: {packs of a rank: [dealt, at random]}.

    coupling, per mode (`strict`, `packs`): design_effect, the variance over steps of the mean log-length of a batch,
    over that of batches drawn sample by sample (1 is no coupling); token_spread, the same variance for the mean over
    tokens, as it is (compare the two modes); mates, the mean length of the pack's other samples by decile of its own.
    """
    lengths = lengths_of(max(AT_ONCE), longest=CAP)
    return {
        "density": {str(count): _density(lengths, count) for count in AT_ONCE},
        "straggler": {str(packs): _straggler(lengths[:65_536], packs) for packs in PACKS_PER_RANK},
        "coupling": {
            "strict": coupling(lengths[:samples], CAP, strict=True),
            "packs": coupling(lengths[:samples], CAP, strict=False),
        },
    }


def coupling(lengths: NDArray[np.int32], cap: int, *, strict: bool, batch: int = BATCH) -> dict[str, Any]:
    """Dependence of samples on others of their pack; see measure."""
    effects, spreads, mates = [], [], np.zeros(10)
    decile = np.minimum(np.argsort(np.argsort(lengths, kind="stable")) * 10 // len(lengths), 9)
    for seed in range(SEEDS):
        plan = _plan(lengths, cap, batch, strict, seed)
        rows, log = plan.sample_rows, np.log(lengths)
        steps = plan.pack_starts[plan.step_starts]
        sizes = np.diff(steps)
        means = np.add.reduceat(log[rows], steps[:-1]) / sizes
        tokens = np.add.reduceat(lengths[rows].astype(np.int64), steps[:-1])
        spreads.append(float(np.var(np.add.reduceat(lengths[rows] * log[rows], steps[:-1]) / tokens)))
        alone = log.var() * (1 - sizes / len(lengths)) / sizes  # a simple random sample without replacement
        effects.append(float(np.mean((means - log.mean()) ** 2 / alone)))
        if seed == 0:
            mates = _mates(lengths[rows], plan.pack_starts, decile[rows])
    return {
        "design_effect": float(np.mean(effects)),
        "token_spread": float(np.mean(spreads)),
        "mates": mates.round(1).tolist(),
    }


def _mates(
    lengths: NDArray[np.int32], pack_starts: NDArray[np.int64], decile: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[10] mean length of a sample's mates, by decile of its own length; NaN where it has none."""
    counts = np.diff(pack_starts)
    totals = np.repeat(np.add.reduceat(lengths.astype(np.int64), pack_starts[:-1]), counts) - lengths
    others = np.repeat(counts, counts) - 1
    has = others > 0
    mean = totals[has] / others[has]
    return np.asarray(np.bincount(decile[has], weights=mean, minlength=10) / np.bincount(decile[has], minlength=10))


def _density(lengths: NDArray[np.int32], at_once: int) -> float:
    """Share of pack tokens used when windows of that many samples are packed by themselves."""
    windows = lengths[: min(len(lengths), 64 * at_once)].reshape(-1, at_once)
    packs = sum(len(pack(window, CAP)) for window in windows)
    return float(windows.sum(dtype=np.int64) / (packs * CAP))


def _straggler(lengths: NDArray[np.int32], packs_per_rank: int) -> list[float]:
    """Work of the slowest of 64 ranks over the mean, dealt by work and dealt at random."""
    packs = pack(lengths, CAP)
    costs = np.random.default_rng(0).permutation(work_of(packs.tokens, packs.squares))
    per_step = packs_per_rank * RANKS
    costs = costs[: len(costs) // per_step * per_step]
    at_random = costs.reshape(-1, RANKS, packs_per_rank).sum(axis=2)
    dealt = straggler_ratio(costs, np.arange(0, len(costs) + 1, per_step), RANKS)
    return [dealt, float(at_random.max(axis=1).sum() / at_random.mean(axis=1).sum())]


def _plan(lengths: NDArray[np.int32], cap: int, batch: int, strict: bool, seed: int) -> PlanWindow:
    n = len(lengths)
    zeros, yes = np.zeros(n, dtype=np.int32), np.ones(n, dtype=bool)
    columns = Columns(
        sample_rows=np.arange(n), total_len=lengths, loss_tokens=lengths, version_first=zeros,
        domains=zeros.astype(np.int16), groups=np.arange(n), teachers=zeros.astype(np.int16),
        has_signals=yes, has_reward=yes, abandoned=~yes, domain_names=("d",),
    )  # fmt: skip
    rule = sections.Plan(pack_tokens=cap, batch_samples=batch, strict_batches=strict, drop_last=True)
    snapshot = Snapshot(uri="", versions={})
    return build_window(columns, rule, seed=seed, stage="s", window=0, snapshot=snapshot, teachers=["t"])


def draw(figures: dict[str, Any], file: Path) -> None:
    """Three panels: density, balance, mates."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = page.subplots(1, 3)
    counts = [int(count) for count in figures["density"]]
    left.semilogx(counts, [1 - density for density in figures["density"].values()], "o-")
    left.set_yscale("log")
    left.axhline(0.0005, color="grey", linestyle=":")
    left.text(counts[0], 0.00056, "goal 0.0005", color="grey", fontsize=8)
    left.set(title="unused share of pack tokens", xlabel="samples packed at once")
    packs = [int(count) for count in figures["straggler"]]
    for index, label in enumerate(("dealt by work", "dealt at random")):
        middle.plot(packs, [both[index] for both in figures["straggler"].values()], "o-", label=label)
    middle.axhline(1.02, color="grey", linestyle=":")
    middle.set(title=f"slowest of {RANKS} ranks over the mean", xlabel="packs of a rank in a step")
    middle.legend()
    for mode, label in (("strict", "batch first, then packs"), ("packs", "packs first, then batches")):
        fits = figures["coupling"][mode]
        right.plot(range(1, 11), fits["mates"], "o-", label=f"{label}: design effect {fits['design_effect']:.2f}")
    right.set(title="mean length of the others in the pack", xlabel="decile of a sample's own length", ylabel="tokens")
    right.legend(fontsize=8)
    page.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mopd_dataplane.bench.packing", description=__doc__)
    parser.add_argument("--samples", type=int, default=65_536)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures = measure(options.samples)
    if options.plot:
        draw(figures, options.plot)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
