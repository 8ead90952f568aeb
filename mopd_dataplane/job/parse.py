"""Validation errors of pydantic as sentences; sections that another process wrote as JSON, read back and checked."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.errors import InputError
from mopd_dataplane.job.sections import Section

Parsed = TypeVar("Parsed", bound=Section)


def problem_text(problem: Mapping[str, Any]) -> str:
    """One validation error as a sentence, with the value where it is short and no secret."""
    found = problem.get("input")
    hidden = isinstance(found, dict | list) or "://" in str(found)  # a URL may carry a password
    return str(problem["msg"]).removeprefix("Value error, ") + ("" if hidden else f", found {redacted(repr(found))}")


def problems_text(error: ValidationError, most: int = 20) -> str:
    """Every problem by its key, in one line."""
    found = error.errors()
    said = [f"{'.'.join(map(str, one['loc'])) or 'all of it'}: {problem_text(one)}" for one in found[:most]]
    return "; ".join([*said, *[f"and {len(found) - most:,} more"] * (len(found) > most)])


def parse_section(kind: type[Parsed], text: str, what: str) -> Parsed:
    """A section given as JSON text; `what` names the text in messages. Raises InputError naming each key."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise InputError(f"{what}: {problems_text(error)}") from None
