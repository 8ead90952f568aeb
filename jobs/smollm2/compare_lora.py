"""A LoRA student beside one of whole weights over several seeds, as figures that pages can quote.

    python jobs/smollm2/compare_lora.py [--seeds 0 1 2]
    python jobs/smollm2/compare_lora.py --table          what is there, in Markdown; runs nothing

Writes lora-results/ARM-SEED.json for the arms of lora.toml, `weights` and `adapter`, and does nothing where it exists;
an interrupted run goes on in its store, runs/smollm2-lora-SEED. A file holds the exact reverse KL of every held-out
answer at the start and at the end, and what an iteration left on disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane import open_store
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.job.load import load_job
from mopd_dataplane.query.statistics import compare
from mopd_dataplane.run.provenance import provenance
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.newest import newest_checkpoint

JOB = Path(__file__).parent / "lora.toml"
RESULTS = Path(__file__).parent / "lora-results"
ARMS = ("weights", "adapter")


def figures(store: Path, arm: str, seed: int) -> dict[str, Any]:
    """What one stage of a finished store began and ended with, and what it cost."""
    opened, job = open_store(str(store)), load_job(JOB)
    stage = job.stage(arm)
    checkpoints = store / "checkpoints" / arm
    times = opened.sql(
        "select json_extract_string(detail, '$.action') as action, sum(value) as seconds from events "
        f"where kind = 'stage_time' and stage = '{arm}' group by 1"
    )
    return {
        "arm": arm,
        "seed": seed,
        "iterations": stage.iterations,
        "learning_rate": stage.train.learning_rate,
        "rank": stage.train.lora.r,
        "start": answers(opened, "init", 0),
        "end": answers(opened, arm, stage.iterations),
        "version_bytes": size(store / "policies" / arm / f"v{stage.iterations}"),
        "checkpoint_bytes": size(checkpoints / newest_checkpoint(checkpoints)),
        "seconds": {row["action"]: round(row["seconds"], 1) for row in times.to_pylist()},
        **provenance(job, stages=[arm]),
    }


def answers(store: Store, policy: str, version: int) -> dict[str, dict[str, Any]]:
    """Domain -> for every held-out prompt, by its name: reverse KL in nat per token, tokens, and 1 where right."""
    rows = store.sql(
        "select domain, reverse_kl, response_len, correct from evals "
        f"where policy = '{policy}' and policy_version = {version} order by domain, prompt_id"
    ).to_pylist()
    return {
        domain: {
            "reverse_kl": [round(row["reverse_kl"], 5) for row in rows if row["domain"] == domain],
            "tokens": [row["response_len"] for row in rows if row["domain"] == domain],
            "correct": "".join(str(int(row["correct"])) for row in rows if row["domain"] == domain),
        }
        for domain in sorted({row["domain"] for row in rows})
    }


def table() -> Iterator[str]:
    """Rows of Markdown: a seed each, and all seeds, the answers to one prompt taken together."""
    results = {(r["arm"], r["seed"]): r for r in (json.loads(file.read_text()) for file in RESULTS.glob("*.json"))}
    seeds = sorted(seed for arm, seed in results if arm == ARMS[0] and (ARMS[1], seed) in results)
    yield f"| seed | start | {' | '.join(ARMS)} | {ARMS[0]} - start | {ARMS[1]} - start | {ARMS[1]} - {ARMS[0]} |"
    yield "|---" * 7 + "|"
    sets = [(str(seed), [seed]) for seed in seeds]
    for name, own in [*sets, ("all", seeds)] if len(seeds) > 1 else sets:
        start = _distances([results[ARMS[0], seed]["start"] for seed in own])
        ends = [_distances([results[arm, seed]["end"] for seed in own]) for arm in ARMS]
        means = [sum(values.mean() for values in domains.values()) / len(domains) for domains in (start, *ends)]
        pairs = [(start, ends[0]), (start, ends[1]), (ends[0], ends[1])]
        told = [compare(before, after, binary=False) for before, after in pairs]
        shown = [f"{d.value:+.3f} ({d.low:+.3f} to {d.high:+.3f})" for d in told]
        yield f"| {name} | {' | '.join([*(f'{value:.3f}' for value in means), *shown])} |"


def _distances(results: list[dict[str, dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Domain -> reverse KL of each prompt, the mean over results."""
    return {domain: np.mean([one[domain]["reverse_kl"] for one in results], axis=0) for domain in results[0]}


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    """Run what is missing and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="print what is there")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table()))
        return
    for seed in options.seeds:
        store = Path(f"runs/smollm2-lora-{seed}")
        for arm in ARMS:
            out = RESULTS / f"{arm}-{seed}.json"
            if not out.exists():
                run = ["run", str(JOB), "--stage", arm, "--seed", str(seed), "--store", str(store)]
                subprocess.run([sys.executable, "-m", "mopd_dataplane", *run], check=True)
                out.parent.mkdir(parents=True, exist_ok=True)
                publish_file(out, (json.dumps(figures(store, arm, seed)) + "\n").encode())
                print(f"wrote {out}", flush=True)


if __name__ == "__main__":
    main()
