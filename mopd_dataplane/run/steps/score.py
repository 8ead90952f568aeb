"""Teachers' signals of stored samples. Only missing ones are computed, and no two precisions under one name."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.base.memory import explain_out_of_memory
from mopd_dataplane.base.stats_choice import keeps_stats
from mopd_dataplane.errors import JobFileError, MismatchError
from mopd_dataplane.fields import ALIGNMENT, PAYLOAD, column_names, of_signal, value
from mopd_dataplane.job import memory_advice
from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.devices import free_device_memory, resolve_device
from mopd_dataplane.models.hf import weights_digest
from mopd_dataplane.records import Signal
from mopd_dataplane.run.check_texts import check_texts
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.exactness import has_self_check, record_self_check
from mopd_dataplane.run.stage_rows import UNREADABLE, Rows, chunks, event_rows, stage_samples
from mopd_dataplane.run.steps.link import take_signals
from mopd_dataplane.run.steps.probe_teachers import probe_start, probe_teacher
from mopd_dataplane.run.steps.server_identity import check_teacher_server
from mopd_dataplane.run.steps.signal_health import check_health, measure_signals, record_health
from mopd_dataplane.run.steps.teacher_prompts import prompt_renderer
from mopd_dataplane.run.tasks import HealthKey, ScoredTask, ScoreTask
from mopd_dataplane.score.engines import LOGPROB_READS, SCORING
from mopd_dataplane.score.health import Health
from mopd_dataplane.score.quantise import quantisation_of
from mopd_dataplane.score.readers import Scorable
from mopd_dataplane.score.scorer import score_samples
from mopd_dataplane.score.server_use import ServerUse
from mopd_dataplane.score.signal_kinds import StudentTopk
from mopd_dataplane.score.teacher_comparison import quantisation_effect
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
from mopd_dataplane.store.read.decode import keep_tokenizer

ROUNDING_SAMPLES = 32
"""Samples that show what a teacher's quantisation does."""
ALWAYS = ("logprob",)
"""Stored for every rollout: four bytes a token, and what `mopd show` and the report say of a teacher comes from it."""


def score(run: Run, stage: Stage, *, iteration: int | None = None, pool: TeacherPool | None = None) -> dict[str, float]:
    """Compute and commit every missing signal of a stage's samples (of one iteration, or of all).

    pool: that of `register_teachers`, whose teachers then stay in memory; default one for this call.
    Returns {"signals": count, "loss_tokens": count}. Raises MismatchError before anything is written when a teacher's
    tokenizer, weights or quantisation do not fit, and after scoring when `score.on_unhealthy` refuses a signal.
    """
    check_precision(run, stage)
    if any(run.job.teachers[name].follows for name in run.job.scorers_of(stage)):
        if pool is not None or run.fleet is not None:
            raise JobFileError(
                f"stage {stage.name!r} has a teacher that follows the policy, and neither --ray nor --queue can score "
                "by it; run it without them, or set follows = 0"
            )
        if iteration is None:
            return _score_by_iteration(run, stage)
    if stage.sources and _missing(run, stage, iteration):
        with closing(register_teachers(run, stage)):
            take_signals(run, stage)
    work = _missing(run, stage, iteration)
    total = sum(len(rows) for rows in work.values())
    counts = {"signals": 0.0, "loss_tokens": 0.0}
    if not total:
        check_health(run, stage, iteration)
        return counts
    free_device_memory()
    probe_start(run, stage)
    keeps_teachers = pool is not None
    pool = pool or register_teachers(run, stage, iteration)
    record_followed(run, stage, iteration)
    tasks = [
        ScoreTask(teacher, tuple(kinds), chunk)
        for teacher in dict.fromkeys(teacher for teacher, _ in work)
        for kinds, rows in _same_rows({kind: rows for (name, kind), rows in work.items() if name == teacher})
        for chunk in chunks(rows)
    ]
    record_rounding(run, stage, pool, tasks)
    parts: dict[HealthKey, list[Health]] = defaultdict(list)
    uses: dict[str, ServerUse] = defaultdict(ServerUse)
    step = run.progress.step(stage.name, "score", total=total, unit="signals")
    with nullcontext() if keeps_teachers else closing(pool), step as (advance, report):

        def count(scored: ScoredTask) -> None:
            counts["signals"] += scored.signals
            counts["loss_tokens"] += scored.loss_tokens
            for key, health in scored.health.items():
                parts[key].append(health)
            if scored.use.requests:
                uses[scored.teacher] = uses[scored.teacher].plus(scored.use)
            advance(int(counts["signals"]), teacher=scored.teacher)

        if run.fleet is not None:
            run.fleet.score(stage, tasks, count)
        else:
            student = student_topk(run, stage)
            for task in tasks:
                if not set(run.job.members_of(task.teacher)) <= set(pool.resident):
                    advance(int(counts["signals"]), now=_loading(run, stage, task.teacher))
                count(score_task(run, stage, pool, student, task))
        kinds = "+".join(dict.fromkeys(kind for _, kind in work))
        report.facts = {"signals": f"{int(counts['signals']):,}", "kinds": kinds} | {
            teacher: str(use) for teacher, use in uses.items()
        }
    run.record_time(stage, iteration, "score", report.seconds)
    record_health(run, stage, parts, np.concatenate([task.rows for task in tasks]))
    check_health(run, stage, iteration)
    return counts


