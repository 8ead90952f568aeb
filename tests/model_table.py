"""Writes the tables of docs/models.md: families, and all causal LM classes, beside their plain pass (`make models`)."""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from causal_classes import causal_classes, outcome_of
from families import FAMILIES, measure
from transformers import PreTrainedModel

from mopd_dataplane.errors import MopdError
from mopd_dataplane.job.sections import Lora, Student
from mopd_dataplane.models.adapters import new_adapter, trained_tensors
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student

START, END = "<!-- families -->", "<!-- end of families -->"
WITHIN = 1e-4
"""Largest difference of a model that is right, in nat."""
VLLM_VERSION, *VLLM = (Path(__file__).parent / "data" / "vllm_classes.txt").read_text().split()
"""vLLM's version, and the classes that it lists; `make test-vllm` compares them with the installed one."""
DIFFERS = re.compile(
    r"^.* does not compute what (\w+) \(\S+\) computes by itself: log-probs differ by (\S+) nat in the mean, "
    r"from token (\d+) of the compared ones on, and (\S+) is allowed in \S+"
)
"""The error of a self-check: class, difference in nat, first token that differs, largest difference allowed."""
ALL, END_OF_ALL = "<!-- classes -->", "<!-- end of classes -->"


def row(name: str) -> str:
    """The table's row of a family."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_student(Student(config=FAMILIES[name]), Path(scratch) / "model", seed=3)
        model = load_model(folder)
        beside = f"{_adapter(model)} | {'yes' if type(model).__name__ in VLLM else 'no'}"
        try:
            measurement = measure(folder)
        except MopdError as error:
            reason = in_a_cell(str(error))
            return f"| {name} | rejected | – | – | – | {beside} | {reason} |"
        layout = "packed" if measurement.layout == "packed" else "one sequence per row"
        cells = (measurement.sampler, measurement.resumed, measurement.teacher, measurement.trainer)
        figures = " | ".join(f"{cell:.0e}" for cell in cells)
        return f"| {name} | {figures} | {beside} | {layout} |"


def in_a_cell(message: str) -> str:
    """Shorten the error that rejects a model to the text of a table's cell: without the advice, and without paths."""
    first = message.partition("; set engine")[0].partition(". Nothing was")[0].partition("\n")[0]
    first = re.sub(r"(/\S+)+/", "", first).replace("|", "\\|")
    first = first.replace("the model in model cannot be read", "the model could not be loaded")
    return DIFFERS.sub(r"log-probs differ from \1 by \2 nat (mean; limit \4), from compared token \3 on", first)


def classes() -> str:
    """What every causal LM class of transformers ends with: two lists and a table."""
    outcomes = {}
    for name in causal_classes():
        with tempfile.TemporaryDirectory() as scratch:
            outcomes[name] = outcome_of(name, Path(scratch) / "model")
    right = [name for name, outcome in outcomes.items() if outcome.kind == "measured" and outcome.worst < WITHIN]
    refused = {name: outcome for name, outcome in outcomes.items() if outcome.kind == "refused"}
    apart = {name: outcome for name, outcome in outcomes.items() if outcome.kind == "not tried"}
    wrong = outcomes.keys() - {*right, *refused, *apart}
    if wrong:
        raise SystemExit(f"further than {WITHIN} nat from the plain pass: {', '.join(sorted(wrong))}")
    rows = [
        f"| {name} | {'yes' if outcome.is_scored else 'rejected'} | {in_a_cell(outcome.reason)} |"
        for name, outcome in refused.items()
    ]
    return "\n".join([
        f"**Match within {WITHIN:g} nat** ({len(right)} types): {', '.join(right)}.", "",
        f"**Rejected by the built-in sampler** ({len(refused)} types):", "", "| type | teacher and trainer | why |",
        "|---|---|---|", *rows, "", f"**Not tried** ({len(apart)} types):", "",
        *(f"- {name}: {outcome.reason}" for name, outcome in apart.items()),
    ])  # fmt: skip


def _adapter(model: PreTrainedModel) -> str:
    """Whether an adapter on all linear layers can be trained."""
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    try:
        new_adapter(model, Lora(r=2))
    except MopdError as error:
        return "refused by peft" if "PEFT" in str(error) else f"no: {error!s:.80}"
    adapted = any("experts" in name for name in trained_tensors(model))
    return "yes, not on experts" if has_experts and not adapted else "yes"


def main() -> None:
    """Measure every family and rewrite the table between the page's markers."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    page = Path(sys.argv[1])
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, peft {peft.__version__}"
    head = (
        "| family | sampler | resumed | teacher | trainer | LoRA on `all-linear` | vLLM | trainer's layout, or why "
        "rejected |"
    )
    rows = [row(name) for name in FAMILIES]
    table = "\n".join(
        [
            f"{versions}; float32. *vLLM*: whether vLLM {VLLM_VERSION} lists the class.",
            "",
            head,
            "|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
    text = page.read_text()
    for start, end, part in ((START, END, table), (ALL, END_OF_ALL, classes())):
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{part}\n{end}{rest.partition(end)[2]}"
    page.write_text(text)


if __name__ == "__main__":
    main()
