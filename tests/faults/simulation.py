"""Runs sequences of operations and faults on whole stores, one a seed, and checks every step against a model.

    python tests/faults/simulation.py --seeds 200                      # seeds 0 to 199
    python tests/faults/simulation.py --seeds 10000 --notes done.jsonl # goes on where it was interrupted
    python tests/faults/simulation.py --seed 17                        # one seed, each step with what became of it
    python tests/faults/simulation.py --seeds 100 --object-store       # on SeaweedFS
    python tests/faults/simulation.py --focus delete --focus fork      # sequences with many of these operations

A seed that fails prints the shortest sequence that breaks the same invariant; the exit code is 1. In simulator/:

    sequences.py   seed -> steps: which writer does what, and what befalls it meanwhile
    actors.py      writers as threads of which one runs at a time; each can be killed or suspended at any pause
    world.py       disk, clocks and pauses in the product's code in place of the real ones
    model.py       what a store must have, may have and must not have, in dicts and sets
    values.py      samples, signals and other rows by their number, and the store that every sequence begins with
    operations.py  the operations: what each calls, and what the model is told
    copies.py      copies and upgrades, each compared with its source
    refusals.py    errors that an operation may end with
    reading.py     what a reader sees
    invariants.py  the invariants of docs/durability.md, checked after each step
    run.py         one sequence from its beginning to its end; the shortest sequence that still fails
    seeds.py       many seeds, in worker processes
    plane.py       a rollout, its token log, a plan and a consumer in one thread, with a stand-in for the store
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from objectservers import seaweedfs
from simulator.run import open_template, run_steps, template_folder
from simulator.seeds import judge_all
from simulator.sequences import FOCUSED, WEIGHTS, sequence


def main() -> int:
    """Run the seeds of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, and show its steps")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="worker processes")
    parser.add_argument("--notes", type=Path, help="file for the verdicts; seeds that have one there are left out")
    parser.add_argument(
        "--focus", metavar="OPERATION", action="append", default=[], choices=sorted([*WEIGHTS, *FOCUSED]),
        help="an operation that every sequence has, often; repeatable",
    )  # fmt: skip
    parser.add_argument("--object-store", action="store_true", help="on a SeaweedFS server, in place of a folder")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first seed that fails")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # workers and their folders go then too
    with _bucket() if args.object_store else nullcontext("") as bucket:
        return _show(args.seed, args.focus, bucket) if args.seed is not None else _run(args, bucket)


@contextmanager
def _bucket() -> Iterator[str]:
    """A SeaweedFS server with its data in memory, and the prefix of a bucket there."""
    with tempfile.TemporaryDirectory(prefix="seaweedfs-", dir="/dev/shm") as scratch:
        server = seaweedfs(Path(scratch) / "server")
        os.environ.update(server.environment)
        try:
            server.start_with_bucket()
            yield "s3://bucket/simulated"
        finally:
            server.kill()


def _run(args: argparse.Namespace, bucket: str) -> int:
    """Run many seeds, in worker processes."""
    seeds = range(args.first, args.first + args.seeds)
    noted = _read(args.notes)
    failed = sum(bool(noted.get(seed)) for seed in seeds)
    count = sum(seed in noted for seed in seeds)
    start = time.monotonic()
    todo = (seed for seed in seeds if seed not in noted)
    try:
        for verdict in judge_all(todo, args.jobs, focus=args.focus, bucket=bucket):
            count, failed = count + 1, failed + bool(verdict.violation)
            if verdict.violation:
                print(verdict, flush=True)
                if args.until_failure:
                    print(f"found after {count:,} seeds, {time.monotonic() - start:.0f} s")
                    return 1
            if args.notes is not None:
                with args.notes.open("a") as file:
                    file.write(json.dumps({"seed": verdict.seed, "violation": verdict.violation}) + "\n")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    elapsed_s = time.monotonic() - start
    print(f"{count:,} of {args.seeds:,} seeds run, {failed:,} failed, {elapsed_s:.0f} s")
    return int(failed > 0)


def _show(seed: int, focus: list[str], bucket: str) -> int:
    """Run one seed here."""
    with template_folder() as folder:
        outcome = run_steps(sequence(seed, focus), open_template(folder, bucket))
    print(*outcome.trace, outcome.violation or "every invariant held", sep="\n")
    return int(bool(outcome.violation))


def _read(notes: Path | None) -> dict[int, str]:
    """Verdicts by seed of an earlier call; a line that was cut off is removed."""
    if notes is None or not notes.exists():
        return {}
    text = notes.read_text()
    whole = text[: text.rfind("\n") + 1]
    os.truncate(notes, len(whole.encode()))
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["seed"]: line["violation"] for line in lines}


if __name__ == "__main__":
    sys.exit(main())
