"""The quickstart over several seeds and its objectives, as figures that pages can quote.

    python jobs/quickstart/seeds.py [--seeds 0 1 2] [--objectives full-vocab sampled no-baseline]
    python jobs/quickstart/seeds.py --store runs/quickstart      the figures of a finished `make run`

Writes results/<objective>-<seed>.json, and does nothing where that exists; an interrupted run goes on in its store,
runs/quickstart-<objective>-<seed>. A file holds what every policy made of every held-out prompt, so that intervals and
paired tests need nothing else. `python evidence/figures.py` puts the tables into the pages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mopd_dataplane import open_store
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import load_job
from mopd_dataplane.query.measures import Measures, measure, recovery, teacher_policies
from mopd_dataplane.run.provenance import provenance

JOB = Path(__file__).parent
RESULTS = JOB / "results"
SAMPLED = 'stages.student.objective="sampled"'
OBJECTIVES = {
    "full-vocab": [],
    "sampled": [SAMPLED],
    "no-baseline": [SAMPLED, 'objectives.sampled.policy_gradient.baseline="none"'],
}
"""Name in the results -> what is set in the job."""


def run(objective: str, seed: int) -> Path:
    """The store of a finished run."""
    store = Path(f"runs/quickstart-{objective}-{seed}")
    command = [sys.executable, "-m", "mopd_dataplane", "run", str(JOB), "--seed", str(seed), "--store", str(store)]
    subprocess.run([*command, *(word for key in OBJECTIVES[objective] for word in ("--set", key))], check=True)
    return store


def job_of(objective: str, seed: int) -> Job:
    """The job with one objective for its student."""
    return load_job(JOB, overrides=[f"seed={seed}", *OBJECTIVES[objective]])


def objective_of(recorded_job: Job) -> str:
    """The name here of what a job's student learns by. Raises ValueError for another objective."""
    chosen = recorded_job.stage("student").objective
    for name in OBJECTIVES:
        job = job_of(name, recorded_job.seed)
        if job.stage("student").objective == chosen and job.objectives[chosen] == recorded_job.objectives[chosen]:
            return name
    raise ValueError(f"the student's objective is none of {', '.join(OBJECTIVES)}")


def figures(store: Path) -> dict[str, Any]:
    """What a store's held-out answers were, and where they come from."""
    recorded_job = load_job(store / "job.json")
    objective = objective_of(recorded_job)
    job = job_of(objective, recorded_job.seed)
    measures = measure(open_store(str(store)))
    policies = {
        policy: {"version": version, "domains": _domains(measures, policy, version)}
        for policy, version in {row["policy"]: row["policy_version"] for row in measures.accuracy}.items()
    }
    teachers = teacher_policies(measures)
    taught: dict[str, dict[str, Any]] = {}
    for row in recovery(measures):
        if row["domain"] != "mean":
            row_of_policy = taught.setdefault(row["policy"], {"base": row["base"], "teachers": {}})
            row_of_policy["teachers"][row["domain"]] = teachers[row["teacher"]]
    seconds = sum(row["seconds"] for row in measures.times)
    return {
        "job": job.name, "objective": objective, "seed": job.seed,
        "split": measures.held_out.split, "policies": policies, "taught": taught, "seconds": round(seconds),
        **provenance(job, stages=[stage.name for stage in job.stages]),
    }  # fmt: skip


def _domains(measures: Measures, policy: str, version: int) -> dict[str, dict[str, Any]]:
    """Domain -> a 0 or 1 for every prompt in the order of its name, and the mean reward."""
    answers = measures.held_out.policies[policy, version]
    return {
        domain: {
            "correct": "".join(str(int(value)) for value in answers.correct[domain]),
            "reward": round(float(answers.reward[domain].mean()), 4),
        }
        for domain in answers.prompts
    }


def main() -> None:
    """Run what is missing and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--store", type=Path, help="of a finished run; runs nothing")
    options = parser.parse_args()
    if options.store is not None:
        result = figures(options.store)
        _write(RESULTS / f"{result['objective']}-{result['seed']}.json", result)
        return
    for objective in options.objectives:
        for seed in options.seeds:
            out = RESULTS / f"{objective}-{seed}.json"
            if not out.exists():
                _write(out, figures(run(objective, seed)))


def _write(out: Path, result: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_file(out, (json.dumps(result, indent=1) + "\n").encode())
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
