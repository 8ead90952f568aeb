"""Health of teachers' signals: measured with every scoring pass, recorded, and judged before training."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.records import Signal
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.tasks import HealthKey, Rows
from mopd_dataplane.score.health import Health, ReadSample, measure, merged
from mopd_dataplane.score.health_checks import Evidence, Probe, findings
from mopd_dataplane.score.readers import Scorable

HEALTH = "signal_health"
"""Kind of the events with the figures of a scoring pass: one for each teacher, domain, iteration and version."""
PROBE = "signal_probe"
"""Kind of the events with the probe of one reader: a teacher, or START."""
WARNING = "signal_warning"
"""Kind of the events of failed checks that the stage's output has named."""
START = ""
"""Reader of the probe of the policy that the stage starts from."""


def measure_signals(
    run: Run, teacher: str, samples: Sequence[Scorable], signals: Sequence[Signal]
) -> dict[HealthKey, Health]:
    """Figures of a teacher's log-prob signals, by domain, iteration and policy version."""
    if not signals:
        return {}
    by_row = {sample.sample_row: sample for sample in samples}
    rows = [signal.sample_row for signal in signals]
    about = run.store.take_samples(rows, ["domain", "iteration", "policy_version_first", "finish_reason"]).to_pylist()
    groups: dict[HealthKey, list[ReadSample]] = defaultdict(list)
    for signal, row in zip(signals, about, strict=True):
        sample = by_row[signal.sample_row]
        mask = sample.loss_mask.astype(bool)
        assert signal.logprob is not None
        key = HealthKey(teacher, row["domain"], row["iteration"], row["policy_version_first"])
        groups[key].append(
            ReadSample(
                teacher=signal.logprob[mask],
                student=None if sample.logprobs is None else sample.logprobs[mask],
                entropy=signal.teacher_entropy,
                is_first_choice=signal.is_first_choice,
                has_ended=row["finish_reason"] == "stop" and bool(mask[-1:].all()),
            )
        )
    vocabulary = run.store.teachers()[teacher].vocab_size
    measured = {key: measure(group, vocabulary) for key, group in groups.items()}
    return {key: health for key, health in measured.items() if health is not None}


def record_health(run: Run, stage: Stage, parts: Mapping[HealthKey, Sequence[Health]], rows: Rows) -> None:
    """Record the figures of a scoring pass with the checks that they fail, and show them in one line.

    rows: of `samples`, that the pass scored; the first names the pass.
    """
    if not parts:
        return
    probes = read_probes(run, stage)
    events, failed = [], 0
    pairs: dict[tuple[str, str], list[Health]] = {}
    for key, group in parts.items():
        health = merged(group)
        failing = findings(_evidence(run, stage, key, health, probes))
        figures = asdict(health)
        value = figures.pop("mean_logprob")
        detail = {
            "teacher": key.teacher, "domain": key.domain, "policy_version": key.policy_version, **figures,
            "failed": [asdict(finding) for finding in failing],
        }  # fmt: skip
        name = f"{HEALTH}/{stage.name}/{key.teacher}/{key.domain}/{key.iteration}/v{key.policy_version}/{min(rows)}"
        events.append({
            "event_id": name, "stage": stage.name, "kind": HEALTH, "iteration": key.iteration, "value": value,
            "detail": detail,
        })  # fmt: skip
        failed += len(failing)
        pairs.setdefault((key.teacher, key.domain), []).append(health)
    run.events.add_all(events)
    run.events.commit()  # they are read before the first step
    shown = [_shown(teacher, domain, merged(group)) for (teacher, domain), group in pairs.items()]
    checks = f"{failed} failed checks" if failed else "no check failed"
    run.progress.say(f"{stage.name:<16} health   log p {', '.join(shown)}; {checks}")


def _shown(teacher: str, domain: str, health: Health) -> str:
    """What a pass found of a teacher on a domain, over all iterations that it scored."""
    own = "" if health.student_logprob is None else f" (student {health.student_logprob:.2f})"
    return f"{teacher} on {domain} {health.mean_logprob:.2f}{own}"


