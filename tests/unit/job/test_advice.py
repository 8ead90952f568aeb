"""Every next step that a refusal of a job file names works: the job that was refused is changed as its message says,
and is accepted then."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from refused_job import Refusal, edited
from stage_refusals import OF_STAGES
from teacher_refusals import OF_TEACHERS

import mopd_dataplane.job
from mopd_dataplane.errors import JobFileError
from mopd_dataplane.job.load import check_job

REFUSALS = [*OF_TEACHERS, *OF_STAGES]
ADVICE = re.compile(r"\b(?:lower|raise|set|give|run)\b")
NOT_HERE = {
    "learning_rate.py": "raised while training, for a plan of unknown length",
    "read.py": "what --set takes: tests/integration/test_bad_input.py",
    "recipes.py": "which job file there is: tests/integration/test_first_hour.py",
    "sweep.py": "values of a sweep: test_sweep_plan.py",
}
"""Files of the package whose messages are about something else than the values of a job, and where they are tried."""


def message_of(edits: dict[str, Any]) -> str:
    with pytest.raises(JobFileError) as refused:
        check_job(edited(edits), where="job")
    return str(refused.value)


def test_the_job_is_sound() -> None:
    check_job(edited(), where="job")


@pytest.mark.parametrize("refusal", REFUSALS, ids=[", ".join(refusal.edits)[:60] for refusal in REFUSALS])
def test_what_a_refusal_advises_is_accepted(refusal: Refusal) -> None:
    message = message_of(refusal.edits)
    for words, edits in refusal.advised:
        assert words in message
        check_job(edited(refusal.edits, edits), where="job")


def test_every_message_with_advice_is_tried() -> None:
    """A new message in the checks of a job file needs a job here that brings it up."""
    messages = " ".join(message_of(refusal.edits) for refusal in REFUSALS)
    untried = []
    for file in sorted(Path(mopd_dataplane.job.__file__).parent.glob("*.py")):
        if file.name in NOT_HERE:
            continue
        for statement in ast.walk(ast.parse(file.read_text())):
            parts = _texts(statement)
            if ADVICE.search(" ".join(parts)) and max(parts, key=len) not in messages:
                untried.append(f"{file.name}:{statement.lineno}: {max(parts, key=len)}")
    assert untried == []


def _texts(statement: ast.AST) -> list[str]:
    """Fixed parts of a message that is raised, or of one that `problem` names."""
    is_named = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "problem"
    if not (is_named or isinstance(statement, ast.Raise)):
        return []
    value = statement.value if isinstance(statement, ast.Assign) else statement.exc
    if value is None:
        return []
    return [one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
