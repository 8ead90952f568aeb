"""Changes of a job whose store has begun: what a new value may do, what has to be accepted, and which job each window
of a stage goes by.

The store remembers the newest job. The table `changes` has each key that changed under a stage, with the first
iteration of the new value. The job of an earlier window is the newest one with those values put back.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.changes import Difference, concerns, differences, put
from mopd_dataplane.job.check import check_references
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.learning_rate import learning_rate
from mopd_dataplane.job.section import ChangeClass
from mopd_dataplane.records import Change
from mopd_dataplane.run.conditions import named_conditions_of
from mopd_dataplane.run.stage_rows import is_done, stage_samples
from mopd_dataplane.run.token_log_copy import has_unfinished
from mopd_dataplane.store.commit.changes import add_changes, read_changes

if TYPE_CHECKING:
    from mopd_dataplane.run.policies import Policies
    from mopd_dataplane.run.progress import Progress
    from mopd_dataplane.run.work_folder import Work
    from mopd_dataplane.store.dataset import Store

Accept = Callable[[str], bool]
"""Asked with a description of the changes that need to be accepted; returns whether they are."""
ALWAYS_FIXED = ("seed", "student", "domains")
"""Tables whose fixed keys are fixed from the first write of the store on; others from a stage's first training on."""
READ_BY_TRAINING = ("train", "plan", "iterations", "objectives")
"""Keys of a stage, and tables of the job, that a window reads only when it is planned and trained."""
SPIKE = "spike"
"""Kind of the event of a window whose training stopped at a spike."""
FROM_HERE_OPTION = "--from-here"
"""Option of `mopd run` that accepts changes."""
LONGEST_VALUE = 80


class OpenedRun(Protocol):
    """A run whose job is compared with the one that its store remembers."""

    @property
    def job(self) -> Job: ...

    @property
    def store(self) -> Store: ...

    @property
    def policies(self) -> Policies: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def work(self) -> Work: ...


def command_line() -> str:
    """The command line of this process, without secrets."""
    program = Path(sys.argv[0])
    name = "mopd" if program.name == "__main__.py" else program.name
    return redacted(shlex.join([name, *sys.argv[1:]]))


def job_at(job: Job, changes: Sequence[Change], stage: str, window: int) -> Job:
    """The job that a window of a stage goes by: the newest one, with later changes put back."""
    later = [change for change in _accepted(changes, stage) if change.iteration > window]
    if not later:
        return job
    dump = job.model_dump(mode="json")
    for change in reversed(later):
        put(dump, change.key, json.loads(change.before))
    return Job.model_validate(dump)


def in_force(changes: Sequence[Change], stage: str, window: int) -> dict[str, Any]:
    """Changed keys with their values in a window of a stage: what its plan records."""
    return {change.key: json.loads(change.after) for change in _accepted(changes, stage) if change.iteration <= window}


def next_change(changes: Sequence[Change], stage: str, window: int) -> int | None:
    """First window after this one that goes by another job; None when there is none."""
    return min((change.iteration for change in _accepted(changes, stage) if change.iteration > window), default=None)


def last_change(changes: Sequence[Change], stage: str, window: int) -> int:
    """First window that goes by the same job as this one."""
    return max((change.iteration for change in _accepted(changes, stage) if change.iteration <= window), default=0)


def _accepted(changes: Sequence[Change], stage: str) -> list[Change]:
    return [change for change in changes if change.stage == stage and change.change_class == ChangeClass.FROM_HERE]


class UnrecordedChange(MismatchError):
    """A job differs from the one that its store remembers in keys that nobody has accepted yet."""


def refuse_changes(description: str) -> bool:
    """Accept no change."""
    return False


@dataclass(frozen=True)
class _Pending:
    """Changes between the remembered job and the new one that are not recorded yet."""

    changes: list[Change]
    questions: list[Change]
    """Those that have to be accepted."""


