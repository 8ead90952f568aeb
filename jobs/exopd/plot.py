"""The sweep over λ: held-out accuracy of sorting at the end of every stage, over the λ of its teacher.

    python jobs/exopd/plot.py runs/exopd [MORE STORES …] [--out sweep.png]

One line per store, for runs with several seeds; the start and the specialist (λ = 1 at convergence) are dotted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

from mopd_dataplane import open_store

DOMAIN = "number_sorting"
SWEEP = {0.5: "lambda-050", 1.0: "lambda-100", 1.25: "lambda-125", 1.5: "lambda-150"}
LAST = """
    select policy, avg(reward) as accuracy from evals where domain = '{domain}'
    group by policy, policy_version qualify row_number() over (partition by policy order by policy_version desc) = 1
"""


def last_accuracy(store: str) -> dict[str, float]:
    """Accuracy of every policy's last version."""
    rows = open_store(store).sql(LAST.format(domain=DOMAIN)).to_pylist()
    return {row["policy"]: row["accuracy"] for row in rows}


def main() -> None:
    """Draw the sweep of every store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stores", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("sweep.png"))
    options = parser.parse_args()
    figure, axis = plt.subplots(figsize=(4.2, 3.0))
    for place, store in enumerate(options.stores):
        found = last_accuracy(store)
        points = [(lam, found[stage]) for lam, stage in SWEEP.items() if stage in found]
        axis.plot(*zip(*points, strict=True), "o-", ms=3, lw=1.2, color=f"C{place}", label=Path(store).name)
        for policy in ("base", "sorter"):
            axis.axhline(found[policy], ls=":", lw=0.9, color=f"C{place}")
    axis.set_xlabel("λ", fontsize=9)
    axis.set_ylabel("sorting, held-out accuracy", fontsize=8)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", lw=0.4)
    axis.legend(fontsize=7, frameon=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=130, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    main()
