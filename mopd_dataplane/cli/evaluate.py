"""Commands that judge models: teachers on the same answers, and a policy on tasks of lm-eval."""

from itertools import groupby
from typing import Annotated, Any

from typer import Option, Typer

from mopd_dataplane.cli.answers import StoreUri
from mopd_dataplane.cli.jobs import ANSWERS, Given, OneStage, choose_stage, load
from mopd_dataplane.cli.output import note, print_json, print_text, print_title, stderr
from mopd_dataplane.cli.register import register
from mopd_dataplane.cli.rows import print_fitting
from mopd_dataplane.errors import InputError

PANEL = "Answers"
TASK_HEAD = {
    "domain": "task",
    "metric": "metric",
    "reward": "score",
    "stderr": "standard error",
    "documents": "questions",
}
"""Fields of a task's answer that are shown, and what stands above each."""
AGAIN_HEAD = {
    "domain": "domain",
    "prompts": "prompts",
    "reward_then": "reward then",
    "reward_now": "reward now",
    "right_now": "right now",
}
"""Fields of an answer to prompts of chosen samples that are shown, and what stands above each."""
TEACHER_HEAD = {
    "teacher": "teacher",
    "accuracy": "acc.",
    "mean_logprob": "log p",
    "reverse_kl": "KL",
    "entropy": "entropy",
    "overlap": "overlap",
    "discrimination": "right > wrong",
    "calibration_error": "calib. error",
    "gradient_agreement": "push",
    "failed": "failed checks",
}
"""Fields of a comparison of teachers that are shown, and what stands above each."""


