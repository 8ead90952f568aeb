"""A section that another process wrote as JSON, read back and checked."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from mopd_dataplane.errors import InputError
from mopd_dataplane.job.sections import Section

Parsed = TypeVar("Parsed", bound=Section)


def parse_section(kind: type[Parsed], text: str, what: str) -> Parsed:
    """A section given as JSON text; `what` names the text in messages. Raises InputError naming each key."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'all of it'}: {p['msg']}" for p in error.errors())
        raise InputError(f"{what}: {problems}") from None
