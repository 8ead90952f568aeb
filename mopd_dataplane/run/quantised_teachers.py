"""Teachers with quantised weights in a run: one precision per name, and the effect of quantisation is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.stage_rows import Rows
from mopd_dataplane.run.teacher_inputs import prompt_renderer, stored_samples
from mopd_dataplane.score.quantisation_effect import quantisation_effect
from mopd_dataplane.score.quantise import quantisation_of
from mopd_dataplane.score.teacher_pool import TeacherPool

ROUNDING_SAMPLES = 32
"""Samples that show what a teacher's quantisation does."""


def check_precision(run: Run, teachers: Iterable[str]) -> None:
    """Refuse stored signals of another precision than the job now says. Raises MismatchError."""
    known = run.store.teachers()
    for teacher in teachers:
        now = quantisation_of(run.job.teachers[member].quantisation for member in run.job.members_of(teacher))
        if teacher in known and known[teacher].quantisation != now:
            raise MismatchError(
                f"the store has signals of teacher {teacher!r} with quantisation {known[teacher].quantisation!r}, the "
                f"job now says {now!r}; go back to that, or give the new teacher another name"
            )


def record_rounding(run: Run, stage: Stage, pool: TeacherPool, work: Iterable[tuple[str, Rows]]) -> None:
    """Measure the effect of quantisation on each quantised teacher, once, before its first signal is stored.

    work: teachers and the rows of `samples` that they will score.
    """
    measured = run.store.table("events", ["event_id"], filter="kind = 'quantisation'")["event_id"].to_pylist()
    for teacher, rows in work:
        for member in run.job.members_of(teacher):
            form = run.job.teachers[member].quantisation
            if form == "none" or f"quantisation/{member}/kl" in measured:
                continue
            samples = [one for one in stored_samples(run, rows[:ROUNDING_SAMPLES]) if one.loss_mask.any()]
            if not samples:
                continue
            effect = quantisation_effect(
                pool, member, samples, stage.score, render_prompt=prompt_renderer(run, teacher, samples)
            )
            facts = asdict(effect)
            detail = {"teacher": member, "quantisation": form, "samples": len(samples), "tokens": facts.pop("tokens")}
            for name, value in reversed(facts.items()):  # kl comes last: where it is, all are
                event = f"quantisation/{member}/{name}"
                run.store.add_event(event, stage.name, "quantisation", -1, value, {**detail, "measure": name})
                measured.append(event)
