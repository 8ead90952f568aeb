"""Row 22 of the fault list: sequences of operations and faults on whole stores, each step checked against a model."""

from __future__ import annotations

import os

from inject import Row, Tally
from simulator.seeds import judge_all


def simulated_stores(count: int, seed: int) -> Tally:
    """Every invariant after every step; a failure prints the shortest sequence that breaks the same one."""
    tally = Tally()
    for verdict in judge_all(range(seed, seed + count), min(2, os.cpu_count() or 1)):
        tally.case(not verdict.violation, str(verdict))
    return tally


def committed_together(count: int, seed: int) -> Tally:
    """The same where every sequence hands batches over, to be committed with those of others, and deletes some."""
    tally = Tally()
    focus = ("commit together", "delete")
    for verdict in judge_all(range(seed, seed + count), min(2, os.cpu_count() or 1), focus=focus):
        tally.case(not verdict.violation, str(verdict))
    return tally


ROWS = [
    Row(
        22, "whole stores: sequences of operations and faults", "the invariants of docs/durability.md after each step",
        simulated_stores, (60, 200, 10_000),
    ),
    Row(
        22, "whole stores: batches of several writers committed together", "the same invariants",
        committed_together, (15, 200, 5_000),
    ),
]  # fmt: skip
