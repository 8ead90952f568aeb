"""The command that compares teachers on the same answers."""

from itertools import groupby
from typing import Annotated, Any

import typer

from mopd_dataplane.cli.jobs import Given, OneStage, choose_stage, load
from mopd_dataplane.cli.output import note, print_json, print_title, stderr
from mopd_dataplane.cli.register import register
from mopd_dataplane.cli.rows import print_fitting

PANEL = "Answers"
COLUMNS = {
    "teacher": "teacher",
    "accuracy": "acc.",
    "mean_logprob": "log p",
    "reverse_kl": "KL",
    "entropy": "entropy",
    "overlap": "overlap",
    "discrimination": "right > wrong",
    "calibration_error": "calib. error",
    "gradient_agreement": "push",
}


def teachers(
    of: OneStage,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers of each domain that are scored.")] = 200,
    topk: Annotated[int, typer.Option("--topk", min=1, help="Likeliest tokens whose overlap is counted.")] = 16,
    *,
    given: Given,
) -> None:
    """Compare teachers: all of them on the same answers of a stage, domain by domain.

    Mean teacher log-prob of the student's tokens, exact reverse KL, entropy, overlap of the likeliest tokens, how often
    a right answer is preferred to a wrong one, calibration on right answers, and whether following the teacher pushes
    the student where the verifier would (cosine of gradients), next to the teacher's own held-out accuracy.
    """
    loaded = load(of.job, given)
    chosen = choose_stage(loaded, of.stage, sampled=True)

    from mopd_dataplane.run.steps.compare_teachers import compare_teachers

    rows = compare_teachers(loaded, chosen, samples=samples, topk=topk, console=stderr())
    if given.as_json:
        print_json(rows)
        return
    for domain, scored in groupby(rows, key=lambda row: row["domain"]):
        print_title(domain)
        print_fitting(list(COLUMNS.values()), [[_shown(row[name]) for name in COLUMNS] for row in scored])
    note("logs are natural; means are over trained tokens; docs/objectives.md says what each column is for")


def _shown(value: Any) -> Any:
    """Two decimals: what is measured on a few hundred answers has no more."""
    return round(value, 2) if isinstance(value, float) else value


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    register(app, teachers, "mopd teachers jobs/quickstart --stage student", panel=PANEL)
