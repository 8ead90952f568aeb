"""Rehearsal of a job: every stage from end to end in a store of its own, with tiny random models, few prompts and
tokens.

    rehearsal = rehearse(job)         a job that runs on a CPU in under two minutes, and what it leaves out
    run_job(rehearsal.job)

All other settings stay: stages, objectives, routing, templates, codecs, corrections, schedules. A rehearsal shows that
the parts of a job work together; it says nothing about the results.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from mopd_dataplane.base.extras import is_installed
from mopd_dataplane.base.file_urls import is_url
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.errors import InputError, MopdError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import check_job
from mopd_dataplane.job.sections import Domain
from mopd_dataplane.models import tiny
from mopd_dataplane.models.devices import resolve_device
from mopd_dataplane.models.hub import model_folder
from mopd_dataplane.models.initial_weights import given_tokenizer
from mopd_dataplane.models.tiny import FAMILIES, USUAL, family_of
from mopd_dataplane.prompts import find_prompts, source_package
from mopd_dataplane.rollout.engines.kinds import engine_kind
from mopd_dataplane.score.engines import SCORING, SERVER_READS
from mopd_dataplane.score.reward import resolve_reward
from mopd_dataplane.store.dataset import Store

MARK = "rehearsal.json"
"""In a folder that a rehearsal made, which the next one may replace: what was rehearsed, and what was not."""
ITERATIONS, PROMPTS, HELD_OUT, NEW_TOKENS, GROUP, SLOTS, BATCH = 2, 2, 1, 6, 2, 8, 4
"""Most iterations of a stage, training and held-out prompts of a domain, tokens of an answer, answers of a group,
sequences decoded together, samples of a step."""
BYTES_PER_TOKEN = 8
"""A stand-in's tokens are bytes, so that a prompt may have as many more of them."""


@dataclass
class Rehearsal:
    """The small version of a job, and what differs from the job. Values are formatted for display."""

    job: Job
    folder: Path
    """Holds the store, stand-in models and stand-in prompts."""
    rehearsed: dict[str, str] = field(default_factory=dict)
    """Parts of the job that run as they are written, by key."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Parts for which something else stands in, by key."""
    never_run: dict[str, str] = field(default_factory=dict)
    """Parts that only the real run will execute."""
    reads_bytes: bool = False
    """Whether no tokenizer was here, so that texts have a token for every byte."""

    def facts(self) -> dict[str, dict[str, str]]:
        """The three lists."""
        return {name: getattr(self, name) for name in ("rehearsed", "replaced", "never_run")}


def rehearse(job: Job) -> Rehearsal:
    """Make the small job: writes its models, and prompts where the job's own are not here, to a new folder.

    The job's own store is not changed. Raises InputError when the folder is not a rehearsal's, JobFileError when
    settings of the job contradict each other, and the error of a model that is present but cannot be used.
    """
    folder = _new_folder(job)
    small = Rehearsal(job, folder)
    raw_job = job.model_dump(mode="json")
    raw_job |= {"store": str(folder / "store"), "work": "", "single_writer": False, "group_commit": False}
    _models(small, raw_job)
    _domains(small, raw_job)
    _engines(small, raw_job)
    for stage in raw_job["stages"]:
        _stage(small, stage)
    _surroundings(small, raw_job)
    small.job = check_job(raw_job, where=f"rehearsal of {job.name}")
    publish_file(folder / MARK, json.dumps(small.facts(), indent=1).encode())
    return small


def _new_folder(job: Job) -> Path:
    """An empty folder beside the job's store; what an earlier rehearsal left there is gone."""
    near = f"runs/{job.name}" if "://" in job.store else job.store.rstrip("/")
    folder = Path(f"{near}-rehearsal")
    if folder.exists() and not (folder / MARK).is_file():
        raise InputError(f"{folder} is not a rehearsal's, so it is left alone; move it, or give another --store")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    publish_file(folder / MARK, b"{}")
    return folder


@dataclass(frozen=True)
class _Wanted:
    """A model of the job."""

    key: str
    source: str
    revision: str
    dtype: str


