"""Figures of a large store: an audit in full, and a group-by.

python -m mopd_dataplane.bench.audit FOLDER --verify 1000000 --group 5000000
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mopd_dataplane.bench.write import filled_samples, filled_tokens
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.verify_apart import verify_apart

DOMAINS = 8
ROUNDS = 5
QUERY = "select domain, count(*) as n, avg(total_len) as length from samples group by domain"


def audit_figures(folder: Path, verified: int, grouped: int) -> dict[str, Any]:
    """Make stores in an empty folder, measure, delete them.

    verify_s and verify_fast_s: seconds of `mopd store verify`, in full and with --fast, of a store of `verified`
    samples of 17 tokens, its process included. group_by_first_s and group_by_s: the first and the median of ROUNDS
    group-bys over `grouped` rows of `samples`; group_by_cpu_s: processor seconds of one, which other work on the
    machine hardly changes.
    """
    figures: dict[str, Any] = {}
    store = Store.create(folder / "verified")
    filled_tokens(store, verified)
    for name, deep in (("verify_s", True), ("verify_fast_s", False)):
        started = time.perf_counter()
        report = verify_apart(store, deep=deep)
        figures[name] = round(time.perf_counter() - started, 2)
        figures["sound"] = report.ok
    shutil.rmtree(folder / "verified")
    store = Store.create(folder / "grouped")
    names = pa.array([f"domain-{number}" for number in range(DOMAINS)])

    def domains(rows: slice) -> dict[str, Any]:
        return {"domain": names.take(pa.array(np.arange(rows.start, rows.stop) % DOMAINS))}

    filled_samples(store, grouped, domains)
    times, used = [], time.process_time()
    for _ in range(ROUNDS):
        started = time.perf_counter()
        counted = store.sql(QUERY)
        times.append(time.perf_counter() - started)
    used = (time.process_time() - used) / ROUNDS
    assert sum(counted["n"].to_pylist()) == grouped
    shutil.rmtree(folder / "grouped")
    median = round(float(np.median(times)), 3)
    return figures | {"group_by_first_s": round(times[0], 3), "group_by_s": median, "group_by_cpu_s": round(used, 3)}


def main() -> None:
    """Print the figures as one JSON object."""
    parser = argparse.ArgumentParser(description="Audit a large store, and ask it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verify", type=int, default=1_000_000)
    parser.add_argument("--group", type=int, default=5_000_000)
    options = parser.parse_args()
    print(json.dumps(audit_figures(options.folder, options.verify, options.group)))


if __name__ == "__main__":
    main()
