"""Checks everything that a job names, before anything is made.

    findings, prompts = preflight(job)
    refuse(job, findings) raises for what is certain to fail; estimates are only printed

Only what is missing is checked: a student that was made and prompts that a store holds are not looked at again.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mopd_dataplane.base.extras import is_installed
from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.errors import InputError, JobFileError, MopdError
from mopd_dataplane.fields import PACK_KINDS
from mopd_dataplane.job.check import sampling_teachers
from mopd_dataplane.job.job import Job, Stage
from mopd_dataplane.models.adapter_files import is_adapter
from mopd_dataplane.models.chat_template import thought_ids
from mopd_dataplane.models.checkpoint_quantisation import check_readable, check_trainable
from mopd_dataplane.models.devices import resolve_device
from mopd_dataplane.models.hf import check_model_folder, load_tokenizer
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import check_config, given_tokenizer
from mopd_dataplane.models.vocabulary import compare_vocabularies
from mopd_dataplane.prompts import load_prompts, render
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.kinds import engine_kind
from mopd_dataplane.rollout.tools.environments import make_environment
from mopd_dataplane.run.adapter_check import adapter_problems, check_adapter
from mopd_dataplane.run.conditions import condition_problems
from mopd_dataplane.run.environments import environments_of
from mopd_dataplane.run.other_stores import source_problems
from mopd_dataplane.run.prompt_lengths import prompt_problems
from mopd_dataplane.score.engines import LOGPROB_READS, SCORING
from mopd_dataplane.score.own_tokens import OwnTokenizer
from mopd_dataplane.score.reward import resolve_reward
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.metrics import TRACKERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
EXCERPT = 60
"""Characters of a prompt that a finding shows of either end."""


@dataclass(frozen=True)
class Finding:
    """Something about a job that will not work, or may not."""

    key: str
    """Key of the job file, dotted, as `teachers.math.source`."""
    problem: str
    """What was found, what is allowed, and the next step."""
    certain: bool = True
    """Whether the job cannot run so; otherwise it is an estimate, and the job runs."""


class Checked(NamedTuple):
    """Result of the checks of a job."""

    findings: list[Finding]
    prompts: dict[str, list[Prompt]]
    """Prompts of every domain that the store holds none of yet."""


def preflight(job: Job) -> Checked:
    """Check everything that a job names. Nothing is written; the network is used for a store on an object store, and
    for models of the hub that its cache lacks."""
    look = _Look(job)
    store = look.at("store", lambda: Store.find(job.store))
    _domains(look, store)
    if store is not None:
        _deletions(look, store)
    _student(look, store)
    _environments(look)
    _prompt_lengths(look, store)
    _thoughts(look)
    for name in sorted(_teachers(job)):
        _teacher(look, name)
    _packages(look)
    _devices(look)
    for key, problem in (*adapter_problems(job), *condition_problems(job), *source_problems(job)):
        look.refuse(key, problem)
    return Checked(look.findings, look.prompts)


def refuse(job: Job, findings: list[Finding], *, written: str = "nothing was") -> None:
    """Raise JobFileError, one line for each, when something is certain to fail."""
    lines = [f"{finding.key}: {finding.problem}" for finding in findings if finding.certain]
    if lines:
        raise JobFileError("\n".join((f"job {job.name!r} cannot run, and {written} written:", *lines)))


@dataclass
class _Look:
    """A job under check, and the findings so far."""

    job: Job
    findings: list[Finding] = field(default_factory=list)
    prompts: dict[str, list[Prompt]] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    """The student's, where it can be known before the student is made."""

    def refuse(self, key: str, problem: str) -> None:
        """Record what is certain to fail."""
        self.findings.append(Finding(key, problem))

    def at(self, key: str, action: Callable[[], T]) -> T | None:
        """Run an action and return its result; on an error of this package record a finding and return None."""
        try:
            return action()
        except MopdError as error:
            self.refuse(key, str(error).removeprefix(f"domain {key.partition('.')[2]!r}: "))  # the key says it
        return None