def remember_job(run: OpenedRun, remembered: Job | None, accept: Accept) -> tuple[Change, ...]:
    """Compare the run's job with the one that the store remembers, record what changed, and remember the new job.

    Returns all recorded changes. Raises MismatchError, with nothing written, for a fixed key that differs, and for
    changes that are not accepted.
    """
    recorded = read_changes(run.store)
    if remembered is not None:
        pending = _pending(run, remembered, recorded)
        if pending.questions:
            text = "\n".join(_question(run, remembered, change) for change in pending.questions)
            if not accept(text):
                raise MismatchError(
                    f"store {run.store.uri} was made with other values, and has trained:\n{text}\n"
                    "go back to those values, accept the change for what is still to come (mopd run JOB --from-here), "
                    "or give another store (--store runs/NAME)"
                )
        _check_jobs(run, [*recorded, *pending.changes])
        add_changes(run.store, pending.changes)
        for change in pending.changes:
            when = "at once" if change.change_class == ChangeClass.FREE else f"from iteration {change.iteration}"
            run.progress.say(f"{change.stage:<16} change   {_short(change.text)}, {when}")
        recorded += pending.changes
    return tuple(recorded)


def refuse_unrecorded(run: OpenedRun, remembered: Job) -> tuple[Change, ...]:
    """Recorded changes of a store that another process writes. Raises UnrecordedChange."""
    recorded = read_changes(run.store)
    pending = _pending(run, remembered, recorded)
    if pending.questions:
        text = "; ".join(_short(change.text) for change in pending.questions)
        raise UnrecordedChange(
            f"store {run.store.uri} goes by other values ({text}); accept them: mopd run JOB --from-here"
        )
    return tuple(recorded)


def _pending(run: OpenedRun, remembered: Job, recorded: Sequence[Change]) -> _Pending:
    """Raises MismatchError for a fixed key that differs, and for a change that its stage cannot take."""
    changed_keys = differences(remembered, run.job)
    for difference in changed_keys:
        if difference.change_class == ChangeClass.FIXED and difference.parts[0] in ALWAYS_FIXED:
            raise _fixed(run, difference)
    pending = _Pending([], [])
    names = {stage.name for stage in remembered.stages}
    for stage in run.job.stages:
        if stage.name not in names or not has_begun(run, stage):
            continue
        before = remembered.stage(stage.name)
        same_questions = named_conditions_of(run.job, stage) == named_conditions_of(remembered, before)
        own = [one for one in changed_keys if concerns(one, stage, run.job) or concerns(one, before, remembered)]
        for difference in own:
            if difference.key == "questions" and same_questions:
                continue
            if difference.change_class == ChangeClass.FIXED and difference.parts[0] not in ALWAYS_FIXED:
                raise _fixed(run, difference)
            change = _change_of(run, stage, difference, len(recorded) + len(pending.changes))
            if _is_recorded(change, recorded):
                continue
            _add(run, before, stage, change, pending)
    return pending


def _add(run: OpenedRun, before: Stage, stage: Stage, change: Change, pending: _Pending) -> None:
    """Add a change of a stage to those that are pending, and to the questions where it needs to be accepted."""
    finished = is_done(run.store, stage)
    if change.change_class == ChangeClass.FREE:
        if not finished:
            pending.changes.append(change)
        return
    extends = change.key == f"stages.{stage.name}.iterations" and stage.iterations > before.iterations
    if extends:
        _refuse_extension(run, stage)
    if stage.concurrent and not finished:
        raise MismatchError(
            f"store {run.store.uri} has begun concurrent stage {stage.name!r} with another value of a key "
            f"({_short(change.text)}); its rollout and its training are at different iterations, so only free keys may "
            "change; go back to that value, or give another store (--store runs/NAME)"
        )
    pending.changes.append(change)
    has_no_end = stage.train.schedule == before.train.schedule == "constant"
    if not (extends and has_no_end) and (change.key.startswith("stages.") or not finished):
        pending.questions.append(change)


def _refuse_extension(run: OpenedRun, stage: Stage) -> None:
    """Raise MismatchError when stages that have begun stand on the last policy of a stage."""
    for other in run.job.stages:
        teachers = [run.job.teachers[name].stage for name in run.job.scorers_of(other)]
        if has_begun(run, other) and stage.name in (other.start, *teachers):
            raise MismatchError(
                f"stages.{stage.name}.iterations = {stage.iterations}: stage {other.name!r} has begun with the last "
                f"policy of {stage.name!r}, which more iterations would replace; go back to "
                f"{run.policies.latest(stage)}, or give another store (--store runs/NAME)"
            )


def has_begun(run: OpenedRun, stage: Stage) -> bool:
    """Whether a stage has trained, a part of its first window at least."""
    if run.policies.has_begun(stage) or run.work.published(f"checkpoints/{stage.name}"):
        return True
    return _has_failed(run, stage, 0)


