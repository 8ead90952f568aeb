"""Writes the table of docs/models.md: each family of tests/families.py beside its plain pass (`make models`)."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from families import FAMILIES, measure
from transformers import PreTrainedModel

from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.sections import Lora, Student
from mopd_dataplane.models.adapters import new_adapter, trained_tensors
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student

START, END = "<!-- families -->", "<!-- end of families -->"


def row(name: str) -> str:
    """The table's row of a family."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_student(Student(config=FAMILIES[name]), Path(scratch) / "model", seed=3)
        adapter = _adapter(load_model(folder))
        try:
            found = measure(folder)
        except MopdError as error:
            reason = str(error).partition("; set engine")[0].partition(". Nothing was")[0].replace("|", "\\|")
            return f"| {name} | refused | – | – | – | {adapter} | {reason} |"
        layout = "packed" if found.layout == "packed" else "a row a sequence"
        cells = (found.sampler, found.resumed, found.teacher, found.trainer)
        figures = " | ".join(f"{cell:.0e}" for cell in cells)
        return f"| {name} | {figures} | {adapter} | {layout} |"


def _adapter(model: PreTrainedModel) -> str:
    """Whether an adapter on all linear layers can be trained."""
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    try:
        new_adapter(model, Lora(r=2))
    except MopdError as error:
        return "refused by peft" if "PEFT" in str(error) else f"no: {error!s:.80}"
    adapted = any("experts" in name for name in trained_tensors(model))
    return "without experts" if has_experts and not adapted else "yes"


def main() -> None:
    """Measure every family and rewrite the table between the page's markers."""
    warnings.simplefilter("ignore")
    page = Path(sys.argv[1])
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, peft {peft.__version__}"
    head = (
        "| family | sampler | resumed | teacher | trainer | `all-linear` adapter | trainer's layout, or why refused |"
    )
    rows = [row(name) for name in FAMILIES]
    table = "\n".join([f"{versions}; float32.", "", head, "|---|---|---|---|---|---|---|", *rows])
    before, _, rest = page.read_text().partition(START)
    page.write_text(f"{before}{START}\n{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
