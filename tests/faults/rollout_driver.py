"""Runs rollouts in forked children that kill themselves with SIGKILL at a named point.

One JSON object per line on stdin: {"home": …, "point": …, "visit": n, "prompts": …, "engine": "toy" or a model folder};
one line on stdout per rollout: the child's exit code (negative: the signal) and what its report says. Forking from a
process that has imported everything makes one attempt cost what its work costs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from shelf import Shelf

from mopd_dataplane.base import fault_points
from mopd_dataplane.job import sections
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.engine import Engine
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.testing.toy_engine import ToyEngine


def attempt(task: dict[str, Any]) -> dict[str, Any]:
    """One rollout in this process; dies on the `visit`-th pass of `point`."""
    left = task["visit"]

    def die(name: str) -> None:
        nonlocal left
        if name == task["point"]:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    fault_points.observe(die)
    home = Path(task["home"])
    home.mkdir(exist_ok=True)
    shelf = Shelf(home / "shelf.jsonl")
    toy = task["engine"] == "toy"
    engine: Engine = ToyEngine(slots=16) if toy else HfEngine(task["engine"], slots=16)
    prompts = [Prompt(prompt_id=f"p{i}", domain="d", text=f"{i} + {7 * i} =") for i in range(task["prompts"])]
    report = run_rollout(
        engine,
        prompts,
        RolloutTask(
            stage="student",
            iteration=1,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=48),
            wal=sections.Wal(segment_bytes=1 << 15),
            wal_dir=home / "wal",
            render=lambda prompt: [ord(c) % 12 for c in prompt.text] if toy else engine.tokenizer.encode(prompt.text),
        ),
        commit=shelf.commit,
        skip_uids=shelf.uids,
    )
    return {"samples": report.samples, "resumed": report.resumed, "exact": report.exact, "drift": report.max_drift}


def main() -> None:
    """Serve attempts until stdin ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        task = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.write(writing, json.dumps(attempt(task)).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as answer:
            report = answer.read()
        _, status = os.waitpid(child, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)} | json.loads(report or "{}")), flush=True)


if __name__ == "__main__":
    main()