def _change_of(run: OpenedRun, stage: Stage, difference: Difference, ordinal: int) -> Change:
    is_free = difference.change_class == ChangeClass.FREE
    return Change(
        ordinal=ordinal,
        stage=stage.name,
        iteration=run.policies.latest(stage) if is_free else _boundary(run, stage, difference),
        key=difference.key,
        before=json.dumps(difference.before, sort_keys=True),
        after=json.dumps(difference.after, sort_keys=True),
        change_class=difference.change_class.value,
        command=command_line(),
    )


def _is_recorded(change: Change, recorded: Sequence[Change]) -> bool:
    """Whether a run that was killed before it remembered the new job has recorded the change already."""
    same = [other for other in recorded if (other.stage, other.key) == (change.stage, change.key)]
    return bool(same) and replace(same[-1], ordinal=change.ordinal, command=change.command) == change


def _boundary(run: OpenedRun, stage: Stage, difference: Difference) -> int:
    """The first iteration of a stage that has not begun to read a key.

    A window whose training stopped at a spike counts as not planned: it is planned and trained again.
    """
    window = run.policies.latest(stage)
    is_planned = run.store.plan(stage.name, window) is not None
    table = difference.parts[2] if difference.parts[0] == "stages" else difference.parts[0]
    if table in READ_BY_TRAINING:
        return window + (is_planned and not _has_failed(run, stage, window))
    return window + (is_planned or _is_sampled(run, stage, window))


def _has_failed(run: OpenedRun, stage: Stage, window: int) -> bool:
    filter_text = f"kind = '{SPIKE}' AND stage = '{stage.name}' AND iteration = {window}"
    return len(run.store.table("events", ["event_id"], filter=filter_text)) > 0


def _is_sampled(run: OpenedRun, stage: Stage, window: int) -> bool:
    """Whether an iteration has samples, finished or not."""
    if stage.data != "rollout":
        return False
    return len(stage_samples(run.store, stage, window, ["stage"])[0]) > 0 or has_unfinished(run.work, stage.name)


def _check_jobs(run: OpenedRun, changes: Sequence[Change]) -> None:
    """Raise JobFileError when some window would go by a job that contradicts itself."""
    for stage in run.job.stages:
        window = run.policies.latest(stage)
        while (until := next_change(changes, stage.name, window)) is not None:
            where = f"iteration {window} of stage {stage.name!r}, which has begun"
            check_references(job_at(run.job, changes, stage.name, window), where)
            window = until


def _fixed(run: OpenedRun, difference: Difference) -> MismatchError:
    before, after = difference.before, difference.after
    return MismatchError(
        f"store {run.store.uri} was made with {difference.key} = {before!r}, the job now says {after!r}; this key is "
        f"fixed: {difference.fixed_because}; go back to that value, or give another store (--store runs/NAME)"
    )


def _question(run: OpenedRun, remembered: Job, change: Change) -> str:
    """A change with its first iteration, and what it does to a learning rate that ends."""
    stage = run.job.stage(change.stage)
    left = stage.iterations - change.iteration
    when = f"from iteration {change.iteration} on" if left > 0 else "no iteration is left"
    line = f"  {change.stage}: {_short(change.text)} ({when})"
    if change.key.startswith(f"stages.{stage.name}.") and left > 0 and stage.train.schedule != "constant":
        return f"{line}{_shape(run, remembered.stage(stage.name), stage, change.iteration)}"
    return line


def _shape(run: OpenedRun, before: Stage, stage: Stage, iteration: int) -> str:
    """The learning rate before and after a change under a schedule that ends; empty where steps are not known."""
    first = run.store.plan(stage.name, 0)
    if first is None:
        return ""
    step, per_window = run.store.steps_before(stage.name, iteration), len(first.step_starts) - 1
    end = step + per_window * (stage.iterations - iteration)
    old_end = per_window * before.iterations
    rates = [
        learning_rate(before.train, max(step - 1, 0), max(old_end, 1)),
        learning_rate(stage.train, step, end),
        learning_rate(stage.train, max(end - 1, 0), end),
    ]
    return (
        f"\n    learning rate ({stage.train.schedule}): {rates[0]:.3g} at step {max(step - 1, 0)}, then {rates[1]:.3g} "
        f"at step {step}, down to {rates[2]:.3g} at step {end - 1}, the last"
    )


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE * 2 else f"{text[: LONGEST_VALUE * 2]}…"
