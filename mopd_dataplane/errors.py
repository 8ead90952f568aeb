"""One error tree. Every class is also a standard exception, so callers may catch either.

    MopdError                              exit code
    ├── InputError(ValueError)                2   what the user gave cannot be used
    │   ├── JobFileError                          the job file: unknown key, wrong type, missing teacher
    │   ├── PromptError                           prompts: empty file, too long for the budget
    │   ├── UnknownNameError(LookupError)         a domain, teacher, table or sample that does not exist
    │   ├── MismatchError                         two digests, schemas or sizes that must agree do not
    │   └── QueryError                            SQL that is not a single read-only statement
    ├── DamagedError(OSError)                 3   bytes on disk are not what was written
    ├── ResourceError(OSError)                4   no space, no memory, a lock held by someone else
    ├── DeadlineError(TimeoutError)           5   a peer did not answer in time
    └── EngineError(RuntimeError)             6   an engine returned garbage or died

A message names the value found, the values allowed and the next step.
"""

import difflib
from collections.abc import Collection, Iterable


class MopdError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class InputError(MopdError, ValueError):
    """An input that cannot be used; nothing was written."""

    exit_code = 2


class JobFileError(InputError):
    """The job file has an unknown key, a wrong type or a dangling reference."""


class PromptError(InputError):
    """Prompts cannot be read, are empty, or exceed the token budget."""


class UnknownNameError(InputError, LookupError):
    """A name (domain, teacher, table, stage, sample) that does not exist."""


class MismatchError(InputError):
    """Two things that must agree do not: digest, tokenizer, vocabulary, schema, version."""


class QueryError(InputError):
    """SQL that is refused: not read-only, several statements, unknown table."""


class DamagedError(MopdError, OSError):
    """Bytes on disk are not what was written; nothing was changed."""

    exit_code = 3


class ResourceError(MopdError, OSError):
    """The machine lacks space or memory, or another process holds the lock."""

    exit_code = 4


class DeadlineError(MopdError, TimeoutError):
    """A peer process did not answer before its deadline."""

    exit_code = 5


class EngineError(MopdError, RuntimeError):
    """A generation or scoring engine returned garbage (NaN, impossible token) or died."""

    exit_code = 6


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Suffix for a message: the known names, and the nearest one if there is a plausible match.

    >>> nearest("maths", ["math", "code"])
    "known: code, math; did you mean 'math'?"
    """
    names = sorted(candidates)
    match = difflib.get_close_matches(name, names, n=1)
    listing = "known: " + (", ".join(names) if names else "none")
    return f"{listing}; did you mean {match[0]!r}?" if match else listing


def require_known(name: str, names: Collection[str], refusal: str, kind: type[MopdError] = UnknownNameError) -> None:
    """Raise an error of a kind, `refusal 'name'` with the known names and the nearest, for a name that is not known."""
    if name not in names:
        raise kind(f"{refusal} {name!r}: {nearest(name, names)}")
