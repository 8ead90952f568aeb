"""Ask an arm's policy for capitals again with the answer begun, "The capital of Chile is": what does it still know?

    python evidence/begun_answers.py JOB ARM SEED [--results DIR] [--stores DIR]

Takes the policy of an arm that run_arm.py has measured, from its store. Writes jobs/JOB/results/begun/ARM-SEED.json, of
the evaluation split, or does nothing if that file is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from comparisons import COMPARISONS
from grading import digits, in_order, verify
from run_arm import Experiment, experiment_of

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import Prompt
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.provenance import provenance
from mopd_dataplane.run.steps.evaluate import Answer, answer, evaluation_requests, generate

DOMAIN = "capital"
_QUESTION_START = "What is "


def main() -> None:
    """Measure one arm at one seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    jobs = [name for name, comparison in COMPARISONS.items() if DOMAIN in comparison.job.domains]
    parser.add_argument("job", choices=jobs, metavar="JOB", help=f"one of {', '.join(jobs)}")
    parser.add_argument("arm", metavar="ARM")
    parser.add_argument("seed", type=int, metavar="SEED")
    parser.add_argument("--results", type=Path, help="folder of the results; default: jobs/JOB/results")
    parser.add_argument("--stores", type=Path, help="folder of the stores; default: runs/JOB")
    experiment = experiment_of(parser, parser.parse_args())
    out = experiment.results / "begun" / experiment.file.name
    if out.exists():
        print(f"{out} exists; nothing to run")
        return
    measured = measure(experiment)
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_file(out, (json.dumps(measured, indent=1) + "\n").encode())


def measure(experiment: Experiment) -> dict[str, object]:
    """The content of the file of an arm at a seed: a digit for every capital of the evaluation split, in order.

    asked: 1 where the policy's own answer is right. begins: 1 where it begins as `beginning` does. begun: 1 where it is
    right when it has been begun like that.
    """
    with experiment.measured_policy() as (run, stage, folder):
        prompts = sorted(run.store.prompts(split="eval", domains=[DOMAIN]), key=in_order)
        own_answers = answer(run, stage, folder, 1, prompts)
        starts = [
            run.decode(own.ids).startswith(beginning(p.text)) for p, own in zip(prompts, own_answers, strict=True)
        ]
        return {
            "arm": experiment.name, "seed": experiment.seed, "split": "eval", "setting": experiment.result["setting"],
            "asked": digits(verify(run, prompts, own_answers)),
            "begins": "".join(str(int(start)) for start in starts),
            "begun": digits(verify(run, prompts, begun_answers(run, stage, folder, prompts))),
            **provenance(run.job, stages=experiment.stages),
        }  # fmt: skip


def begun_answers(run: Run, stage: Stage, folder: Path, prompts: Sequence[Prompt]) -> list[Answer]:
    """What a policy writes behind the beginning of each answer."""
    requests = []
    for prompt, request in zip(prompts, evaluation_requests(run, stage, prompts), strict=True):
        begun_ids = run.tokenizer.encode(beginning(prompt.text), add_special_tokens=False)
        requests.append(replace(request, prefix_ids=np.array(begun_ids, np.int32)))
    with run.engines.use(folder, 1, adapter=stage.adapter) as engine:
        return generate(engine, requests)


def beginning(question: str) -> str:
    """How an answer to a question for a capital begins."""
    subject = question.removeprefix(_QUESTION_START).removesuffix("?")
    return f"{subject[0].upper()}{subject[1:]} is"


if __name__ == "__main__":
    main()
