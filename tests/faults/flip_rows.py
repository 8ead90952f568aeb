"""Row 19 of the fault list: one bit flips in any file of a real store; the audit names it, or readers see no change."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import flips
from deaths import folder
from figures import Row, Tally

STORE = Path(__file__).parents[1] / "data" / "store-format-1.tar.xz"
MAKE = """
import sys
from mopd_dataplane.run.upgrade import upgrade_store
from mopd_dataplane.store.dataset import Store
list(upgrade_store(sys.argv[1], sys.argv[2]))
store = Store.open(sys.argv[2])
for number in range(3):
    store.add_event(f"flip/{number}", "student", "measure", number, 0.5, {"number": number})
store.compact()
store.snapshot(tag="after")
"""


def flipped(count: int, seed: int) -> Tally:
    """Flip bits one at a time in a store that a job of every kind of stage left behind."""
    tally = Tally()
    with folder() as home:
        home.mkdir()
        with tarfile.open(STORE) as archive:
            archive.extractall(home, filter="data")
        subprocess.run([sys.executable, "-c", MAKE, str(home / "store"), str(home / "new")], check=True, timeout=120)
        shutil.rmtree(home / "store")
        for outcome in flips.try_flips(home / "new", flips.draw(home / "new", count, seed)):
            tally.case(outcome.what in ("found", "harmless"), f"{outcome.what}, {outcome.flip}: {outcome.said}")
    return tally


ROWS = [
    Row(
        19, "store: one bit flips in any file", "named by verify, or nothing that is read has changed",
        flipped, (24, 500, 2_000),
    ),
]  # fmt: skip