def _models(small: Rehearsal, raw_job: dict[str, Any]) -> None:
    """A tiny model for every one the job names: with its own config and tokenizer where they are here, else with those
    of another of its models, else of the family that its name says, or the student's."""
    job, student = small.job, small.job.student
    models = [_Wanted("student", student.path or student.gguf.partition("==")[0], student.revision, student.dtype)]
    models += [
        _Wanted(f"teachers.{name}", teacher.source, teacher.revision, teacher.dtype)
        for name, teacher in job.teachers.items()
        if teacher.source and not teacher.of_this_job
    ]
    folders = {one.key: folder for one in models[bool(student.config) :] if (folder := _here(job, one)) is not None}
    family = family_of(models[0].source) or next(filter(None, (family_of(one.source) for one in models)), USUAL)
    tokenizer_of = next(iter(folders.values()), None)
    for seed, one in enumerate(models):
        target = small.folder / "models" / one.key.removeprefix("teachers.")
        how: dict[str, Any] = {"seed": job.seed + seed, "dtype": one.dtype}
        if one.key == "student" and student.config:
            tokenizer_of = target
            kind = tiny.from_config(student.config, given_tokenizer(student), target, **how)
            small.rehearsed[one.key] = f"a tiny random {kind} with the job's config and tokenizer"
        elif source := folders.get(one.key):
            small.rehearsed[one.key] = f"a tiny random {tiny.shrunk(source, target, **how)} with its own tokenizer"
        elif tokenizer_of is not None:
            kind = tiny.shrunk(tokenizer_of, target, **how)
            small.replaced[one.key] = f"{one.source} is not here: a tiny random {kind} with another model's tokenizer"
        else:
            small.reads_bytes = True
            like = tiny.stand_in(one.source) if family_of(one.source) == family else FAMILIES[family]
            kind = tiny.of_family(like, target, **how)
            origin = "its name says" if family_of(one.source) else "stands in, its name says none"
            small.replaced[one.key] = f"{one.source} is not here: a tiny random {kind}; the family {family} {origin}"
        if one.key == "student":
            nothing = {"revision": "", "config": {}, "gguf": "", "tokenizer": "", "tokens": ()}
            raw_job["student"] |= {"path": str(target), **nothing}
        else:
            raw_job["teachers"][one.key.removeprefix("teachers.")] |= {"source": str(target), "revision": ""}
    small.never_run["weights"] = "of every model: memory, time and what comes out are not the job's"


def _here(job: Job, one: _Wanted) -> Path | None:
    """Folder with a model's config and tokenizer; the hub is asked for no weights."""
    store = None if "://" in job.store else Store.find(job.store)
    init_folder = store.root / "policies" / "init" if store is not None and store.root is not None else None
    if one.key == "student" and init_folder is not None and init_folder.is_dir():
        return init_folder
    if not one.source or (one.key == "student" and job.student.gguf):
        return None
    try:
        folder = model_folder(one.source, one.revision, weights=False)
    except MopdError:
        return None
    return folder if (folder / "config.json").is_file() else None


def _domains(small: Rehearsal, raw_job: dict[str, Any]) -> None:
    for name, domain in small.job.domains.items():
        key, own = f"domains.{name}", raw_job["domains"][name]
        own |= {
            "train": min(domain.train, PROMPTS),
            "eval": min(domain.eval, HELD_OUT),
            "tune": min(domain.tune, HELD_OUT),
        }
        if why := _no_prompts(domain):
            own |= {"source": str(_prompts(small.folder, name, domain)), "dataset": "", "args": {}, "columns": {}}
            small.replaced[key] = f"{why}: made-up prompts"
        else:
            small.rehearsed[key] = f"prompts of {domain.source}"
        try:
            resolve_reward(domain.reward)
            is_usable = domain.reward not in ("reasoning-gym", "verifiers") or own["source"] == domain.source
        except MopdError:
            is_usable = False
        if not is_usable:
            own["reward"] = "exact"
            small.replaced[f"{key}.reward"] = f"{domain.reward} cannot be called here: exact"


