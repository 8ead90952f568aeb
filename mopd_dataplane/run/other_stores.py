"""Other stores whose samples a stage of a job trains on: whether they can be read, and their conditions answered."""

from __future__ import annotations

from collections.abc import Iterator

from mopd_dataplane.errors import MopdError, require_known
from mopd_dataplane.job.further_samples import SourceStore
from mopd_dataplane.job.job import Job
from mopd_dataplane.records import Snapshot
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.rollouts.conditions import Conditions, job_questions


def open_source(job: Job, entry: SourceStore) -> Store:
    """Open a store of `data.from`, to read it. Raises UnknownNameError when it is not there."""
    return Store.open(entry.store or job.store)


def source_problems(job: Job) -> Iterator[tuple[str, str]]:
    """(key of the job file, problem) for every store of `data.from` that cannot be read, or not with its condition."""
    for stage in job.stages:
        for number, entry in enumerate(stage.sources):
            key = f"stages.{stage.name}.data.from.{number}"
            if entry.store in ("", job.store):
                continue
            try:
                source = open_source(job, entry)
                at = source.snapshot()
                if entry.where:
                    conditions_there(job, source, at).rows(entry.where, "where")
                check_stage(source, entry, at)
            except MopdError as error:
                yield key, str(error)


def conditions_there(job: Job, source: Store, at: Snapshot) -> Conditions:
    """Samples of another store, for conditions that may name questions of its job and of this one."""
    return Conditions(source, at, {**job_questions(source), **job.questions})


def check_stage(source: Store, entry: SourceStore, at: Snapshot) -> None:
    """Refuse the name of a stage of which a store has no sample. Raises UnknownNameError."""
    if entry.stage:
        stages = source.table("samples", ["stage"], snapshot=at)["stage"].unique().to_pylist()
        require_known(entry.stage, sorted(stages), f"{source.uri} has no sample of stage")
