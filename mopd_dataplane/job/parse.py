"""Validation errors of pydantic as sentences, and the lines of the keys that they name; sections that another process
wrote as JSON, read back and checked."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.errors import InputError
from mopd_dataplane.job.section import Section

Parsed = TypeVar("Parsed", bound=Section)

_HEADER = re.compile(r"\s*\[(\[)?\s*([^\[\]]+?)\s*\]")
_ASSIGNED = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_NAMED = re.compile(r"""\s*name\s*=\s*["']([^"']*)["']""")


def problem_text(problem: Mapping[str, Any]) -> str:
    """One validation error as a sentence, with the value where it is short and no secret."""
    value = problem.get("input")
    hidden = isinstance(value, dict | list) or "://" in str(value)  # a URL may carry a password
    return str(problem["msg"]).removeprefix("Value error, ") + ("" if hidden else f", found {redacted(repr(value))}")


def problems_text(error: ValidationError, most: int = 20) -> str:
    """Every problem by its key, in one line."""
    errors = error.errors()
    lines = [f"{'.'.join(map(str, one['loc'])) or 'all of it'}: {problem_text(one)}" for one in errors[:most]]
    return "; ".join([*lines, *[f"and {len(errors) - most:,} more"] * (len(errors) > most)])


def parse_section(kind: type[Parsed], text: str, what: str) -> Parsed:
    """A section given as JSON text; `what` names the text in messages. Raises InputError naming each key."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise InputError(f"{what}: {problems_text(error)}") from None


def line_of(text: str, path: Sequence[str]) -> int | None:
    r"""Line of a TOML file, from 1, that sets a key; None when no line of it does.

    path: the key with its tables; an entry of an array of tables goes by its `name`.

    >>> line_of("[train]\nepochs = 1\n[[stages]]\nname = 'a'\nrollout = { top_k = 1 }", ["stages", "a", "rollout"])
    5
    """
    lines = text.splitlines()
    table: list[str] = []
    for number, line in enumerate(lines):
        if header := _HEADER.match(line):
            table = parts_of(header[2])
            if header[1]:
                table.append(_name_below(lines[number + 1 :]))
        elif assigned := _ASSIGNED.match(line):
            key = [*table, *parts_of(assigned[1])]
            rest = list(path[len(key) :])
            if key == list(path[: len(key)]) and all(re.search(rf"\b{re.escape(part)}\b", line) for part in rest):
                return number + 1
    return None


def parts_of(dotted: str) -> list[str]:
    """The parts of a dotted key, without their quotes."""
    return [part.strip("\"'") for part in _PART.findall(dotted)]


def _name_below(lines: Sequence[str]) -> str:
    """The `name` of the entry whose header stands above these lines; empty when it has none."""
    for line in lines:
        if _HEADER.match(line):
            break
        if named := _NAMED.match(line):
            return named[1]
    return ""
