"""The context of every step of a job: the job, its store, policies and tokenizer, and where to report progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from mopd_dataplane.errors import MismatchError, PromptError, UnknownNameError
from mopd_dataplane.job import sections
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.job.parse import problems_text
from mopd_dataplane.models.hf import load_tokenizer, tokenizer_digest, tokenizer_folder
from mopd_dataplane.models.hub import commit_of, is_hub_name
from mopd_dataplane.prompts import load_prompts, render, render_answer
from mopd_dataplane.records import Change, Prompt
from mopd_dataplane.run.changes import Accept, job_at, refuse_changes, refuse_unrecorded, remember_job
from mopd_dataplane.run.estimate import estimate
from mopd_dataplane.run.event_batch import EventBatch
from mopd_dataplane.run.open_engine import Engines
from mopd_dataplane.run.policies import Policies
from mopd_dataplane.run.preflight import deleted_prompts, preflight, refuse
from mopd_dataplane.run.progress import Progress
from mopd_dataplane.run.provenance import provenance
from mopd_dataplane.run.stage_rows import STAGE_DONE, is_done
from mopd_dataplane.run.work_folder import Work, open_work
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.group_commit.writer import GroupWriter
from mopd_dataplane.store.maintain.deletion_records import prompt_hash
from mopd_dataplane.store.maintain.whole import require_whole
from mopd_dataplane.store.read.decode import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mopd_dataplane.run.tasks import Fleet

Pinned = TypeVar("Pinned", sections.Student, sections.Teacher)
JOB = "job.json"
"""The job as the store remembers it."""
PROVENANCE = "provenance.json"
"""Commit, versions, machine and date of the calls that wrote the store, of each that differs from those before."""


@dataclass(frozen=True)
class Run:
    """One job on one store."""

    job: Job
    store: Store
    policies: Policies
    progress: Progress
    fleet: Fleet | None = None
    """The workers that roll out, score and train, if that is not this process."""
    changes: tuple[Change, ...] = ()
    """Keys of the job that got another value after their stage had begun."""

    @cached_property
    def engines(self) -> Engines:
        """The engines that sample; close() them when the run is over."""
        return Engines(self.job)

    @cached_property
    def events(self) -> EventBatch:
        """Where measurements go that nothing reads before their iteration ends."""
        return EventBatch(self.store)

    @cached_property
    def writer(self) -> Store | GroupWriter:
        """What commits samples and signals: the store itself, or the process that commits for all its writers."""
        if not self.job.group_commit:
            return self.store
        return GroupWriter(self.store.uri, self.store.location.storage_options)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The student's tokenizer; every teacher must share it."""
        return load_tokenizer(self.policies.initial())

    @cached_property
    def tokenizer_digest(self) -> str:
        """Digest that samples and teachers carry."""
        return tokenizer_digest(self.tokenizer)

    @cached_property
    def _decoder(self) -> Decoder | None:
        file = tokenizer_folder(self.policies.initial()) / "tokenizer.json"
        return Decoder(file.read_text()) if file.is_file() else None

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt as the student reads it."""
        return render(prompt.asked, self.tokenizer, template=self.job.student.prompt_template)

    def answer_ids(self, prompt: Prompt, answer: str) -> tuple[list[int], list[int]]:
        """Tokens of a prompt, and of an answer to it as the student would write it. Raises PromptError."""
        return render_answer(prompt.asked, answer, self.tokenizer, template=self.job.student.prompt_template)

    def decode(self, ids: list[int]) -> str:
        """Response text without special tokens: what a verifier reads."""
        if self._decoder is None:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return self._decoder.plain_texts([ids])[0]

    def record_time(
        self, stage: Stage, iteration: int | None, action: str, seconds: float, *, part: int = 1, **detail: str
    ) -> None:
        """Record how long a step of a stage took, or part of one that is done in several, counted from 1."""
        ordinal = -1 if iteration is None else iteration
        name = _time_event(stage, ordinal, action) + (f"/{part}" if part > 1 else "")
        self.events.add(name, stage.name, "stage_time", ordinal, seconds, {"action": action, **detail})

    def has_recorded_time(self, stage: Stage, iteration: int, action: str) -> bool:
        """Check if the time of a step of a stage was recorded."""
        return self.has_event(_time_event(stage, iteration, action))

    def at(self, stage: Stage, window: int) -> tuple[Run, Stage]:
        """Return the run and the stage by the job that a window goes by: itself, unless the job has changed since.

        Another run than this one has engines of its own, to be closed.
        """
        job = job_at(self.job, self.changes, stage.name, window)
        if job is self.job:
            return self, stage
        return replace(self, job=job, policies=Policies(job, self.work)), job.stage(stage.name)

    @property
    def work(self) -> Work:
        """The work folder, where policies, checkpoints, token log and heads are written, and its object store."""
        return self.policies.work

    @property
    def root(self) -> Path:
        """Local folder of all that is no table."""
        return self.work.root

    def is_done(self, stage: Stage) -> bool:
        """Whether a stage has finished, evaluation included."""
        return is_done(self.store, stage)

    def has_event(self, event_id: str) -> bool:
        """Whether an event of that name was recorded."""
        return len(self.store.table("events", columns=["event_id"], filter=f"event_id = '{event_id}'")) > 0

    def mark_done(self, stage: Stage) -> None:
        """Record that a stage has finished with its newest policy version, merged first where the job says so."""
        if stage.train.lora.merge == "end":
            self.policies.merge(stage)
        version = self.policies.latest(stage)
        self.store.add_event(f"done/{stage.name}/v{version}", stage.name, STAGE_DONE, -1, float(version), {})


def open_run(job: Job, progress: Progress, *, create: bool = True, accept: Accept = refuse_changes) -> Run:
    """Open the job's store and write its prompts. With `create`, check everything that the job names first, and create
    the store if there is none.

    accept: decides on changes of a stage that has begun, from a description of them. Raises JobFileError when the job
    cannot run, UnknownNameError when there is no store to go on with, MismatchError for a key that may not change, and
    for changes that are not accepted.
    DamagedError when a table of it, or a file of one, is not there; then nothing was written.
    """
    prompts: dict[str, list[Prompt]] = {}
    if create:
        findings, prompts = preflight(job)
        refuse(job, findings)
        findings += estimate(job, prompts).findings
        refuse(job, findings)
        for finding in findings:
            progress.say(f"{finding.key}: {finding.problem}")
    elif Store.find(job.store) is None:
        raise UnknownNameError(f"no store at {job.store} yet; make it and its samples first: mopd run, or mopd rollout")
    store = Store.create(job.store, single_writer=job.single_writer)
    job = _pinned(job, store)
    run = Run(job, store, Policies(job, open_work(store, job.work)), progress)
    require_whole({name: store.table_handle(name) for name in store.names()})
    run = replace(run, changes=remember_job(run, _remembered(run), accept))
    current = job.model_dump(mode="json")
    if current != store.read_json(JOB):
        store.write_json(JOB, current)
    calls = (store.read_json(PROVENANCE) or {}).get("runs", [])
    this = provenance(job, changes=run.changes)
    if this not in calls:
        store.write_json(PROVENANCE, {"runs": [*calls, this]})
    _ensure_prompts(job, store, prompts)
    return run


def _ensure_prompts(job: Job, store: Store, loaded: Mapping[str, list[Prompt]]) -> None:
    """Write the prompts that the store lacks: those already loaded, else those of the domain's source. Deleted ones
    stay away. Raises MismatchError where the source has other prompts under the names of those that are stored."""
    for name, domain in job.domains.items():
        if domain.source == "store":
            continue
        count = domain.train + domain.eval + domain.tune
        own = f"domain = '{name}' AND split != 'import'"
        stored = store.table("prompts", columns=["prompt_id"], filter=own).num_rows
        if stored >= count or (stored and _lacks_deleted_only(store, name, count - stored)):
            continue
        if stored and domain.tune:
            raise PromptError(
                f"domain {name!r}: the store at {store.uri} holds {stored} prompts, and the job asks for "
                f"{domain.train} train + {domain.eval} eval + {domain.tune} tune. In the source the tuning prompts "
                "come after the training prompts, so more training prompts would be prompts that were used for "
                "tuning: add a new domain, or use another store"
            )
        prompts = loaded[name] if name in loaded else load_prompts(name, domain)
        deleted = store.deletions.prompts()
        store.add_prompts(prompt for prompt in prompts if prompt_hash(prompt.prompt_id) not in deleted)


def _lacks_deleted_only(store: Store, domain: str, missing: int) -> bool:
    """Whether deletions explain why a store has so many prompts of a domain less than the job asks for."""
    recorded = deleted_prompts(store, domain)
    return recorded <= missing <= recorded + store.deletions.prompts_without_slot()


def open_existing(job: Job, progress: Progress) -> Run:
    """Open the store of a job that another process runs; nothing is written.

    Raises UnknownNameError when there is no store, MismatchError as open_run does.
    """
    store = Store.open(job.store)
    job = _pinned(job, store)
    run = Run(job, store, Policies(job, open_work(store, job.work)), progress)
    remembered = _remembered(run)
    return run if remembered is None else replace(run, changes=refuse_unrecorded(run, remembered))


def _remembered(run: Run) -> Job | None:
    """The job that the store remembers; None for a new store. Raises MismatchError when this version cannot read it."""
    dump = run.store.read_json(JOB)
    if dump is None:
        return None
    try:
        return Job.model_validate(dump)
    except ValidationError as error:
        raise MismatchError(
            f"{run.store.uri}/{JOB} holds a job that this version cannot read ({problems_text(error, most=3)}); "
            "continue with the version that made the store, or give another store (--store runs/NAME)"
        ) from None


def _pinned(job: Job, store: Store) -> Job:
    """The job with the commit of every model that it takes from the hub: the one that the store remembers, else the one
    that its revision stands for now. Raises UnknownNameError."""
    before = store.read_json(JOB) or {}
    student = _pin(job.student, job.student.path, before.get("student", {}), "path")
    before_teachers = before.get("teachers", {})
    teachers = {
        name: _pin(one, one.source, before_teachers.get(name, {}), "source") for name, one in job.teachers.items()
    }
    return job.model_copy(update={"student": student, "teachers": teachers})


def _pin(section: Pinned, source: str, before: dict[str, Any], key: str) -> Pinned:
    if not is_hub_name(source):
        return section
    revision = before.get("revision") if before.get(key) == source else None
    if revision and section.revision in ("", revision):
        return section.model_copy(update={"revision": revision})
    return section.model_copy(update={"revision": commit_of(source, section.revision)})


def _time_event(stage: Stage, ordinal: int, action: str) -> str:
    return f"time/{stage.name}/{ordinal}/{action}"