def teachers(
    of: OneStage,
    samples: Annotated[int, Option("--samples", min=1, help="Answers of each domain that are scored.")] = 200,
    topk: Annotated[int, Option("--topk", min=1, help="Likeliest tokens whose overlap is counted.")] = 16,
    probe: Annotated[
        int | None,
        Option("--probe", metavar="N", min=1, help="Score N answers in all instead, and propose a routing in TOML."),
    ] = None,
    where: Annotated[
        str, Option("--where", metavar="SQL", help="Only answers that meet this condition, as reward > 0.")
    ] = "",
    *,
    overrides: Given,
) -> None:
    """Compare teachers: all of them on the same answers of a stage, domain by domain.

    Mean teacher log-prob of the student's tokens, exact reverse KL, entropy, overlap of the likeliest tokens, how often
    a right answer is preferred to a wrong one, calibration on right answers, and whether following the teacher pushes
    the student where the verifier would (cosine of gradients), next to the teacher's own held-out accuracy.

    With --probe, the last lines are a table [routing] for the job file; with --json, an object with `teachers` and
    `routing`.
    """
    loaded = load(of.job, overrides)
    chosen = choose_stage(loaded, of.stage, data=ANSWERS)

    from mopd_dataplane.run.steps.compare_teachers import compare_teachers
    from mopd_dataplane.score.routing import propose_routing, routing_toml

    if probe is not None:
        samples = max(1, probe // len(loaded.domains_of(chosen)))
    rows = compare_teachers(loaded, chosen, samples=samples, topk=topk, where=where, console=stderr())
    choices = propose_routing(rows) if probe is not None else []
    if overrides.as_json and choices:
        print_json({"teachers": rows, "routing": {choice.domain: choice.teacher for choice in choices}})
        return
    if overrides.as_json:
        print_json(rows)
        return
    for domain, scored in groupby(rows, key=lambda row: row["domain"]):
        print_title(domain)
        print_fitting(list(TEACHER_HEAD.values()), [[_shown(row[name]) for name in TEACHER_HEAD] for row in scored])
    for text in (text for row in rows for text in row["failed"].values()):
        note(text)
    note("logs are natural; means are over trained tokens; docs/objectives.md says what each column is for")
    if choices:
        print_text(routing_toml(choices, dict(chosen.routing or loaded.routing)))


def _shown(value: Any) -> Any:
    """Two decimals: what is measured on a few hundred answers has no more. Failed checks by their names."""
    if isinstance(value, dict):
        return ", ".join(value) or "none"
    return round(value, 2) if isinstance(value, float) else value


def evaluate(
    store: StoreUri,
    tasks: Annotated[str, Option("--tasks", metavar="NAMES", help="Tasks of lm-eval, as arc_easy,hellaswag.")] = "",
    where: Annotated[
        str,
        Option("--where", metavar="SQL", help="Instead: prompts of samples that meet this condition, as reward < 1."),
    ] = "",
    policy: Annotated[str, Option("--policy", metavar="STAGE", help="Stage whose policy is evaluated.")] = "student",
    version: Annotated[
        int | None, Option("--version", metavar="N", min=1, help="Its version; by default the newest.")
    ] = None,
    include_path: Annotated[
        str, Option("--include-path", metavar="DIR", help="Folder with your own task definitions.")
    ] = "",
    shots: Annotated[
        int | None, Option("--shots", min=0, help="Examples before a question; by default the task's.")
    ] = None,
    limit: Annotated[
        int | None, Option("--limit", min=1, help="Only the first questions of a task, or the first prompts.")
    ] = None,
    chat: Annotated[
        bool, Option("--chat-template", help="Format questions with the tokenizer's chat template.")
    ] = False,
    batch_size: Annotated[int, Option("--batch-size", min=1, help="Questions in one batch.")] = 8,
    dtype: Annotated[str, Option("--dtype", help="float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Evaluate a policy version with lm-eval's tasks, or on the prompts of chosen samples.

    With --where, the policy answers the prompts of the samples that meet a condition once more, and the job's verifiers
    judge it: is what was wrong then right now? Nothing is written.

    With --tasks, scores go to the store's `evals`, one row for each task and metric with its standard error; a task
    that was evaluated before under the same settings is skipped. Needs pip install 'mopd-dataplane[eval]'. A task may
    download its questions.
    """
    if bool(tasks) == bool(where):
        raise InputError("mopd eval takes tasks of lm-eval or a condition: give --tasks or --where, one of the two")
    if where:
        _evaluate_again(store, policy, version, where, limit, as_json=as_json)
        return
    from mopd_dataplane import open_store
    from mopd_dataplane.integrations.lm_eval import EvalSettings, evaluate_policy
    from mopd_dataplane.run.progress import Progress

    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    settings = EvalSettings(
        tasks=names, include_path=include_path, shots=shots, limit=limit, chat_template=chat, batch_size=batch_size,
        dtype=dtype,
    )  # fmt: skip
    with Progress(stderr()).step(policy, "lm-eval", total=len(names), unit="tasks") as (advance, _):
        scores = evaluate_policy(open_store(store), policy, version, settings, progress=lambda task: advance(1))
    if as_json:
        print_json(scores)
        return
    print_fitting(list(TASK_HEAD.values()), [[row[name] for name in TASK_HEAD] for row in scores])
    note("scores are in `evals`, where finish_reason = 'benchmark'")


def _evaluate_again(
    store: str, policy: str, version: int | None, where: str, limit: int | None, *, as_json: bool
) -> None:
    from mopd_dataplane.job.load import load_job
    from mopd_dataplane.run.steps.answer_again import answer_again

    job = load_job(store)
    rows = answer_again(job, job.stage(policy), where, version=version, limit=limit, console=stderr())
    if as_json:
        print_json(rows)
        return
    print_fitting(list(AGAIN_HEAD.values()), [[_shown(row[name]) for name in AGAIN_HEAD] for row in rows])
    note("then: the stored answers that met the condition; now: one new answer to each of their prompts")


def add_to(app: Typer) -> None:
    register(app, teachers, "mopd teachers jobs/quickstart --stage student", panel=PANEL)
    example = "mopd eval runs/quickstart --tasks arc_easy,hellaswag --policy student --limit 200"
    register(app, evaluate, example, name="eval", panel=PANEL)
