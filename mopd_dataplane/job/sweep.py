"""A sweep: one job at every combination of some settings, with several seeds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import load_job

_VALUE = re.compile(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""")


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep: an arm with a seed."""

    arm: str
    """Values of the settings that differ between arms, as `learning_rate=1e-3`; `job` where none differ."""
    seed: int
    overrides: tuple[str, ...]
    """Settings of the run, KEY=VALUE each."""
    store: Path
    stages: tuple[str, ...] = ()
    """Stages that it runs, in their order; empty: all of the job."""

    @property
    def label(self) -> str:
        """Name of the run in messages."""
        return f"{self.arm}, seed {self.seed}"


def plan_sweep(
    job: str, settings: Sequence[str], seeds: Sequence[int], folder: Path, *, stage: str | None = None
) -> list[SweepRun]:
    """List the runs of a sweep, arm by arm in the order of the values.

    settings: KEY=VALUE,VALUE… each. A setting with one value holds for every arm and is not part of its name. stage:
    run this stage and those that it needs; None runs all.
    Raises InputError for a setting without values, values or seeds that repeat, and JobFileError for a key or value
    that the job refuses.
    """
    if repeated := _repeated(seeds):
        raise InputError(f"--seeds names {repeated[0]} twice; name every seed once")
    values_by_key = dict(map(_parse, settings))
    if len(values_by_key) < len(settings):
        raise InputError("--set names a key twice; write all of its values in one --set KEY=VALUE,VALUE")
    short_names = _short_names([key for key, values in values_by_key.items() if len(values) > 1])
    runs = []
    for values in product(*values_by_key.values()):
        chosen = dict(zip(values_by_key, values, strict=True))
        arm = ", ".join(f"{name}={chosen[key]}" for key, name in short_names.items()) or "job"
        arm_folder = re.sub(r"[^A-Za-z0-9.+=_-]+", "-", arm).strip("-.")
        overrides = tuple(f"{key}={value}" for key, value in chosen.items())
        for seed in seeds:
            loaded = load_job(job, overrides=[*overrides, f"seed={seed}"])
            stages = needed_stages(loaded, stage) if stage else ()
            store = folder / arm_folder / f"seed-{seed}"
            runs.append(SweepRun(arm=arm, seed=seed, overrides=overrides, store=store, stages=stages))
    if repeated_stores := _repeated([run.store for run in runs]):
        raise InputError(
            f"two arms would share the store {repeated_stores[0]}: a value occurs twice, or two values differ only in "
            "characters that a folder's name does not have; run them as two sweeps with --folder"
        )
    return runs


def needed_stages(job: Job, name: str) -> tuple[str, ...]:
    """A stage and all that it starts from, is taught by or samples with, in the order of the job."""
    needed: set[str] = set()
    new = [job.stage(name)]
    while new:
        stage = new.pop()
        needed.add(stage.name)
        who_samples = [stage.rollout.policy, stage.rollout.rest, *(["routed"] if stage.rollout.teacher_mix else [])]
        samplers = [
            job.sampler_of(stage, who, domain, job.domains[domain].effort)
            for who in who_samples
            for domain in job.domains_of(stage)
        ]
        teachers = [name for name in (*job.scorers_of(stage), *samplers) if name in job.teachers]
        trained = (job.teachers[member].stage for teacher in teachers for member in job.members_of(teacher))
        names = {stage.start, *(name for name in trained if name is not None)} - {"init"}
        new += [job.stage(name) for name in names - needed]
    return tuple(stage.name for stage in job.stages if stage.name in needed)


def split_values(text: str) -> list[str]:
    """Split a list of values at its commas, except inside brackets and quotes.

    >>> split_values("1e-4,3e-4"), split_values('[0.2, 0.28],"a,b"')
    (['1e-4', '3e-4'], ['[0.2, 0.28]', '"a,b"'])
    """
    return [value.strip() for value in _VALUE.findall(text)]


def _parse(setting: str) -> tuple[str, list[str]]:
    """Key and values of KEY=VALUE,VALUE…"""
    key, separator, text = setting.partition("=")
    values = split_values(text)
    if not separator or not values or "" in values or ",," in text or text.strip().endswith(","):
        raise InputError(f"--set takes KEY=VALUE,VALUE…, found {setting!r}; for example train.learning_rate=1e-4,3e-4")
    return key.strip(), values


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Key -> its last part, or the whole key where two keys share their last part."""
    last_parts = [key.rpartition(".")[2] for key in keys]
    return {key: last if last_parts.count(last) == 1 else key for key, last in zip(keys, last_parts, strict=True)}


def _repeated(values: Sequence[object]) -> list[object]:
    return [value for position, value in enumerate(values) if value in values[:position]]
