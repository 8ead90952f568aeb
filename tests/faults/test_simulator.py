"""The simulator itself: a seed decides everything, a broken rule is found, and what is printed is short."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from simulator.model import Model
from simulator.operations import Writer, operation
from simulator.run import Template, open_template, run_steps, shortest, template_folder
from simulator.sequences import MACHINE, WEIGHTS, Fault, Step, sequence

SCRIPT = Path(__file__).with_name("simulation.py")
DEFECTS = {
    "a manifest of a lost reply, torn below an acknowledged one": [
        Step(1, "import", 451, Fault("lost reply", 1)), Step(2, "commit", 721), Step(0, "power loss", 199),
        Step(0, "compact", 859), Step(0, "audit", 0),
    ],
    "a snapshot whose tags were not synced": [
        Step(0, "tag", 502), Step(1, "commit", 396), Step(0, "power loss", 891), Step(0, "audit", 0),
    ],
    "a snapshot in a folder whose name was not synced": [
        Step(1, "tag", 1), Step(0, "power loss", 886), Step(0, "audit", 0),
    ],
    "a deletion in a folder whose name was not synced": [
        Step(1, "commit", 856), Step(0, "delete", 357, Fault("suspended", 6)), Step(0, "power loss", 448),
        Step(0, "audit", 0),
    ],
    "two processes that pin one tag": [
        Step(2, "tag", 265, Fault("suspended", 6)), Step(0, "commit", 757), Step(1, "tag", 868), Step(0, "audit", 0),
    ],
    "a copy whose folder was not synced": [
        Step(2, "commit", 331), Step(2, "copy where", 117), Step(0, "power loss", 766), Step(0, "end", 0),
    ],
    "a version that was merged and dropped between its sync and its acknowledgement": [
        Step(0, "commit", 808), Step(0, "commit", 200, Fault("suspended", 10)), Step(1, "compact now", 179),
        Step(0, "label", 63), Step(0, "audit", 0),
    ],
    "a version that was merged and dropped while its files were synced": [
        Step(1, "commit", 691), Step(1, "label", 618), Step(0, "clock", 131),
        Step(0, "commit", 775, Fault("suspended", 10)), Step(2, "compact", 645), Step(0, "end", 0),
    ],
    "a snapshot that a deletion overtook": [
        Step(2, "commit", 660), Step(0, "tag", 328, Fault("suspended", 0)), Step(2, "delete", 148), Step(0, "end", 0),
    ],
    "a snapshot of a version that a killed writer had not synced": [
        Step(0, "commit", 0, Fault("killed", 12)), Step(2, "tag", 67, Fault("suspended", 1)), Step(2, "delete", 270),
        Step(0, "power loss", 923), Step(1, "commit", 646), Step(1, "delete", 357), Step(0, "end", 0),
    ],
    "a copy in a folder that a killed copy had made and not synced": [
        Step(1, "copy", 549, Fault("killed", 0)), Step(0, "copy", 37), Step(0, "power loss", 251), Step(0, "end", 0),
    ],
    "a copied table in a folder whose name was not synced": [
        Step(1, "import", 191), Step(2, "score", 595), Step(2, "copy where", 331), Step(0, "power loss", 581),
        Step(0, "end", 0),
    ],
}  # fmt: skip
"""What the seeds found in the product, as the shortest sequences that failed."""


SOUND = {
    "a tag that an unfinished deletion will take is asked for again": [
        Step(0, "tag", 351, Fault("suspended", 1)), Step(2, "commit", 411),
        Step(2, "delete", 385, Fault("suspended", 2)), Step(0, "tag", 45), Step(0, "end", 0),
    ],
    "a fork is refused whose run lost samples meanwhile": [
        Step(0, "fork", 80, Fault("suspended", 8)), Step(1, "commit", 357), Step(2, "delete", 475),
        Step(0, "end", 0),
    ],
    "a put that died while an earlier one was stopped became the last": [
        Step(2, "put", 701), Step(1, "put", 902, Fault("suspended", 10)), Step(2, "put", 822, Fault("killed", 6)),
        Step(1, "commit", 859), Step(0, "end", 0),
    ],
}  # fmt: skip
"""What the seeds found, and the model once took for a fault."""


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with template_folder() as folder:
        yield open_template(folder)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("steps", [*DEFECTS.values(), *SOUND.values()], ids=[*DEFECTS, *SOUND])
def test_what_the_seeds_found_holds(template: Template, steps: list[Step], shift: int) -> None:
    """Also one pause later, since the product has gained one in some operations."""
    shifted = [
        replace(step, fault=step.fault and replace(step.fault, after=step.fault.after + shift)) for step in steps
    ]
    assert run_steps(shifted, template).violation == ""


def test_a_seed_decides_everything(template: Template) -> None:
    first, second = (run_steps(sequence(2), template) for _ in range(2))
    assert first.violation == second.violation == ""
    assert first.trace == second.trace
    assert len(first.trace) == len(sequence(2))


def test_every_operation_and_fault_comes_up_in_the_seeds() -> None:
    steps = [step for seed in range(400) for step in sequence(seed)]
    assert {step.operation for step in steps} == {*WEIGHTS, *MACHINE}
    kinds = {step.fault.kind for step in steps if step.fault is not None}
    assert kinds == {"killed", "suspended", "disk full", "failed sync", "lost reply"}


@pytest.mark.slow
def test_a_fork_and_its_run_do_not_change_each_other(template: Template) -> None:
    """Either is compacted and cleaned up, and loses samples, while the other is read."""
    focus = ("fork", "delete", "compact now", "compact a fork", "delete from a fork")
    outcomes = [run_steps(sequence(seed, focus), template) for seed in range(12)]
    assert [outcome.violation for outcome in outcomes if outcome.violation] == []
    lines = [line for outcome in outcomes for line in outcome.trace]
    for operation_of_forks in focus[-2:]:
        assert any(operation_of_forks in line and "fork-" in line for line in lines)


def test_a_clearing_that_does_nothing_is_found(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Step(0, "put", 0), Step(0, "put", 50), Step(0, "put", 90), Step(1, "clear", 0)]
    assert run_steps(steps, template).violation == ""
    monkeypatch.setattr("mopd_dataplane.store.queue.committed.CommittedQueue.clear", lambda queue, keys: None)
    assert run_steps(steps, template).violation.startswith("I10: queue")


def test_a_broken_rule_is_found(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that stalls across a deletion, and does not look at the deletions a second time."""
    commit = Step(0, "commit", 463, Fault("suspended", 0))
    writer = Writer.open(f"{template.folder}/home", template.folder / "rows")
    [uid, *_] = sorted(operation("commit", writer, Model(), commit.choice).attempt.uids)
    choices = (choice for choice in range(1000) if uid in operation("delete", writer, Model(), choice).told)
    delete = Step(1, "delete", next(choices))
    steps = [Step(2, "label", 0), commit, Step(1, "commit", 463), Step(2, "ask", 0), delete, Step(0, "end", 0)]
    assert run_steps(steps, template).violation == ""
    monkeypatch.setattr("mopd_dataplane.store.dataset.apply_deletions_since", lambda store, names: None)
    assert run_steps(steps, template).violation.startswith("I8: samples has")
    rest = shortest(steps, lambda some: run_steps(some, template).violation.startswith("I8"))
    assert rest == [commit, Step(1, "commit", 463), delete, Step(0, "end", 0)]


