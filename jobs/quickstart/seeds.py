"""The quickstart over several seeds and both objectives: how much of each specialist the student holds.

    python jobs/quickstart/seeds.py [--seeds 0 1 2] [--objectives full-vocab sampled]

Stores go to runs/quickstart-<objective>-<seed>; a finished one is not run again. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).parent
SPECIALIST = {"spell_backward": "speller", "number_sorting": "sorter", "spiral_matrix": "walker"}


def accuracy(objective: str, seed: int) -> dict[str, dict[str, float]]:
    """{policy: {domain: held-out accuracy}} of one run."""
    command = [sys.executable, "-m", "mopd_dataplane", "run", str(JOB), "--json", "--seed", str(seed)]
    command += ["--store", f"runs/quickstart-{objective}-{seed}", "--set", f'stages.student.objective="{objective}"']
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    table: dict[str, dict[str, float]] = json.loads(done.stdout)["accuracy"]
    return table


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--objectives", nargs="+", default=["full-vocab", "sampled"])
    options = parser.parse_args()
    print("| objective | seed | domain | base | specialist | student | held |\n|---|---|---|---|---|---|---|")
    for objective in options.objectives:
        held: dict[str, list[float]] = {domain: [] for domain in SPECIALIST}
        for seed in options.seeds:
            found = accuracy(objective, seed)
            for domain, specialist in SPECIALIST.items():
                base, teacher, student = (found[policy][domain] for policy in ("base", specialist, "student"))
                held[domain].append(student / teacher)
                cells = [objective, str(seed), domain, f"{base:.3f}", f"{teacher:.3f}", f"{student:.3f}"]
                print(f"| {' | '.join(cells)} | {100 * student / teacher:.1f} % |", flush=True)
        for domain, values in held.items():
            print(f"| {objective} | mean | {domain} | | | | {100 * statistics.mean(values):.1f} % |", flush=True)


if __name__ == "__main__":
    main()