def record_followed(run: Run, stage: Stage, iteration: int | None) -> None:
    """Record which policy each teacher that follows has in an iteration."""
    for name in run.job.scorers_of(stage):
        if iteration is not None and run.job.teachers[name].follows:
            version = run.policies.followed(name, stage, iteration)
            digest = weights_digest(run.policies.teacher(name, stage, iteration))
            event, detail = f"followed/{stage.name}/{name}/{iteration}", {"teacher": name, "weights_digest": digest}
            run.store.add_event(event, stage.name, "followed", iteration, float(version), detail)


def _score_by_iteration(run: Run, stage: Stage) -> dict[str, float]:
    """Score the samples of each iteration by the weights that a following teacher has in it."""
    _, samples = stage_samples(run.store, stage, None, ["iteration"])
    counts = {"signals": 0.0, "loss_tokens": 0.0}
    for iteration in sorted(set(samples["iteration"].to_pylist())):
        for name, count in score(run, stage, iteration=iteration).items():
            counts[name] += count
    return counts


def _loading(run: Run, stage: Stage, teacher: str) -> str:
    """Progress text while a teacher is being loaded."""
    members = run.job.members_of(teacher)
    folders = [Path(run.policies.teacher(member, stage)) for member in members if not run.job.teachers[member].url]
    return run.progress.describe_wait(stage.name, f"loading teacher {teacher}", folders)


def register_teachers(run: Run, stage: Stage, iteration: int | None = None) -> TeacherPool:
    """The teachers a stage routes to (and the reference policy of its objective), checked and known to the store.

    iteration: of the samples that are scored, for teachers that follow the policy. Raises MismatchError, with nothing
    written, when a tokenizer or a digest does not fit.
    """
    pool = teacher_pool(run, stage, iteration=iteration)
    for teacher in run.job.scorers_of(stage):
        settings = run.job.teachers[teacher]
        identity = check_teacher_server(run, stage, pool, teacher) if settings.url and _reads_logprobs(stage) else ""
        if settings.is_remote:
            run.store.add_teacher(pool.record_without_head(teacher, settings.url, identity))
            continue
        if settings.follows:
            source = f"the policy of the stage, every {settings.follows} iterations, average {settings.average:g}"
            run.store.add_teacher(pool.record_without_head(teacher, source))
            continue
        has_head = run.work.fetch_file(pool.head_file(teacher))
        record = pool.register(teacher, run.root)
        if own := pool.own_tokenizer(teacher):
            keep_tokenizer(run.store, record.tokenizer_digest, own.description, of_teacher=True)
        if not has_head:
            run.work.publish_file(record.head_file)
        run.store.add_teacher(record)
    return pool


def _reads_logprobs(stage: Stage) -> bool:
    return not SCORING[stage.score.engine].here and stage.score.reads in LOGPROB_READS


def check_precision(run: Run, stage: Stage) -> None:
    """Refuse stored signals of another precision than the job now says. Raises MismatchError."""
    teachers = run.store.teachers()
    for teacher in run.job.scorers_of(stage):
        now = quantisation_of(run.job.teachers[member].quantisation for member in run.job.members_of(teacher))
        if teacher in teachers and teachers[teacher].quantisation != now:
            raise MismatchError(
                f"the store has signals of teacher {teacher!r} with quantisation {teachers[teacher].quantisation!r}, "
                f"the job now says {now!r}; go back to that, or give the new teacher another name"
            )


def record_rounding(run: Run, stage: Stage, pool: TeacherPool, tasks: Sequence[ScoreTask]) -> None:
    """Measure the effect of quantisation on each quantised teacher, once, before its first signal is stored."""
    measured = run.store.table("events", ["event_id"], filter="kind = 'quantisation'")["event_id"].to_pylist()
    for task in tasks:
        for member in run.job.members_of(task.teacher):
            form = run.job.teachers[member].quantisation
            if form == "none" or f"quantisation/{member}/kl" in measured:
                continue
            samples = [one for one in stored_samples(run, task.rows[:ROUNDING_SAMPLES]) if one.loss_mask.any()]
            if not samples:
                continue
            reads = prompt_renderer(run, pool, task.teacher, samples)
            facts = asdict(quantisation_effect(pool, member, samples, stage.score, render_prompt=reads))
            detail = {"teacher": member, "quantisation": form, "samples": len(samples), "tokens": facts.pop("tokens")}
            for measure, amount in reversed(facts.items()):  # kl comes last: where it is, all are
                event = f"quantisation/{member}/{measure}"
                run.store.add_event(event, stage.name, "quantisation", -1, amount, {**detail, "measure": measure})
                measured.append(event)


