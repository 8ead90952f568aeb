"""One iteration of jobs/smollm2, phase by phase, beside the same work in plain transformers and beside another trainer.

Three parts, each in processes of its own, one after the other: the job as a user runs it; plain transformers doing the
same work (step_floor.py); and TRL, where an interpreter has it (step_trl.py). All have the same
prompts, weights, dtype and number of threads; the job and TRL train on what they sampled themselves.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from mopd_dataplane.bench.crowd import DEADLINE_S, cpu_seconds, tree_pss_bytes
from mopd_dataplane.errors import EngineError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.load import load_job
from mopd_dataplane.store.dataset import Store

RECIPE, STAGE = "smollm2", "student"
LOOK_S = 2.0
"""Time between two looks at the memory of a part's processes; a look goes through their page tables, so few of them."""
PHASES = ("rollout", "reward", "score", "plan", "train")
_HERE = Path(__file__).parent


def measure(
    folder: Path, *, iterations: int, prompts: int, model: Path | None = None, peer_python: str = ""
) -> dict[str, Any]:
    """Figures of every part.

    folder: scratch. iterations: at least 2; the first of each part is left out, since it starts things up. prompts: of
    an iteration, which has two steps. model: the weights, if not those that the recipe fetches. peer_python: an
    interpreter with TRL; empty for none.
    Raises EngineError when a part fails; its messages are on stderr.
    """
    overrides = _overrides(folder, iterations, model, prompts)
    job = load_job(RECIPE, overrides=overrides)
    settings = [part for one in overrides for part in ("--set", one)]
    ours = _watched([sys.executable, "-m", "mopd_dataplane", "run", RECIPE, *settings])
    store = Store.open(job.store)
    (folder / "work.json").write_text(json.dumps(_work(job, store, iterations)))
    figures = {"here": ours | _phases(store, iterations)}
    figures["floor"] = _part([sys.executable, str(_HERE / "step_floor.py")], folder)
    if peer_python:
        figures["trl"] = _part([peer_python, str(_HERE / "step_trl.py")], folder)
    return figures


def _overrides(folder: Path, iterations: int, model: Path | None, prompts: int) -> list[str]:
    """The recipe without its evaluations, which no other part makes."""
    overrides = [
        f"store={json.dumps(str(folder / 'store'))}",
        f"stages.{STAGE}.iterations={iterations}",
        "domains.chain_sum.eval=0",
        "domains.letter_counting.eval=0",
        f"rollout.prompts_per_iteration={prompts}",
        f"engine.slots={prompts}",  # as many at once as TRL generates
        f"plan.batch_samples={prompts // 2}",
    ]
    if model is not None:
        overrides += ['student.gguf=""', f"student.path={json.dumps(str(model))}"]
    return overrides


def _part(command: list[str], folder: Path) -> dict[str, Any]:
    """Run a part; its own figures, with time and memory of its processes."""
    result_file = folder / "found.json"
    taken = _watched([*command, str(folder / "work.json"), str(result_file)])
    said: dict[str, Any] = json.loads(result_file.read_text())
    return taken | said


def _watched(command: list[str]) -> dict[str, Any]:
    """Run a command to its end: its wall and processor time, and the most memory of all its processes together."""
    began = time.perf_counter()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, env=environment, stdout=2)  # this command prints figures alone
    memory, processor = 0, 0.0
    try:
        while process.poll() is None:
            time.sleep(LOOK_S)
            try:
                memory = max(memory, tree_pss_bytes([process.pid]))
                processor = max(processor, cpu_seconds([process.pid]))
            except (OSError, StopIteration):
                continue  # one of them has just ended
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    if process.returncode:
        raise EngineError(f"{command[1:4]} ended with exit code {process.returncode}; its messages are above")
    return {
        "the run, s": time.perf_counter() - began, "processor, s": processor, "peak memory, GB": memory / 1e9
    }  # fmt: skip


def _work(job: Job, store: Store, iterations: int) -> dict[str, Any]:
    """Input of the other parts: settings, the prompts of every iteration, and what the job sampled."""
    stage = job.stage(STAGE)
    prompts = {one.prompt_id: one for one in store.prompts("train")}
    rows = store.samples(["stage", "iteration", "prompt_id", "prompt_len", "writer_seq"]).to_pylist()
    places = [index for index, row in enumerate(rows) if row["stage"] == STAGE]
    places.sort(key=lambda index: (rows[index]["iteration"], rows[index]["writer_seq"]))
    tokens = store.read_tokens(places, ["tokens"])["tokens"].to_pylist()
    last = [index for index in places if rows[index]["iteration"] == iterations - 1]
    return {
        "model": str(Path(job.store) / "policies" / "init") if job.student.gguf else job.student.path,
        "slots": job.engine.slots,
        "new_tokens": stage.rollout.max_new_tokens,
        "temperature": stage.rollout.temperature,
        "per_iteration": len(last),
        "batch_samples": stage.plan.batch_samples,
        "pack_tokens": stage.plan.pack_tokens,
        "learning_rate": stage.train.learning_rate,
        "iterations": iterations,
        "threads": len(os.sched_getaffinity(0)),
        "prompts": [_question(prompts[rows[index]["prompt_id"]]) for index in places],
        "samples": [
            _question(prompts[rows[index]["prompt_id"]]) | {"tokens": ids, "prompt_len": rows[index]["prompt_len"]}
            for index, ids in zip(places, tokens, strict=True)
            if rows[index]["iteration"] == iterations - 1
        ],
    }


def _question(prompt: Any) -> dict[str, str]:
    return {"text": prompt.text, "context": prompt.teacher_context}


def _phases(store: Store, iterations: int) -> dict[str, Any]:
    """Seconds of an iteration and of its phases: medians over all iterations but the first."""
    events = [row for row in store.table("events").to_pylist() if row["kind"] == "stage_time" and row["stage"] == STAGE]
    spent: dict[str, list[float]] = {name: [] for name in PHASES}
    ended: dict[int, datetime] = {}
    for event in sorted(events, key=lambda event: event["created_at"]):
        action = json.loads(event["detail"])["action"]
        if action in spent and event["iteration"] > 0:
            spent[action].append(event["value"])
        if action == "train":
            ended[event["iteration"]] = event["created_at"]
    steps: dict[int, float] = {}
    for row in store.table("steps").to_pylist():
        if row["stage"] == STAGE and row["window"] > 0:
            steps[row["window"]] = steps.get(row["window"], 0.0) + row["step_time_s"]
    whole = [(ended[one] - ended[one - 1]).total_seconds() for one in range(1, iterations)]
    return {
        "an iteration, s": statistics.median(whole),
        **{f"{name}, s": statistics.median(values) for name, values in spent.items() if values},
        "train, steps alone, s": statistics.median(steps.values()),  # the rest: the policy is written, and found
        "response tokens": sum(
            row["response_len"]
            for row in store.samples(["stage", "response_len", "iteration"]).to_pylist()
            if row["stage"] == STAGE and row["iteration"] > 0
        )
        / (iterations - 1),
    }
