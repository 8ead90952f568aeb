"""Figures of a fork: seconds and bytes by the size of the store, beside a copy of the smallest one's files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.bench.calls import seconds
from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.bench.synthetic import bench_teacher
from mopd_dataplane.bench.write import HIDDEN_BATCH, HIDDEN_ROW, RESPONSE
from mopd_dataplane.job.load import check_job
from mopd_dataplane.records import Signal
from mopd_dataplane.run.context import JOB
from mopd_dataplane.run.fork import fork
from mopd_dataplane.run.stage_rows import STAGE_DONE
from mopd_dataplane.store.dataset import Store

STAGE, LATER = "student", "later"
ROUNDS = 3
"""Forks of each store; the median counts."""


def measure(folder: Path, sizes: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each store, the smallest first: its GB of hidden states, median seconds of a fork, bytes
    that the fork shares with it and bytes of its own; for the smallest also the seconds of a copy of its files."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-fork-") as scratch:
        for number, size in enumerate(sorted(sizes)):
            home = Path(scratch) / str(number)
            store = _filled(home / "run", size)
            times = [seconds(partial(fork, store, str(home / f"fork-{turn}"), f"{LATER}@0")) for turn in range(ROUNDS)]
            shared, own = _bytes(home / "fork-0")
            figures = {
                "GB": size,
                "fork, s": round(sorted(times)[ROUNDS // 2], 3),
                "shared bytes": shared,
                "own bytes": own,
            }
            if number == 0:
                figures["copy of its files, s"] = round(
                    seconds(partial(shutil.copytree, home / "run", home / "copy")), 3
                )
            yield figures
            shutil.rmtree(home)


def _filled(folder: Path, size: float) -> Store:
    """A run with that many GB of hidden states, whose last stage is still to come."""
    store = Store.create(folder)
    job = {
        "name": "bench", "store": str(folder), "student": {"config": {"model_type": "qwen3"}},
        "domains": {"math": {"source": "store"}}, "plan": {"batch_samples": HIDDEN_BATCH},
        "stages": [{"name": STAGE, "data": "reference"}, {"name": LATER, "data": "reference", "start": STAGE}],
    }  # fmt: skip
    store.write_json(JOB, check_job(job, where="bench").model_dump(mode="json"))
    store.add_event(f"done/{STAGE}/v1", STAGE, STAGE_DONE, -1, 1.0, {})
    store.add_teacher(replace(bench_teacher("bench", HIDDEN_ROW // 2), head_file=""))
    states = np.random.default_rng(0).integers(0, 256, (RESPONSE, HIDDEN_ROW), dtype=np.uint8)
    count = max(1, round(size * 1e9 / states.nbytes))
    samples = [replace(bench_sample(number, RESPONSE), stage=STAGE) for number in range(count)]
    rows = store.commit_samples(samples).rows.tolist()
    for start in range(0, count, HIDDEN_BATCH):
        batch = zip(samples[start : start + HIDDEN_BATCH], rows[start : start + HIDDEN_BATCH], strict=True)
        store.commit_signals("bench", "hidden", [
            Signal(uid=sample.uid, sample_row=row, kind="hidden", codec="bf16", hidden=states) for sample, row in batch
        ])  # fmt: skip
    return store


def _bytes(folder: Path) -> tuple[int, int]:
    """Bytes on disk of files with several names, and of files that the folder alone has."""
    shared = own = 0
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            shared += 512 * status.st_blocks * (status.st_nlink > 1)
            own += 512 * status.st_blocks * (status.st_nlink == 1)
    return shared, own
