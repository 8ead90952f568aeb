"""Commands that take a job file: the whole run, or one stage of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option, Typer, confirm
from typer.core import TyperCommand

import mopd_dataplane
from mopd_dataplane.base.extras import EXTRAS, require
from mopd_dataplane.cli.output import note, plain, print_facts, print_grid, print_json, stderr
from mopd_dataplane.cli.register import register
from mopd_dataplane.errors import InputError, JobFileError

if TYPE_CHECKING:
    from mopd_dataplane.job.job import Job, Stage

PANEL = "Jobs"


class RayAnywhere(TyperCommand):
    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Give a bare `--ray` its empty address, which the parser insists on."""
        words: list[str] = []
        for word, after in pairwise([*args, "-"]):
            words += [word, ""] if word == "--ray" and after[:1] == "-" else [word]
        return super().parse_args(ctx, words)


JobFile = Annotated[str, Argument(metavar="JOB", help="Job file (.toml), or a folder with a job.toml.")]
StageName = Annotated[
    str | None, Option("--stage", metavar="NAME", help="Stage of the job; needed when more than one fits the command.")
]
Follow = Annotated[
    bool, Option("--follow", help="Keep up with the other stages, each in a process of its own, until all end.")
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object on stdout; progress goes to stderr.")]
Keys = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override one key of the job file; repeatable.")
]


@dataclass(frozen=True)
class Overrides:
    """Options that change a job."""

    set_: Keys = None
    seed: Annotated[int | None, Option("--seed", min=0, help="Override the job's seed.")] = None
    store: Annotated[str | None, Option("--store", metavar="STORE", help="Override where the job writes.")] = None


@dataclass(frozen=True)
class Given(Overrides):
    """Options at the end of every command on one stage."""

    as_json: AsJson = False


@dataclass(frozen=True)
class OneStage:
    """Which stage of which job."""

    job: JobFile
    stage: StageName = None