def teacher_pool(
    run: Run, stage: Stage, teachers: Sequence[str] = (), *, engine: Literal["hf", "vllm"] | None = None,
    iteration: int | None = None,
) -> TeacherPool:  # fmt: skip
    """Teachers as a stage scores with them, and those they are blends of; none is loaded yet.

    teachers: default those that score the stage's samples. engine: what runs them; default the job's. iteration: as for
    `register_teachers`.
    """
    teachers = teachers or run.job.scorers_of(stage)
    names = dict.fromkeys([*teachers, *(member for teacher in teachers for member in run.job.members_of(teacher))])
    specs = {}
    for name in names:
        settings = run.job.teachers[name]
        has_folder = not settings.blend and not settings.is_remote
        specs[name] = TeacherSpec(run.policies.teacher(name, stage, iteration) if has_folder else None, settings)
    return TeacherPool(
        specs,
        student_tokenizer=run.tokenizer,
        max_resident=stage.score.max_resident,
        device=resolve_device(stage.score.device),
        engine=engine or stage.score.engine,
        reads=stage.score.reads,
        options=stage.score.options,
        check_texts=partial(_check_texts, run, stage),
    )


def _check_texts(run: Run, stage: Stage, teacher: str) -> Sequence[NDArray[np.int64]]:
    """Texts that the self-check of a teacher reads; none once it has passed, or in tokens that are not its own."""
    has_passed = has_self_check(run.store, stage.name, "teacher", teacher=teacher)
    return () if has_passed or run.job.teachers[teacher].tokenizer == "own" else check_texts(run, stage)


def student_topk(run: Run, stage: Stage) -> StudentTopk:
    """The policies that sampled, for signals on their likeliest tokens."""
    return StudentTopk(
        lambda version: run.policies.folder(stage, version),
        dtype=run.job.student.dtype,
        device=resolve_device(stage.score.device),
    )


def score_task(run: Run, stage: Stage, pool: TeacherPool, student: StudentTopk, task: ScoreTask) -> ScoredTask:
    """Compute and commit the signals of one task; those the store has already are left alone."""
    with explain_out_of_memory(f"stage {stage.name!r}: scoring by {task.teacher!r}", memory_advice.for_scoring(stage)):
        return _score_task(run, stage, pool, student, task)


def _score_task(run: Run, stage: Stage, pool: TeacherPool, student: StudentTopk, task: ScoreTask) -> ScoredTask:
    use_before = pool.server_use
    probe_teacher(run, stage, pool, task.teacher)
    samples = list(stored_samples(run, task.rows))
    if run.job.teachers[task.teacher].unknown_tokens == "mask":
        samples = _readable(run, stage, task.teacher, samples, pool)
    reads = prompt_renderer(run, pool, task.teacher, samples)
    by_kind: dict[str, list[Signal]] = {kind: [] for kind in task.kinds}
    produced = score_samples(pool, task.teacher, task.kinds, samples, stage.score, render_prompt=reads, student=student)
    for signal in produced:
        by_kind[signal.kind].append(signal)
    new = positions = 0
    for kind, signals in by_kind.items():
        # Before their signals: a run killed in between scores these samples again, and finds the statistics there.
        write_token_stats(run.store, _stats(stage, task.teacher, signals))
        new += run.writer.commit_signals(task.teacher, kind, signals)
        positions += sum(len(value(signal, of_signal(kind)[0].name)) for signal in signals)
    for member in run.job.members_of(task.teacher):
        if passed := pool.self_check(member):
            record_self_check(run.store, stage.name, "teacher", passed, teacher=member)
    health = measure_signals(run, task.teacher, samples, by_kind.get("logprob", []))
    return ScoredTask(task.teacher, new, positions, health, pool.server_use.minus(use_before))