def _no_prompts(domain: Domain) -> str:
    """Why a domain's own prompts cannot be read; empty when they can."""
    if domain.source == "store":
        return "what was imported is in the job's own store"
    if domain.source == "datasets" and not Path(domain.dataset).is_dir():
        return f"the dataset {domain.dataset} is not here"
    if package := source_package(domain.source):
        return "" if is_installed(package) else f"the package {package} is not here"
    try:
        find_prompts(domain.source)
    except MopdError as error:
        return f"{domain.source} is not here" if not is_url(domain.source) else f"{domain.source}: {error!s:.200}"
    return ""


def _prompts(folder: Path, name: str, domain: Domain) -> Path:
    """A file of made-up prompts, with a column for every placeholder of the domain's templates."""
    named = {
        field_names
        for text in (domain.template, domain.teacher_context)
        for _, field_names, *_ in Formatter().parse(text)
    }
    file = folder / "prompts" / f"{name}.jsonl"
    file.parent.mkdir(exist_ok=True)
    rows = []
    for number in range(2 * (PROMPTS + 2 * HELD_OUT)):
        words = {field_names: f"{field_names} {number}" for field_names in named if field_names}
        rows.append(words | {"text": f"What is {number} and {number} in {name}?", "answer": str(2 * number)})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _engines(small: Rehearsal, raw_job: dict[str, Any]) -> None:
    """vLLM where it is installed, without what needs its hardware; else the Hugging Face engine and scorer."""
    engine, has_vllm = small.job.engine, is_installed("vllm")
    raw_job["engine"] |= {"slots": min(engine.slots, SLOTS), "url": "", "reload": False, "options": {}}
    if engine_kind(engine.kind).package == "vllm" and not has_vllm:
        raw_job["engine"] |= {"kind": "hf", "noise": "keyed", "keep": True}
        small.replaced["engine"] = "vLLM is not installed here: the Hugging Face engine"
        small.never_run["vLLM"] = "sampling" + (" and its handing over of memory" if not engine.keep else "")
    else:
        small.rehearsed["engine"] = engine.kind
    if engine.url:
        small.replaced["engine.url"] = "a running server is not asked"
    if engine.options:
        small.never_run["engine.options"] = ", ".join(engine.options)
    for stage in raw_job["stages"]:
        if SCORING[stage["score"]["engine"]].package == "vllm":
            stage["score"]["options"] = {}
            if stage["score"]["reads"] in SERVER_READS:  # no server is asked
                stage["score"]["reads"] = "prompt_logprobs"
            if not has_vllm:
                stage["score"] |= {"engine": "hf", "reads": "states"}
                small.replaced["score.engine"] = "vLLM is not installed here: Hugging Face teachers"
                small.never_run.setdefault("vLLM", "scoring")
    for name, teacher in small.job.teachers.items():
        raw_job["teachers"][name]["url"] = ""
        if teacher.is_remote:
            raw_job["teachers"][name]["source"] = "student"
            small.replaced[f"teachers.{name}"] = "a running server is not asked: the student stands in"
        if teacher.quantisation != "none" and not is_installed("torchao"):
            raw_job["teachers"][name]["quantisation"] = "none"
            small.replaced[f"teachers.{name}.quantisation"] = "torchao is not installed here: none"
    _device(small, "engine", raw_job["engine"])
    for stage in raw_job["stages"]:
        for part in ("score", "train"):
            _device(small, f"{stage['name']}.{part}", stage[part])


def _device(small: Rehearsal, key: str, section: dict[str, Any]) -> None:
    """The device that a section names, or what this machine has instead."""
    try:
        where = resolve_device(section["device"])
    except MopdError:
        small.replaced[f"{key}.device"] = f"{section['device']} is not here: auto"
        section["device"], where = "auto", resolve_device("auto")
    if where == "cpu":
        small.never_run["accelerator"] = "kernels, copies and memory of a GPU: this machine computed on its CPU"
        if not section.get("keep", True):  # to start a process again for every window is most of a rehearsal's time
            section["keep"] = True
            small.never_run[f"{key}.keep"] = "false, which hands an accelerator's memory over between windows"


