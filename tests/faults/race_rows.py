"""Row 20 of the fault list: writers, merges, loaders and readers at once, in a folder and on an object store."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import races
from deaths import folder, told_by
from inject import Row, Tally

sys.path.insert(0, str(Path(__file__).parents[1]))

from objectservers import make_bucket, seaweedfs


def in_a_folder(count: int, seed: int) -> Tally:
    """Races in a folder, every second one without locks; a case is a row that was compared with what was committed."""
    tally = Tally()
    for race in range(count):
        with folder() as home:
            notes = home.with_name("notes")
            notes.mkdir()
            _count(tally, races.Ground(str(home), notes, locks=race % 2 == 0), seed + race)
    return tally


def on_an_object_store(count: int, seed: int) -> Tally:
    """The same on SeaweedFS, where there are no locks."""
    tally = Tally()
    with served() as home:
        for race in range(count):
            notes = home / f"notes-{race}"
            notes.mkdir()
            ground = races.Ground(f"s3://bucket/race-{race}", notes, locks=False, samples=races.SAMPLES // 5)
            _count(tally, ground, seed + race)
    return tally


def _count(tally: Tally, ground: races.Ground, seed: int) -> None:
    compared, wrong = races.run(ground, seed)
    tally.tried += max(0, compared - len(wrong))
    for what in wrong:
        tally.case(False, f"{'locks' if ground.locks else 'no locks'}, seed {seed}: {what}")


@contextmanager
def served() -> Iterator[Path]:
    """A SeaweedFS server, its credentials in the environment."""
    with folder() as home:
        home.mkdir()
        server = seaweedfs(home / "server")
        os.environ.update(server.environment)
        try:
            server.start()
            told_by(partial(make_bucket, server))
            yield home
        finally:
            server.kill()


ROWS = [
    Row(
        20, "store: writers, merges, loaders and readers at once", "each row read is what was committed, none lost",
        in_a_folder, (1, 12, 100),
    ),
    Row(
        20, "store: the same on SeaweedFS", "each row read is what was committed, none lost",
        on_an_object_store, (1, 3, 20),
    ),
]  # fmt: skip