def test_the_shortest_sequence_has_neither_a_step_nor_a_fault_too_many() -> None:
    steps = [Step(0, "commit", number, Fault("killed", number)) for number in range(16)]
    needed = {3, 11}

    def fails(some: list[Step]) -> bool:
        return needed <= {step.choice for step in some} and any(step.fault and step.choice == 11 for step in some)

    assert shortest(steps, fails) == [Step(0, "commit", 3), Step(0, "commit", 11, Fault("killed", 11))]


@pytest.mark.slow
def test_a_call_goes_on_where_an_earlier_one_was_interrupted(tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    notes.write_text('{"seed": 0, "violation": ""}\n{"seed": 1, "violation": ""}\n{"seed": 2, "vio')
    command = [sys.executable, str(SCRIPT), "--seeds", "3", "--jobs", "1", "--notes", str(notes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 of 3 seeds run, 0 failed")
    lines = notes.read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 1, 2]


def test_the_page_names_the_invariants_that_the_simulator_checks() -> None:
    page = (SCRIPT.parents[2] / "docs" / "durability.md").read_text()
    listed = re.findall(r"^\| (I\d+) \|", page, re.MULTILINE)
    source = "".join(file.read_text() for file in (SCRIPT.parent / "simulator").glob("*.py"))
    assert listed == [f"I{number}" for number in range(1, len(listed) + 1)]
    assert set(re.findall(r'"(I\d+)[:"]', source)) == set(listed)