def _readable(run: Run, stage: Stage, teacher: str, samples: Sequence[Scorable], pool: TeacherPool) -> list[Scorable]:
    """The samples that the teacher can read: without a token that it does not know, or in its own tokens. The others
    are recorded."""
    readable, events = [], []
    unknown, own = pool.unknown_tokens(teacher), pool.own_tokenizer(teacher)
    for sample in samples:
        strange = sorted(unknown.keys() & set(sample.tokens.tolist()))
        reason = own.problem(sample) if own else ""
        if strange:
            reason = f"teacher {teacher!r} does not know token {unknown[strange[0]]!r} ({strange[0]})"
        if not reason:
            readable.append(sample)
            continue
        detail = {"uid": sample.uid, "rows": [sample.sample_row], "teacher": teacher, "reason": reason}
        events.append({
            "event_id": f"{UNREADABLE}/{teacher}/{sample.uid}", "stage": stage.name, "kind": UNREADABLE,
            "iteration": -1, "value": None, "detail": detail,
        })  # fmt: skip
    run.store.add_events(events)
    return readable


def _stats(stage: Stage, teacher: str, signals: Sequence[Signal]) -> list[TokenStats]:
    """Entropies of the teacher, of the samples that keep statistics."""
    is_kept = keeps_stats(stage.score.stats, [signal.sample_row for signal in signals])
    return [
        TokenStats(
            sample_row=signal.sample_row, stage=stage.name, teacher=teacher,
            values={"teacher_entropy": signal.teacher_entropy},
        )
        for signal, keep in zip(signals, is_kept, strict=True) if keep and signal.teacher_entropy is not None
    ]  # fmt: skip


def signal_kinds(run: Run, stage: Stage) -> tuple[str, ...]:
    """Kinds of signals that the teachers of a stage's domains store; empty when it needs none."""
    kinds = (*run.job.objective(stage).signals, *stage.score.signals)
    return tuple(dict.fromkeys(kinds if stage.data == "reference" or not kinds else (*kinds, *ALWAYS)))


def _missing(run: Run, stage: Stage, iteration: int | None) -> dict[tuple[str, str], Rows]:
    """Rows of `samples` that lack a signal the objective needs, by (teacher, kind)."""
    rows, samples = stage_samples(run.store, stage, iteration, ["domain", "effort"])
    rows_by_signal: dict[tuple[str, str], Rows] = {}
    if kinds := signal_kinds(run, stage):
        pairs = list(zip(samples["domain"].to_pylist(), samples["effort"].to_pylist(), strict=True))
        routed = np.array([run.job.teacher_of(stage, *pair) for pair in pairs])
        rows_by_signal = {
            (t, kind): rows[routed == t]
            for t in run.job.teachers_of(stage)
            for kind in (*([ALIGNMENT] if run.job.teachers[t].tokenizer == "own" else []), *kinds)
        }
    rows_by_signal |= {(teacher, "logprob"): rows for teacher in run.job.others_of(stage)}
    missing = {key: run.store.missing_signals(*key, candidates) for key, candidates in rows_by_signal.items()}
    masks = any(run.job.teachers[teacher].unknown_tokens == "mask" for teacher, _ in rows_by_signal)
    unreadable = event_rows(run.store, stage, UNREADABLE) if masks else np.empty(0, np.int64)
    missing = {key: rows[~np.isin(rows, unreadable)] for key, rows in missing.items()}
    return {key: rows for key, rows in missing.items() if len(rows)}


def _same_rows(work: dict[str, Rows]) -> list[tuple[list[str], Rows]]:
    """Kinds that miss exactly the same rows share one forward pass."""
    groups: dict[bytes, tuple[list[str], Rows]] = {}
    for kind, rows in work.items():
        groups.setdefault(rows.tobytes(), ([], rows))[0].append(kind)
    return list(groups.values())


def stored_samples(run: Run, rows: Rows) -> Iterator[Scorable]:
    """Rows of `samples` as a teacher takes them."""
    metadata = run.store.take_samples(rows, ["uid", "prompt_id", "prompt_len", "temperature"])
    payload = run.store.read_tokens(rows, columns=column_names(PAYLOAD))
    for index, row in enumerate(rows.tolist()):
        logprobs = payload["logprobs"][index]
        yield Scorable(
            uid=metadata["uid"][index].as_py(),
            sample_row=row,
            prompt_id=metadata["prompt_id"][index].as_py(),
            prompt_len=metadata["prompt_len"][index].as_py(),
            tokens=_array(payload["tokens"][index]),
            loss_mask=_array(payload["loss_mask"][index]),
            versions=_token_versions(payload, index),
            logprobs=_array(logprobs) if logprobs.is_valid else None,
            temperature=metadata["temperature"][index].as_py(),
        )


def _token_versions(payload: pa.Table, index: int) -> NDArray[np.int32]:
    """[R] policy version of each response token, from its spans."""
    starts, versions = _array(payload["version_starts"][index]), _array(payload["versions"][index])
    return np.repeat(versions, np.diff(starts, append=len(payload["loss_mask"][index])))


def _array(values: pa.ListScalar) -> NDArray[Any]:
    array: NDArray[Any] = values.values.to_numpy(zero_copy_only=True)
    return array
