"""Policies of a store evaluated by lm-eval (lm-evaluation-harness): one row of `evals` for each task and metric.

lm-eval's questions are not prompts of the store, so a row is the score of a whole task: `domain` is the task, `reward`
the score, `stderr` its own standard error, `finish_reason` says `benchmark`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd_dataplane.errors import InputError, UnknownNameError, require_known
from mopd_dataplane.models.devices import resolve_device
from mopd_dataplane.models.hf import load_merged, load_tokenizer
from mopd_dataplane.run.work_folder import open_work
from mopd_dataplane.store.dataset import Store

BENCHMARK = "benchmark"
"""`finish_reason` of a row that is a score."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Settings of an evaluation: shots, limit, chat template, folder of tasks.

    Example: EvalSettings(tasks=("arc_easy",), limit=200).
    """

    tasks: tuple[str, ...]
    """Names that lm-eval knows, or that a YAML file under include_path defines."""
    include_path: str = ""
    """Folder of task definitions besides lm-eval's own."""
    shots: int | None = None
    """Examples in front of each question; None is the task's own number."""
    limit: int | None = None
    """Only the first questions of each task."""
    chat_template: bool = False
    batch_size: int = 8
    dtype: str = "float32"
    device: str = "auto"

    def name(self, metric: str, sieve: str) -> str:
        """Name of a score, which distinguishes it from scores of the task under other settings."""
        how = [metric, sieve, f"{'default' if self.shots is None else self.shots}-shot"]
        how += [f"first {self.limit}"] if self.limit else []
        return ", ".join([*how, *(["chat"] if self.chat_template else [])])


def evaluate_policy(
    store: Store, policy: str, version: int | None, settings: EvalSettings, work: str = "",
    *, progress: Callable[[str], None] = lambda task: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Ask tasks of a policy version (None: the newest) and record the scores; those recorded already are not asked.

    Returns the scores of the tasks as rows of `evals`. A task is recorded when it is done, so an interrupted evaluation
    continues with the next one. work: folder that a store on an object store is worked on from.
    Raises UnknownNameError for a policy, a version or a task that does not exist, InputError for a broken task file.
    """
    folder, version = policy_folder(store, policy, version, work)
    recorded = _recorded(store, policy, version, settings)
    todo = [task for task in settings.tasks if not any(_is_of(row, task) for row in recorded)]
    if todo:
        manager = _tasks(todo, settings)
        model = _model(folder, settings)
        for task in todo:
            progress(task)
            store.add_evals(list(_scores(_asked(model, manager, task, settings), policy, version, settings, task)))
    return _recorded(store, policy, version, settings)


def policy_folder(store: Store, policy: str, version: int | None, work: str = "") -> tuple[Path, int]:
    """Weights of a policy version, here, and the version. Raises UnknownNameError."""
    work_folder = open_work(store, work)
    stages = [name for name in work_folder.published("policies") if name != "init"]
    require_known(policy, stages, f"{store.uri} has no policy")
    names = work_folder.published(f"policies/{policy}")
    versions = sorted(int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdigit())
    if not versions or (version is not None and version not in versions):
        missing = f"version {version}; it has {versions}" if versions else "version that is stored"
        raise UnknownNameError(f"{store.uri}: policy {policy!r} has no {missing}")
    chosen = versions[-1] if version is None else version
    name = f"policies/{policy}/v{chosen}"
    work_folder.fetch(name)
    return work_folder.root / name, chosen


def _recorded(store: Store, policy: str, version: int, settings: EvalSettings) -> list[dict[str, Any]]:
    """Scores of the tasks under the same settings."""
    if not store.has_column("evals", "metric"):
        return []
    rows = store.table(
        "evals", ["policy", "policy_version", "prompt_id", "domain", "metric", "reward", "stderr", "documents"],
        filter=f"policy = '{policy}' AND policy_version = {version} AND finish_reason = '{BENCHMARK}'",
    ).to_pylist()  # fmt: skip
    return [
        row for row in rows
        if any(_is_of(row, task) for task in settings.tasks)
        and row["metric"] == settings.name(*row["metric"].split(", ")[:2])
    ]  # fmt: skip


def _is_of(row: dict[str, Any], task: str) -> bool:
    """Whether a score was asked for by this name: that of a task, or of a group it belongs to."""
    prompt_id: str = row["prompt_id"]
    return prompt_id.startswith(f"lm-eval:{task}:")


def _tasks(names: Sequence[str], settings: EvalSettings) -> Any:
    from lm_eval.tasks import TaskManager

    if settings.include_path and not Path(settings.include_path).is_dir():
        raise InputError(f"--include-path {settings.include_path} is not a folder; name one with task definitions")
    manager = TaskManager(include_path=settings.include_path or None)
    for name in names:
        require_known(name, manager.all_tasks, "lm-eval knows no task")
    return manager


def _model(folder: Path, settings: EvalSettings) -> Any:
    from lm_eval.models.huggingface import HFLM

    model = load_merged(folder, dtype=settings.dtype, device=resolve_device(settings.device))
    return HFLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=settings.batch_size)


def _asked(model: Any, manager: Any, task: str, settings: EvalSettings) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    results = simple_evaluate(
        model, tasks=[task], num_fewshot=settings.shots, limit=settings.limit, task_manager=manager,
        apply_chat_template=settings.chat_template, log_samples=False,
    )  # fmt: skip
    if results is None:
        raise InputError(f"lm-eval gave no result for task {task!r}; see its messages above")
    return dict(results)


def _scores(
    results: dict[str, Any], policy: str, version: int, settings: EvalSettings, lm_task: str
) -> Iterable[dict[str, Any]]:
    counts = results.get("n-samples", {})
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, sieve = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{sieve}")
            name = settings.name(metric, sieve)
            yield {
                "policy": policy, "policy_version": version, "prompt_id": f"lm-eval:{lm_task}:{task}: {name}",
                "domain": task, "reward": float(value), "reverse_kl": None, "response": "", "response_len": 0,
                "finish_reason": BENCHMARK, "metric": name,
                "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                "documents": int(counts.get(task, {}).get("effective", 0)) or None,
            }  # fmt: skip