def _domains(look: _Look, store: Store | None) -> None:
    """Prompts can be read and filled into their templates, and what verifies answers can be called."""
    for name, domain in look.job.domains.items():
        missing = store is None or not store.has_prompts(name)
        loaded = None
        if domain.source != "store" and missing:
            loaded = look.at(f"domains.{name}", partial(load_prompts, name, domain))
            look.prompts[name] = loaded or []
        if not _is_verified(look.job, name):
            continue
        look.at(f"domains.{name}.reward", partial(resolve_reward, domain.reward))
        if domain.reward in ("reasoning-gym", "verifiers") and loaded and not loaded[0].verifier_data:
            look.refuse(
                f"domains.{name}.reward",
                f"{domain.reward!r} verifies entries of its own data sets, and {domain.source} has none; "
                'set reward = "exact", or package.module:function',
            )


def _deletions(look: _Look, store: Store) -> None:
    """Tell what was deleted from the job's domains, and which deletion is not finished."""
    for name, domain in look.job.domains.items():
        if domain.source != "store" and (count := deleted_prompts(store, name)):
            total = domain.train + domain.eval + domain.tune
            look.findings.append(
                Finding(
                    f"domains.{name}",
                    f"{count:,} of its {total:,} prompts were deleted (`mopd store delete`); the job goes on with the "
                    "others, and with the samples that are left",
                    certain=False,
                )
            )
    if count := sum(len(deletion.uids) for deletion in store.deletions.all()):
        problem = f"{count:,} samples were deleted (`mopd store delete`); they are not sampled again"
        look.findings.append(Finding("store", problem, certain=False))
    for deletion in store.deletions.unfinished():
        where = f"mopd store delete {store.uri} --where {shlex.quote(deletion.where)}"
        how = where if deletion.where else f"mopd store repair {store.uri}"
        problem = f"the deletion that began {deletion.began} is not finished; finish it: {how}"
        look.findings.append(Finding("store", problem, certain=False))


def deleted_prompts(store: Store, domain: str) -> int:
    """Number of prompts of a domain's source that were deleted."""
    return sum(slot.split != "import" for slot in store.deletions.slots(domains=[domain]))


def _is_verified(job: Job, domain: str) -> bool:
    """Whether some answer of a domain is verified: held-out ones, and those of every stage that rolls out."""
    stages = [stage for stage in job.stages if domain in job.domains_of(stage)]
    rewarded = [stage for stage in stages if stage.has_stored_samples and job.objective(stage).needs_rewards]
    held_out = job.domains[domain].eval or job.domains[domain].tune
    return bool(held_out or rewarded or [stage for stage in stages if stage.data == "rollout"])


def _student(look: _Look, store: Store | None) -> None:
    """The student opens, or its config builds, and its template fits its tokenizer."""
    student = look.job.student
    init_folder = store.root / "policies" / "init" if store is not None and store.root is not None else None
    if init_folder is not None and init_folder.is_dir():
        look.tokenizer = look.at("student", lambda: load_tokenizer(init_folder))
    elif student.path:
        folder = look.at("student.path", lambda: _checked_student(student.path, student.revision))
        if folder is not None:
            look.tokenizer = look.at("student.path", lambda: load_tokenizer(folder))
    elif student.config:
        look.tokenizer = look.at("student.tokenizer", lambda: given_tokenizer(student))
        if look.tokenizer is not None:
            look.at("student.config", lambda: check_config(student))
    _template(look, "student.prompt_template", student.prompt_template)


def _template(look: _Look, key: str, template: str) -> None:
    if template == "chat":
        if look.tokenizer is not None and not look.tokenizer.chat_template:
            look.refuse(
                key,
                "the student's tokenizer has no chat template; instead of 'chat' write the form of a prompt, with "
                "`{prompt}` in it",
            )
    elif "{prompt}" not in template:
        problem = f"{template!r:.80} has no {{prompt}}, so the model would never read it"
        look.refuse(key, f"{problem}; write it where the prompt's text belongs, or set `chat`")