def check_health(run: Run, stage: Stage, iteration: int | None) -> None:
    """Act on checks that the signals of a stage fail (of one iteration, or of all), before anything is trained on them.

    Findings about stored samples carry the iterations that these had elsewhere, so all of them count.
    Warns once of each teacher, domain and check. Raises MismatchError with `score.on_unhealthy = "refuse"`.
    """
    failing = _failing(run, stage, iteration)
    if not failing:
        return
    if stage.score.on_unhealthy == "refuse":
        raise MismatchError(
            f"stage {stage.name!r}: {'. '.join(finding['text'] for finding in failing.values())}. "
            f"Nothing was trained on these signals; mend the teacher under a new name, or set "
            f'stages.{stage.name}.score.on_unhealthy = "warn"'
        )
    names = {f"unhealthy/{stage.name}/{'/'.join(key)}": finding for key, finding in failing.items()}
    recorded = set(run.store.table("events", ["event_id"], filter=f"kind = '{WARNING}'")["event_id"].to_pylist())
    for name, finding in names.items():
        if name not in recorded:
            run.progress.say(f"{stage.name:<16} warning  {finding['text']}")
            detail = {"warning": finding["text"], "check": finding["check"], "limit": finding["limit"]}
            run.store.add_event(
                name, stage.name, WARNING, -1 if iteration is None else iteration, finding["value"], detail
            )


def _failing(run: Run, stage: Stage, iteration: int | None) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Stored findings of a stage's present teachers by teacher, domain and check."""
    scorers = set(run.job.scorers_of(stage))
    failing: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in _events(run, stage, HEALTH, None if stage.has_stored_samples else iteration):
        about = json.loads(row["detail"])
        if about["teacher"] in scorers:
            for finding in about["failed"]:
                failing.setdefault((finding["teacher"], finding["domain"], finding["check"]), finding)
    return failing


def read_probes(run: Run, stage: Stage) -> dict[str, dict[str, Probe]]:
    """Probes of a stage by reader and domain."""
    details = [json.loads(row["detail"]) for row in _events(run, stage, PROBE)]
    return {
        about["reader"]: {domain: Probe(**figures) for domain, figures in about["domains"].items()} for about in details
    }


def _evidence(
    run: Run, stage: Stage, key: HealthKey, health: Health, probes: Mapping[str, Mapping[str, Probe]]
) -> Evidence:
    """Collect what is measured of a teacher on a domain.

    It is compared with other readers only where the domain is routed to it, since a reference policy need not lead, and
    not with the policy that the stage starts from if the job says that the teacher is that policy.
    """
    by_reader = {reader: by_domain[key.domain] for reader, by_domain in probes.items() if key.domain in by_domain}
    is_routed = (
        key.teacher in run.job.teachers_of(stage)
        and key.domain in run.job.domains_of(stage)
        and key.teacher == run.job.teacher_of(stage, key.domain, run.job.domains[key.domain].effort)
    )
    is_start = run.job.teachers[key.teacher].source == ("student" if stage.start == "init" else f"stage:{stage.start}")
    rivals = {reader: figures for reader, figures in by_reader.items() if reader not in (START, key.teacher)}
    return Evidence(
        key.teacher, key.domain, health.vocabulary, health, by_reader.get(key.teacher),
        by_reader.get(START) if is_routed and not is_start else None, rivals if is_routed else {},
    )  # fmt: skip


def _events(run: Run, stage: Stage, kind: str, iteration: int | None = None) -> list[dict[str, Any]]:
    """Events of a kind: of one iteration, or of all."""
    rule = f"kind = {literal(kind)} AND stage = {literal(stage.name)}"
    rule += "" if iteration is None else f" AND iteration = {iteration}"
    rows: list[dict[str, Any]] = run.store.table("events", ["detail"], filter=rule).to_pylist()
    return rows
