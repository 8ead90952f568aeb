"""Row 17 of the fault list: the deterministic simulation over many seeds; a failure prints the seed that repeats it."""

from __future__ import annotations

from deaths import folder
from inject import Row, Tally
from simulator.plane import simulate
from tinystage import open_files

TWICE = 20
"""Every so many seeds one is run twice, to see that a seed decides everything."""


def simulated_seeds(count: int, seed: int) -> Tally:
    """The samples and the consumed batches of a calm run, whatever befell it; the same seed gives the same run."""
    tally = Tally()
    with folder() as home:
        calm = simulate(0, home, calm=True)
    for number in range(seed, seed + count):
        before = open_files()
        try:
            with folder() as home:
                outcome = simulate(number, home)
            good = outcome["samples"] == calm["samples"] and outcome["consumed"] == calm["consumed"]
            what = f"simulation seed {number}: {outcome['trace'][-8:]}"
            if number % TWICE == 0:
                with folder() as home:
                    good &= simulate(number, home) == outcome
        except Exception as error:
            good, what = False, f"simulation seed {number}: {error!r}"
        leaked = open_files() - before
        tally.case(good and not leaked, f"{what}, {leaked} descriptors leaked")
    return tally


ROWS = [
    Row(
        17, "simulation of the whole plane: seeds", "every sample and batch as in a calm run",
        simulated_seeds, (12, 200, 50_000),
    ),
]  # fmt: skip
