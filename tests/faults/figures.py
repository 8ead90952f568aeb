"""Injects faults and prints the figures: cases tried, cases passed, one line per row of the fault list.

    python tests/faults/figures.py                      # the counts of `make faults`
    python tests/faults/figures.py --tier long          # the counts of `make faults-long`
    python tests/faults/figures.py --rows 3,4 --seed 9  # one failure again

Rows live in the `*_rows.py` files beside this one; a row that fails prints the seed and case that reproduce it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TIERS = ("test", "faults", "long")


@dataclass
class Tally:
    """What became of a row's cases."""

    tried: int = 0
    failures: list[str] = field(default_factory=list)

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


def rows() -> list[Row]:
    """Every row, by number."""
    folder = Path(__file__).parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    modules = [importlib.import_module(file.stem) for file in sorted(folder.glob("*_rows.py"))]
    return sorted((row for module in modules for row in module.ROWS), key=lambda row: (row.number, row.fault))


def main() -> int:
    """Run rows and print the table; the number of rows that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tier", choices=TIERS, default="faults")
    parser.add_argument("--rows", default="", help="numbers, separated by commas; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    given = parser.parse_args()
    chosen = {int(number) for number in given.rows.split(",") if number}
    failed = 0
    for row in rows():
        if chosen and row.number not in chosen:
            continue
        began = time.monotonic()
        tally = row.run(row.counts[TIERS.index(given.tier)], given.seed)
        seconds = time.monotonic() - began
        passed = tally.tried - len(tally.failures)
        failed += bool(tally.failures)
        if given.json:
            print(
                json.dumps({"row": row.number, "fault": row.fault, "tried": tally.tried, "passed": passed}), flush=True
            )
        else:
            print(
                f"{row.number:>3}  {row.fault:<58} {tally.tried:>8,} tried {passed:>8,} passed {seconds:7.1f} s",
                flush=True,
            )
        for failure in tally.failures[:5]:
            print(f"     seed {given.seed}: {failure}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
