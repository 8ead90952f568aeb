"""A store is copied while its job runs: the job neither waits nor fails, and continues in the copy as in the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd_dataplane import open_store

LONGEST_S = 600.0


@pytest.mark.slow  # three copies beside a whole job
def test_a_store_is_copied_while_its_job_runs(
    tmp_path: Path, write_job: Callable, start_mopd: Callable, mopd: Callable
) -> None:
    job, store = write_job(tmp_path), tmp_path / "store"
    running = start_mopd("run", job)
    copies: list[Path] = []
    until = time.monotonic() + LONGEST_S
    while running.poll() is None and time.monotonic() < until and len(copies) < 3:
        log = store / "wal" / "student" / "engine-0"
        if (store / "store.json").exists() and (copies or any(log.glob("*/*.wal"))):
            copies.append(tmp_path / f"copy-{len(copies)}")
            mopd("store", "copy", store, copies[-1])
        time.sleep(0.05)
    assert copies, "the job ended before it had a token log"
    told = running.communicate(timeout=LONGEST_S)[1].decode()
    assert running.returncode == 0, told
    expected = samples_of(store)
    first = open_store(str(copies[0]))
    assert first.verify().findings == []
    assert set(samples_of(copies[0])) < set(expected), "the copy was taken while the job ran"
    mopd("run", job, "--store", copies[0])
    assert samples_of(copies[0]) == expected
    assert open_store(str(copies[0])).verify().findings == []


def samples_of(store: Path) -> dict[str, list[int]]:
    """Tokens of each sample by its uid."""
    rows = open_store(str(store)).table("tokens", ["uid", "tokens"]).to_pylist()
    return {row["uid"]: row["tokens"] for row in rows}