def _stage(small: Rehearsal, stage: dict[str, Any]) -> None:
    name, rollout, plan, train = stage["name"], stage["rollout"], stage["plan"], stage["train"]
    prompt = rollout["max_prompt_tokens"] * (BYTES_PER_TOKEN if small.reads_bytes else 1)
    new = min(rollout["max_new_tokens"], NEW_TOKENS)
    rollout |= {
        "max_prompt_tokens": prompt, "max_new_tokens": new, "prompts_per_iteration": 0,
        "group_size": min(rollout["group_size"], GROUP),
    }  # fmt: skip
    group = 1 if stage["data"] == "reference" else rollout["group_size"]
    if small.reads_bytes:
        plan["pack_tokens"] = max(plan["pack_tokens"], prompt + new)
    if plan["batch_samples"]:
        plan["batch_samples"] = max(group, min(plan["batch_samples"], BATCH))
    if plan["mixture"]:
        plan["mixture"] = dict.fromkeys(plan["mixture"], 1.0)
        small.replaced[f"stages.{name}.plan.mixture"] = f"{PROMPTS} prompts a domain leave no other: equal shares"
    _choices(small, name, rollout, plan)
    if train["track"] != "none":
        small.never_run["train.track"] = train["track"]
        train["track"] = "none"
    if stage["data"] == "stored":
        stage["data"] = "rollout"
        small.replaced[f"stages.{name}.data"] = "what was imported is in the job's own store: rollouts"
    elif stage["data"] not in ("rollout", "reference"):
        stage["data"] = "rollout"
        small.replaced[f"stages.{name}.data"] = "samples of other stores are not those of a random model: rollouts"
    stage["iterations"] = min(stage["iterations"], ITERATIONS)
    if stage["discriminator"]:
        stage["discriminator"]["batch_pairs"] = min(stage["discriminator"]["batch_pairs"], BATCH)
    small.rehearsed[f"stages.{name}"] = (
        f"{stage['objective']}, {stage['iterations']} iterations of {new} tokens an answer"
    )


def _choices(small: Rehearsal, name: str, rollout: dict[str, Any], plan: dict[str, Any]) -> None:
    """Loosen what chooses samples by how good they are: answers of random models would leave none."""
    key = f"stages.{name}.plan"
    if plan["where"]:
        plan["where"] = f"({plan['where']}) or true"
        small.replaced[f"{key}.where"] = "computed, but leaves no sample out: answers of random models may all fail it"
    if plan["groups"] != "all":
        plan["groups"] = "all"
        small.replaced[f"{key}.groups"] = "all groups: answers of random models rarely get different rewards"
    if plan["weight"]:
        plan["weight"] = f"coalesce(({plan['weight']}) * 0, 0) + 1"
        small.replaced[f"{key}.weight"] = "computed, but all samples alike: weights of random answers may all be 0"
    if rollout["until"]:
        rollout["until"] = None
        small.replaced[f"stages.{name}.rollout.until"] = f"{PROMPTS} prompts a domain leave no further ones: one round"


def _surroundings(small: Rehearsal, raw_job: dict[str, Any]) -> None:
    """Ranks, cache and evaluation."""
    scale, job = raw_job["scale"], small.job
    ranks, parallel = min(scale["ranks"], 2), min(scale["context_parallel"], 2)
    if (ranks, parallel) != (scale["ranks"], scale["context_parallel"]):
        small.replaced["scale.ranks"] = f"{scale['ranks']} ranks: {ranks} on this machine"
        small.never_run["nodes"] = "more than one, and the network between them"
    raw_job["scale"] |= {"ranks": ranks, "context_parallel": parallel}
    raw_job["load"] |= {"cache_dir": "", "cache_bytes": 0, "ring_bytes": 0, "slot_bytes": 0}
    raw_job["eval"]["max_new_tokens"] = min(raw_job["eval"]["max_new_tokens"] or NEW_TOKENS, NEW_TOKENS)
    if "://" in job.store:
        small.never_run["store"] = f"an object store ({job.store.partition('://')[0]}); this was a folder"
