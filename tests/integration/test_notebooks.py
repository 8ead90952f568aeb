"""Notebooks are executed, and what they show is what they say now.

A cell tagged `varies` shows figures of a training run, which differ from one kind of processor to another: it must show
as many lines. Notebooks that train run in the slow tier.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


TRAIN = {"new_teacher", "own_trainer"}


def shown(notebook: Any) -> list[str | int]:
    """What each code cell printed, warnings aside; of one whose figures vary, how many lines."""
    told: list[str | int] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")
            told.append(text.count("\n") if "varies" in cell.metadata.get("tags", []) else text)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in TRAIN)) for path in NOTEBOOKS],
)
def test_notebook_shows_what_its_cells_print(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for data in (folder for folder in path.parent.iterdir() if folder.is_dir()):
        (tmp_path / data.name).symlink_to(data)
    stored = nbformat.read(path, as_version=4)
    fresh = copy.deepcopy(stored)
    nbclient.NotebookClient(fresh, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert shown(fresh) == shown(stored), f"run: jupyter execute --inplace {path}"
    assert any(shown(stored))