def run(
    job: JobFile,
    overrides: Overrides,
    stage: StageName = None,
    ray: Annotated[
        str | None,
        Option(
            "--ray",
            metavar="[ADDRESS]",
            help="Sample, score and train on a Ray cluster: at ADDRESS (host:port, or auto), else at $RAY_ADDRESS, "
            "else one started on this machine.",
        ),
    ] = None,
    from_here: Annotated[
        bool,
        Option(
            "--from-here",
            help="Accept keys that differ from those that the store has begun with, for the iterations still to come.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a whole job, or continue it where it stopped.

    Every stage in order: rollout, score, plan, train, evaluate; then the report. Safe to kill at any moment and to
    repeat: finished work is kept, interrupted samples continue. With --stage, that stage only. The findings of `mopd
    check` are printed first, and nothing is written if the job is certain to fail. Keys of speed, memory and place may
    change at each call; a change of what is computed needs --from-here, or a yes on a terminal.
    """
    loaded = load(job, overrides)
    if stage is not None:
        loaded.stage(stage)
    require(packages(loaded))
    from mopd_dataplane.run import pipeline
    from mopd_dataplane.run.changes import refuse_changes

    ask = confirmed if sys.stdin.isatty() and sys.stderr.isatty() else refuse_changes
    result = pipeline.run_job(loaded, only=stage, console=stderr(), ray=ray, from_here=from_here, ask=ask)
    if as_json:
        print_json(result)
        return
    print_accuracy(result["store"])
    note(f"report: {result['report']}")


def confirmed(description: str) -> bool:
    """Show changes of a job that has begun, and ask on the terminal for a yes."""
    note(f"changes of what is still to come:\n{description}")
    return confirm("go on with them?", default=False, err=True)


def packages(job: Job) -> list[str]:
    """Modules without which no run of this job begins, so that all of them are asked for at once."""
    from mopd_dataplane.prompts import source_package

    prompts = dict.fromkeys(source_package(domain.source) for domain in job.domains.values())
    return ["torch", "transformers", *(package for package in prompts if package in EXTRAS)]


def check(
    job: JobFile,
    overrides: Overrides,
    rate: Annotated[
        list[str] | None,
        Option(
            "--rate",
            metavar="STEP=TOKENS",
            help="Response tokens a second that rollout, score or train reaches on your machine: says how long it "
            "takes; repeatable.",
        ),
    ] = None,
    rehearsal: Annotated[
        bool,
        Option(
            "--rehearse",
            help="Then run a small version in a store of its own (STORE-rehearsal): tiny models, few prompts and "
            "tokens.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check everything that a job names before you pay for a run; nothing is written to its store.

    Models, prompts, verifiers and packages; templates on real prompts; estimates of tokens, memory and disk, and
    time at given rates. `mopd run` does the same first. With --rehearse every stage is then run with tiny random models
    in place of the job's, also where the job itself cannot run. Exit code 2 if the job is certain to fail.
    """
    loaded = load(job, overrides)
    require(packages(loaded))
    note(f"looking at models, prompts and packages of {loaded.name}")

    from mopd_dataplane.run.estimate import RATED, estimate
    from mopd_dataplane.run.preflight import preflight, refuse

    rates = _rates(rate or [], RATED)
    findings, prompts = preflight(loaded)
    estimated = estimate(loaded, prompts, rates)
    findings += estimated.findings
    facts = {name: getattr(estimated, name) for name in ("models", "prompts", "tokens", "time", "memory", "disk")}
    if not as_json:
        _print_sections(facts)
        for finding in findings:
            if not finding.certain:
                note(f"{finding.key}: {finding.problem}")
    rehearsed = _rehearse(loaded, as_json=as_json) if rehearsal else {}
    if as_json:
        print_json({"findings": findings, **facts, **rehearsed})
    refuse(loaded, findings)


def _rehearse(job: Job, *, as_json: bool) -> dict[str, Any]:
    """Run a small version of a job. Returns, and prints unless it is for JSON, what it ran unchanged, what it replaced,
    what it did not run, and how exact its models are."""
    from mopd_dataplane import open_store
    from mopd_dataplane.query.exactness import exactness_facts
    from mopd_dataplane.run import pipeline
    from mopd_dataplane.run.rehearsal import rehearse

    start = time.monotonic()
    small = rehearse(job)
    result = pipeline.run_job(small.job, console=stderr())
    facts = {**small.facts(), "exactness": exactness_facts(open_store(result["store"]))}
    seconds = time.monotonic() - start
    if not as_json:
        _print_sections(facts)
        note(f"rehearsed in {seconds:.0f} s; figures of training and sampling mean nothing: {result['report']}")
    return {"rehearsal": {**facts, "seconds": seconds, "store": result["store"], "report": result["report"]}}


def _print_sections(sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Print facts under their titles, without empty sections."""
    for name, facts in sections.items():
        if facts:
            print_facts(facts, title=name.replace("_", " "))


def _rates(texts: list[str], steps: Sequence[str]) -> dict[str, float]:
    """Response tokens a second by step. Raises InputError for an unknown step, or a rate that is no positive number."""
    rates = {}
    for text in texts:
        step, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if step not in steps or not 0 < number < float("inf"):
            raise InputError(
                f"--rate {text}: give one of {', '.join(steps)} and tokens a second above 0, as rollout=2500"
            )
        rates[step] = number
    return rates


def rollout(of: OneStage, follow: Follow = False, *, overrides: Given) -> None:
    """Let the student answer the prompts of one iteration.

    Every token is logged as it is decoded; an interrupted generation continues from its log.
    """
    one_stage("rollout_stage", of, overrides, follow=follow)


def score(
    of: OneStage,
    follow: Follow = False,
    queue: Annotated[
        str | None,
        Option(
            "--queue",
            metavar="NAME",
            help="Score the trajectories of a running TransferQueue as they come, and put the signals beside them.",
        ),
    ] = None,
    *,
    overrides: Given,
) -> None:
    """Let each sample's teacher score every token.

    Only signals that are missing are computed; samples are never rewritten. With --queue, the stage has `data =
    "stored"` and the store is that of the named queue, whose framework runs on the Ray cluster at $RAY_ADDRESS, or on
    this machine. The command ends with the framework, or on Ctrl-C, and may be started again at any time.
    """
    if follow and queue is not None:
        raise InputError("--queue follows the framework that puts into it; leave --follow out")
    one_stage("score_stage", of, overrides, follow=follow, queue=queue)


def reward(
    of: OneStage,
    missing: Annotated[
        bool, Option("--missing", help="Score again the answers that could not be scored before.")
    ] = False,
    *,
    overrides: Given,
) -> None:
    """Verify answers: compute one outcome reward for each sample that has none.

    An answer for which the reward function returns None, or takes longer than domains.NAME.reward_timeout_s, cannot be
    scored: it is recorded as such and left out of its group. With --missing, held-out answers without a reward are
    scored again too.
    """
    one_stage("reward_stage", of, overrides, missing=missing)


def plan(
    of: OneStage,
    explain: Annotated[
        bool, Option("--explain", help="Print what the plan holds: batches, mixture, teachers, bytes, FLOPs.")
    ] = False,
    every: Annotated[
        bool, Option("--all", help="Plan every window that is left of a stage with window_samples, not only the next.")
    ] = False,
    processes: Annotated[int, Option("--processes", min=1, help="With --all: plan so many windows at a time.")] = 1,
    ray: Annotated[
        str | None,
        Option("--ray", metavar="[ADDRESS]", help="With --all: plan on a Ray cluster, found as by mopd run --ray."),
    ] = None,
    *,
    overrides: Given,
) -> None:
    """Decide which samples are trained on, in which packs and steps.

    A pure function of snapshot, seed and settings, recorded in the store before it is used.
    """
    if every and explain:
        raise InputError("--explain is about one window, and --all plans every one; use one of them")
    if not every and (processes > 1 or ray is not None):
        raise InputError("--processes and --ray plan several windows; add --all")
    if every:
        one_stage("plan_ahead", of, overrides, processes=processes, ray=ray)
    else:
        one_stage("plan_stage", of, overrides, explain=explain)


def train(of: OneStage, follow: Follow = False, *, overrides: Given) -> None:
    """Train the policy on recorded plans and publish its next version.

    Continues from the last checkpoint.
    """
    one_stage("train_stage", of, overrides, follow=follow)


def add_to(app: Typer) -> None:
    """Register the job commands, in the order of the flow."""
    job = "jobs/quickstart"
    changed = f"mopd run {job} --seed 3 --set train.learning_rate=3e-4"
    longer = f"mopd run {job} --set stages.student.iterations=12 --set rollout.temperature=0.8 --from-here"
    on_ray = f"mopd run {job} --ray --set scale.engines=2"
    examples = (f"mopd run {job}", changed, longer, on_ray)
    register(app, run, *examples, panel=PANEL, cls=RayAnywhere)
    register(app, check, f"mopd check {job}", f"mopd check {job} --rehearse", panel=PANEL)
    register(app, rollout, f"mopd rollout {job} --stage student", panel=PANEL)
    from_queue = "mopd score jobs/examples/after_verl.toml --stage train --queue verl"
    register(app, score, f"mopd score {job} --stage student --set score.hidden_codec=int8", from_queue, panel=PANEL)
    again = f"mopd reward {job} --stage student --missing"
    register(app, reward, f"mopd reward {job} --stage student --json", again, panel=PANEL)
    ahead = "mopd plan my-job.toml --stage stored --all --processes 8"
    register(app, plan, f"mopd plan {job} --stage student --explain", ahead, panel=PANEL, cls=RayAnywhere)
    register(app, train, f"mopd train {job} --stage student --follow", panel=PANEL)


def load(path: str, overrides: Overrides) -> Job:
    """The checked job with the command line's overrides applied. Raises JobFileError."""
    from mopd_dataplane.job.load import load_job

    extra = [] if overrides.seed is None else [f"seed={overrides.seed}"]
    extra += [] if overrides.store is None else [f"store={json.dumps(overrides.store)}"]
    return load_job(path, overrides=[*(overrides.set_ or []), *extra])


ANSWERS = ("rollout", "stored")
"""`data` of the stages whose answers a model gave: here, else elsewhere."""


def choose_stage(job: Job, name: str | None, *, data: Sequence[str] = ()) -> Stage:
    """The named stage, or the only one whose `data` is the first of these that the job has; of any, without these.

    Raises JobFileError naming the stages when the choice is open.
    """
    if name is not None:
        return job.stage(name)
    kinds = [[stage for stage in job.stages if _data_of(stage) == kind] for kind in data] or [list(job.stages)]
    fitting = next(filter(None, kinds), [])
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(stage.name for stage in fitting or job.stages)
    how_many = f"{len(fitting)} stages that fit ({names})" if fitting else f"no stage that fits (it has {names})"
    raise JobFileError(f"job {job.name!r} has {how_many}; choose one with --stage NAME")


def _data_of(stage: Stage) -> str:
    return "stored" if stage.has_stored_samples else str(stage.data)


STAGES_OF = {"rollout_stage": ("rollout",), "score_stage": ANSWERS, "reward_stage": ANSWERS}


def one_stage(function: str, of: OneStage, overrides: Given, **options: Any) -> None:
    """Run one function of the pipeline on one stage and print what it returns."""
    job = load(of.job, overrides)
    stage = choose_stage(job, of.stage, data=STAGES_OF.get(function, ()))
    work: Callable[..., Any] = getattr(mopd_dataplane, function)
    summary = plain(work(job, stage, console=stderr(), **options))
    print_json(summary) if overrides.as_json else print_facts(summary)


def print_accuracy(store: str) -> None:
    """The table domain × policies of a store, as in its report."""
    from mopd_dataplane import open_store
    from mopd_dataplane.query.measures import measure
    from mopd_dataplane.query.sections import accuracy_section

    section = accuracy_section(measure(open_store(store)))
    note(section.empty or section.text)
    for grid in section.grids:
        print_grid(grid)
        if grid.caption:
            note(grid.caption)