def _environments(look: _Look) -> None:
    """Environments can be constructed, and the student's template can format their replies."""
    for name, domain in look.job.domains.items():
        if not domain.environment:
            continue
        key = f"domains.{name}.environment"
        environment = look.at(key, partial(make_environment, domain.environment, domain.environment_args))
        if environment is not None and look.tokenizer is not None:
            look.at(key, partial(environments_of, look.job, [name], look.tokenizer, str))


def _prompt_lengths(look: _Look, store: Store | None) -> None:
    """Prompts fit their budget and the model's context; without a template that works there is nothing to tokenise."""
    if not any(finding.key == "student.prompt_template" for finding in look.findings):
        look.findings += [
            Finding(*problem) for problem in prompt_problems(look.job, store, look.prompts, look.tokenizer)
        ]


def _thoughts(look: _Look) -> None:
    """The student has tokens for the thoughts that a teacher does not judge."""
    if look.tokenizer is None:
        return
    objectives = {stage.objective: look.job.objective(stage) for stage in look.job.stages}
    for name, objective in objectives.items():
        if objective.leaves_thoughts_out:
            look.at(f"objectives.{name}.thought", partial(thought_ids, look.tokenizer, objective.thought))


def check_converted(job: Job, store: Store, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the prompts of a job whose student could only be tokenised with once it was converted. Raises
    JobFileError."""
    findings = [Finding(*problem) for problem in prompt_problems(job, store, {}, tokenizer)]
    refuse(job, findings, written="only the converted student and the prompts were")


def _teachers(job: Job) -> set[str]:
    """Teachers with weights that some stage asks."""
    named: set[str] = set()
    for stage in job.stages:
        named |= {*job.scorers_of(stage), *sampling_teachers(job, stage)}
    return named | {member for name in named for member in job.members_of(name)}


def _teacher(look: _Look, name: str) -> None:
    """A teacher's folder opens, and it reads the student's tokens."""
    teacher, key = look.job.teachers[name], f"teachers.{name}"
    if teacher.prompt_template:
        _template(look, f"{key}.prompt_template", teacher.prompt_template)
    if teacher.blend or teacher.of_this_job or teacher.is_remote:
        return
    look.at(f"{key}.source", lambda: _check_teacher(look, name, teacher.source, teacher.revision))


def _checked_folder(source: str, revision: str) -> Path:
    """Folder of a model that can be opened; one of the hub is downloaded."""
    folder = model_folder(source, revision)
    check_model_folder(folder)
    if is_adapter(folder):
        check_adapter(folder)
    return folder


def _checked_student(source: str, revision: str) -> Path:
    folder = _checked_folder(source, revision)
    check_trainable(folder)
    return folder


def _check_teacher(look: _Look, name: str, source: str, revision: str) -> None:
    folder = _checked_folder(source, revision)
    if any(_reads_weights(look.job, stage, name) for stage in look.job.stages):
        check_readable(folder)
    tokenizer = load_tokenizer(folder)
    if look.tokenizer is None:
        return
    if look.job.teachers[name].tokenizer == "own":
        OwnTokenizer(look.tokenizer, tokenizer, name=name)
        return
    ends_mapped = look.job.teachers[name].end == "map"
    for difference in compare_vocabularies(look.tokenizer, tokenizer, name=name, ends_mapped=ends_mapped):
        look.findings.append(Finding(f"teachers.{name}.source", difference, certain=False))
    _compare_prompts(look, name, tokenizer)


def _reads_weights(job: Job, stage: Stage, teacher: str) -> bool:
    """Whether a stage reads a teacher's weights in this process: all of them, or the LM head."""
    reads = SCORING[stage.score.engine].here or stage.score.reads not in LOGPROB_READS
    scored = teacher in job.scorers_of(stage) and reads
    return scored or (teacher in sampling_teachers(job, stage) and engine_kind(job.engine.kind).here)


def _compare_prompts(look: _Look, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Show a prompt as a teacher reads it, where its own chat template would write it in another way."""
    job, settings = look.job, look.job.teachers[name]
    domains = [domain for stage in job.stages for domain in job.domains_of(stage) if name in job.scorers_of(stage)]
    prompt = next((own[0] for domain in domains if (own := look.prompts.get(domain))), None)
    if look.tokenizer is None or prompt is None or not tokenizer.chat_template or settings.prompt_template:
        return
    with contextlib.suppress(InputError):  # the student's template is checked for itself
        read = str(look.tokenizer.decode(render(prompt.asked, look.tokenizer, template=job.student.prompt_template)))
        usual = str(tokenizer.decode(render(prompt.asked, tokenizer, template="chat")))
        if read != usual:
            problem = (
                f"teacher {name!r} reads prompts as the student does, and its own chat template writes them in another "
                f"way: {_excerpt(read)} | {_excerpt(usual)}; a teacher is at its best with the form that it was "
                f'trained on: set teachers.{name}.prompt_template, or student.prompt_template = "chat"'
            )
            look.findings.append(Finding(f"teachers.{name}.prompt_template", problem, certain=False))


def _excerpt(text: str) -> str:
    """Beginning and end of a text, for a message."""
    return repr(text if len(text) <= 2 * EXCERPT else f"{text[:EXCERPT]} … {text[-EXCERPT:]}")


def _other_signal(kind: str, named: Mapping[str, str]) -> None:
    from mopd_dataplane.score.signal_kinds import signal_kind  # torch is needed where there are such kinds

    signal_kind(kind, named)


def _packages(look: _Look) -> None:
    """Packages and plug-ins that settings need are there, and folders that they name are folders."""
    job = look.job
    packages: dict[str, str] = {}
    for stage in job.stages:
        track, key = stage.train.track, f"stages.{stage.name}.train.track"
        if track in TRACKERS:
            packages[track] = key
        elif track != "none":
            look.at(key, partial(find_plugin, "mopd.trackers", track, TRACKERS))
        for kind in (*job.objective(stage).signals, *stage.score.signals):
            if kind not in PACK_KINDS:
                look.at(f"stages.{stage.name}.score.signals", partial(_other_signal, kind, stage.score.signals))
    if not job.engine.url and (package := engine_kind(job.engine.kind).package):
        packages[package] = "engine.kind"
    for package, key in packages.items():
        if not is_installed(package):
            look.refuse(key, f"{package!r} is not installed here; pip install it, or change the setting")
    for key, folder in (("work", job.work), ("load.cache_dir", job.load.cache_dir)):
        if folder:
            look.at(key, partial(_check_folder, folder))


def _devices(look: _Look) -> None:
    """Devices that are named are on this machine, whatever is missing of the models that would be there."""
    job = look.job
    named: dict[str, dict[str, str]] = {"engine": {}, "score": {}, "train": {}}
    for stage in job.stages:
        named["train"][stage.name] = stage.train.device
        if SCORING[stage.score.engine].here and job.teachers_of(stage):
            named["score"][stage.name] = stage.score.device
        if stage.data == "rollout" and engine_kind(job.engine.kind).here:
            named["engine"][stage.name] = job.engine.device
    for part, by_stage in named.items():
        places = {f"stages.{name}.{part}.device": device for name, device in by_stage.items()}
        if len(set(by_stage.values())) == 1:  # all alike: said once
            places = {f"{part}.device": device for device in by_stage.values()}
        for key, device in places.items():
            look.at(key, partial(resolve_device, device))


def _check_folder(folder: str) -> None:
    if Path(folder).exists() and not Path(folder).is_dir():
        raise InputError(f"{folder} is not a folder; name one, or a place where one can be made")
