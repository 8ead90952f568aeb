"""Examples of the documentation that need other libraries run, page by page, with the real ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from documented import PAGES, blocks, prepare, relative, run_blocks, write_base
from scored_store import TEACHER

from mopd_dataplane import Store

MARKED = [page for page in PAGES if any(block.mark == "ecosystem" for block in blocks(page))]
WINDOW = 90
"""The window of the store that has hidden states (scored_store.py)."""
ONE = f"--as traces --teacher {TEACHER}"
"""Two teachers have scored each of its samples."""
TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(8):
            yield SumTask(SumData(prompt=f"{n} + 4 =", answer=str(n + 4)), self.config.task)


__all__ = ["SumTaskset"]
"""


@pytest.mark.parametrize("page", MARKED, ids=relative)
def test_examples_run(
    page: Path, scored_store: Store, policy: Path, tmp_path: Path,
    write_lm_eval_task: Callable[[Path], list[dict[str, Any]]], write_hub_cache: Callable[[Path], Path],
) -> None:  # fmt: skip
    folder = prepare(Path(scored_store.uri), tmp_path / "page")
    write_base(folder, policy)
    version = folder / "runs" / "quickstart" / "policies" / "student" / "v1"
    shutil.rmtree(version)
    shutil.copytree(policy, version)
    (folder / "my_sums.py").write_text(TASKSET)
    write_lm_eval_task(folder / "tasks")
    home = write_hub_cache(tmp_path)
    chosen = [
        replace(block, text=block.text.replace("windows=[0]", f"windows=[{WINDOW}]").replace("--as traces", ONE))
        for block in blocks(page)
        if block.mark in ("ecosystem", "run", "fails")
    ]
    run_blocks(chosen, folder, HF_HOME=str(home), CUDA_VISIBLE_DEVICES="")


def test_the_page_of_other_libraries_is_among_them() -> None:
    assert [relative(page) for page in MARKED] == ["docs/integrations.md"]
