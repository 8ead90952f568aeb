"""Injects faults and prints the figures: cases tried, cases passed, one line per row of the fault list.

    python tests/faults/inject.py                      # the counts of `make faults`
    python tests/faults/inject.py --tier long          # the counts of `make faults-long`
    python tests/faults/inject.py --rows 3,4 --seed 9  # one failure again

Rows live in the `*_rows.py` files beside this one. Each number runs in a process of its own, because rows fork; a case
that fails is printed with the commit, seed and description that reproduce it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIERS = ("test", "faults", "long")


@dataclass
class Tally:
    """What became of a row's cases."""

    tried: int = 0
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """What else is printed, by name."""

    def case(self, passed: bool, what: str) -> None:
        """Count one case; `what` must be enough to run it again."""
        self.tried += 1
        if not passed:
            self.failures.append(what)


@dataclass(frozen=True)
class Row:
    """One fault: `run(count, seed)` tries at least `count` cases."""

    number: int
    fault: str
    rule: str
    run: Callable[[int, int], Tally]
    counts: tuple[int, int, int]
    """Cases in the tiers test, faults, long."""


def numbers() -> dict[int, set[Path]]:
    """The files that hold each row number, read from their sources: rows import what not every run needs."""
    files_by_number: dict[int, set[Path]] = {}
    for file in sorted(Path(__file__).parent.glob("*_rows.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Row":
                files_by_number.setdefault(ast.literal_eval(node.args[0]), set()).add(file)
    return dict(sorted(files_by_number.items()))


def rows(number: int) -> list[Row]:
    """The rows of one number."""
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    modules = [importlib.import_module(file.stem) for file in sorted(numbers()[number])]
    return [row for module in modules for row in module.ROWS if row.number == number]


def measure(number: int, tier: str, seed: int) -> Iterator[dict[str, Any]]:
    """Run the rows of one number here, one after the other."""
    for row in rows(number):
        began = time.monotonic()
        tally = row.run(row.counts[TIERS.index(tier)], seed)
        yield {
            "row": row.number,
            "fault": row.fault,
            "tried": tally.tried,
            "passed": tally.tried - len(tally.failures),
            "seconds": round(time.monotonic() - began, 1),
            "failures": tally.failures[:5],
            "counts": tally.counts,
        }


def measure_apart(number: int, tier: str, seed: int) -> list[dict[str, Any]]:
    """Run the rows of one number in a process of its own."""
    command = [sys.executable, __file__, "--tier", tier, "--rows", str(number), "--seed", str(seed), "--json"]
    quiet = {**os.environ, "LANCE_LOG": "error"}  # it warns of every conflict of a merge, which some rows are made of
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=quiet)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if lines and (done.returncode == 0 or any(line["failures"] for line in lines)):
        return lines
    return [{"row": number, "fault": "the row itself", "tried": 1, "passed": 0, "seconds": 0.0,
             "failures": [f"ended with exit code {done.returncode}"]}]  # fmt: skip


def main() -> int:
    """Run rows and print the table; the number of lines with a failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tier", choices=TIERS, default="faults")
    parser.add_argument("--rows", default="", help="numbers, separated by commas; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="numbers that run at the same time")
    parser.add_argument("--json", action="store_true", help="run here and print one JSON object per row")
    args = parser.parse_args()
    chosen = [int(number) for number in args.rows.split(",") if number] or list(numbers())
    failed = 0
    if args.json:
        for line in (line for number in chosen for line in measure(number, args.tier, args.seed)):
            print(json.dumps(line), flush=True)
            failed += bool(line["failures"])
        return failed
    with ThreadPoolExecutor(args.jobs) as pool:
        for lines in pool.map(lambda number: measure_apart(number, args.tier, args.seed), chosen):
            for line in lines:
                print(
                    f"{line['row']:>3}  {line['fault']:<62} {line['tried']:>9,} tried {line['passed']:>9,} passed "
                    f"{line['seconds']:7.1f} s",
                    flush=True,
                )
                if counts := line.get("counts"):
                    print("     " + ", ".join(f"{name} {count:,}" for name, count in counts.items()), flush=True)
                failed += bool(line["failures"])
                for failure in line["failures"]:
                    print(f"     commit {commit()}, seed {args.seed}: {failure}", file=sys.stderr, flush=True)
    return failed


def commit() -> str:
    """The commit under test, with a + when the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
