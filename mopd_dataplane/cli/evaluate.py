"""The command that evaluates a policy of a store with lm-eval."""

from typing import Annotated

import typer

from mopd_dataplane.cli.answers import StoreUri
from mopd_dataplane.cli.output import note, print_json, stderr
from mopd_dataplane.cli.register import register
from mopd_dataplane.cli.rows import print_fitting

PANEL = "Answers"
COLUMNS = {
    "domain": "task",
    "metric": "metric",
    "reward": "score",
    "stderr": "standard error",
    "documents": "questions",
}


def evaluate(
    store: StoreUri,
    tasks: Annotated[str, typer.Option("--tasks", metavar="NAMES", help="Tasks of lm-eval, as arc_easy,hellaswag.")],
    policy: Annotated[
        str, typer.Option("--policy", metavar="STAGE", help="Stage whose policy is evaluated.")
    ] = "student",
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", min=1, help="Its version; by default the newest.")
    ] = None,
    include_path: Annotated[
        str, typer.Option("--include-path", metavar="DIR", help="Folder with your own task definitions.")
    ] = "",
    shots: Annotated[
        int | None, typer.Option("--shots", min=0, help="Examples before a question; by default the task's.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first questions of a task.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat-template", help="Format questions with the tokenizer's chat template.")
    ] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Questions in one batch.")] = 8,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Evaluate a policy version with lm-eval's tasks.

    Scores go to the store's `evals`, one row for each task and metric with its standard error; a task that was
    evaluated before under the same settings is skipped. Needs pip install 'mopd-dataplane[eval]'. A task may download
    its questions.
    """
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
    print_fitting(list(COLUMNS.values()), [[row[name] for name in COLUMNS] for row in scores])
    note("scores are in `evals`, where finish_reason = 'benchmark'")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    example = "mopd eval runs/quickstart --tasks arc_easy,hellaswag --policy student --limit 200"
    register(app, evaluate, example, name="eval", panel=PANEL)
