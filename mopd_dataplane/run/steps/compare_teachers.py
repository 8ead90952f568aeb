"""`mopd teachers`: every teacher of a job on the same answers of a stage, domain by domain."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.models.devices import resolve_device
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.query.signal_health import SIGNAL_HEALTH
from mopd_dataplane.run.context import Run, open_run
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.stage_rows import Rows, stage_samples
from mopd_dataplane.run.steps.evaluate import accuracy
from mopd_dataplane.run.steps.score import stored_samples, teacher_pool
from mopd_dataplane.run.steps.teacher_prompts import prompt_renderer
from mopd_dataplane.score.readers import HfReader, Scorable, TeacherForward
from mopd_dataplane.score.scorer import model_input
from mopd_dataplane.score.teacher_comparison import Answer, compare
from mopd_dataplane.store.read.snapshot import newest
from mopd_dataplane.store.rollouts.conditions import Conditions


def compare_teachers(
    job: Job, stage: Stage, *, samples: int = 200, topk: int = 16, where: str = "", console: Console | None = None
) -> list[dict[str, Any]]:
    """One row for each domain of the stage and teacher of the job, over the first iteration's first answers.

    Every teacher reads the same answers, `samples` a domain; nothing is written. where: condition on the answers, in
    SQL over the table of rollouts. Columns: those of score.teacher_comparison.Comparison; `accuracy`, the teacher's own
    on held-out prompts of the domain where it was evaluated; and `failed`, the checks that its stored signals of the
    stage and domain fail, with a sentence on each. Raises QueryError for a condition that cannot be answered,
    InputError when the stage has no rewarded answers that meet it.
    """
    run = open_run(job, Progress(console), create=False)
    every, table = stage_samples(run.store, stage, 0, ["domain"])
    if where:
        with newest(run.store) as snapshot:
            chosen_rows = Conditions(run.store, snapshot, job.questions).rows(where)
        inside = np.isin(every, chosen_rows)
        every, table = every[inside], table.filter(pa.array(inside))
    by_domain = {name: every[pc.equal(table["domain"], name).to_numpy()] for name in job.domains_of(stage)}
    answers = {name: chosen for name, rows in by_domain.items() if (chosen := _rewarded(run, rows, samples))}
    if not answers:
        which = f" that meet --where {where!r:.200}; loosen it, or" if where else ";"
        raise InputError(
            f"stage {stage.name!r} has no rewarded answers{which} run: mopd rollout JOB, then mopd reward JOB"
        )
    device = resolve_device(stage.score.device)
    student = TeacherForward((HfReader(load_model(run.policies.folder(stage, 0), device=device)),))
    names = [name for name in job.teachers if _is_there(run, name)]
    pool = teacher_pool(run, stage, names, engine="hf")
    failed = _failed_checks(run, stage)
    rows = []
    total = len(names) * sum(map(len, answers.values()))
    with run.progress.step(stage.name, "compare", total=total, unit="answers") as (advance, report):
        done = 0
        for name in names:
            teacher = pool.teacher(name)
            for domain, chosen in answers.items():
                told = prompt_renderer(run, pool, name, [sample for sample, _ in chosen])
                read = [
                    Answer(student=model_input(sample, None), teacher=model_input(sample, told), reward=reward)
                    for sample, reward in chosen
                ]
                comparison = asdict(compare(student, teacher, read, k=topk))
                accuracy_there, checks = _accuracy(run, name, domain), failed.get((name, domain), {})
                rows.append(
                    {"domain": domain, "teacher": name, **comparison, "accuracy": accuracy_there, "failed": checks}
                )
                done += len(chosen)
                advance(done, teacher=name)
        report.facts = {"teachers": str(len(names)), "answers": f"{sum(map(len, answers.values())):,}"}
    return sorted(rows, key=lambda row: (list(answers).index(row["domain"]), list(job.teachers).index(row["teacher"])))


def _rewarded(run: Run, rows: Rows, count: int) -> list[tuple[Scorable, float]]:
    """The first `count` answers that have a reward, with it."""
    rewards = run.store.table("rewards", columns=["sample_row", "reward"])
    value = dict(zip(rewards["sample_row"].to_pylist(), rewards["reward"].to_pylist(), strict=True))
    rewarded = rows[np.isin(rows, rewards["sample_row"].to_numpy())]
    return [(sample, value[sample.sample_row]) for sample in stored_samples(run, rewarded[:count])]


def _failed_checks(run: Run, stage: Stage) -> dict[tuple[str, str], dict[str, str]]:
    """Sentences on the checks that stored signals of a stage fail, by teacher and domain, then check."""
    failed: dict[tuple[str, str], dict[str, str]] = {}
    for row in run.store.sql(SIGNAL_HEALTH).to_pylist():
        if row["stage"] == stage.name:
            of_pair = failed.setdefault((row["teacher"], row["domain"]), {})
            of_pair.update(zip(row["failed"], row["warnings"], strict=True))
    return failed


def _is_there(run: Run, teacher: str) -> bool:
    """Whether a teacher's weights exist here, a folder or what a stage of this job produced, and know the student's
    tokens."""
    if run.job.teachers[teacher].is_remote or run.job.teachers[teacher].tokenizer == "own":
        return False
    names = [name for member in run.job.members_of(teacher) if (name := run.job.teachers[member].stage) is not None]
    stages = {stage.name: stage for stage in run.job.stages}
    return all(name in stages and run.policies.latest(stages[name]) for name in names)


def _accuracy(run: Run, teacher: str, domain: str) -> float | None:
    """Held-out accuracy of the stage that a teacher comes from, where it was evaluated."""
    if (name := run.job.teachers[teacher].stage) is None:
        return None
    return accuracy(run, name, run.policies.latest(run.job.stage(name))).get(domain)
