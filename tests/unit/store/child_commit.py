"""A committer in a process of its own, which can be made to die, stop or run without the lock.

    python child_commit.py URI --samples 0 64 --batch 16 [--die-at POINT [--on N]] [--stop-at POINT] [--unlocked]
                               [--file-limit BYTES] [--signal TEACHER KIND] [--compact]
Prints one JSON object: {"inserted": n} or {"error": class name, "message": text}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
from unittest import mock

import store_builders as build

from mopd_dataplane.base import fault_points
from mopd_dataplane.errors import MopdError
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.location import StoreLocation


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    parser.add_argument("--samples", type=int, nargs=2, default=(0, 0))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--response", type=int, default=20)
    parser.add_argument("--die-at", default="")
    parser.add_argument("--on", type=int, default=1)
    parser.add_argument("--stop-at", default="")
    parser.add_argument("--unlocked", action="store_true")
    parser.add_argument("--file-limit", type=int, default=0)
    parser.add_argument("--signal", nargs=2, default=None)
    parser.add_argument("--compact", action="store_true")
    options = parser.parse_args()
    store = Store.open(options.uri)
    seen = {"n": 0}

    def observe(point: str) -> None:
        if point == options.die_at:
            seen["n"] += 1
            if seen["n"] == options.on:
                os.kill(os.getpid(), signal.SIGKILL)
        if point == options.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)

    fault_points.observe(observe)
    if options.unlocked:
        mock.patch.object(StoreLocation, "committing", return_value=contextlib.nullcontext(False)).start()
    if options.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_limit, options.file_limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        print(json.dumps({"inserted": work(store, options)}))
    except MopdError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))


def work(store: Store, options: argparse.Namespace) -> int:
    if options.compact:
        store.compact()
        return 0
    samples = [build.sample(number, response=options.response) for number in range(*options.samples)]
    inserted = 0
    for start in range(0, len(samples), options.batch):
        batch = samples[start : start + options.batch]
        if options.signal:
            teacher, kind = options.signal
            rows = range(options.samples[0] + start, options.samples[0] + start + len(batch))
            signals = [build.signal(sample, row, kind) for sample, row in zip(batch, rows, strict=True)]
            inserted += store.commit_signals(teacher, kind, signals)
        else:
            inserted += store.commit_samples(batch).inserted
    return inserted


if __name__ == "__main__":
    main()
