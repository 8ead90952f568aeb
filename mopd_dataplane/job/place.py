"""Finds the line of a key in a job file, for error messages."""

import re
from collections.abc import Sequence

_HEADER = re.compile(r"\s*\[(\[)?\s*([^\[\]]+?)\s*\]")
_ASSIGNED = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_NAMED = re.compile(r"""\s*name\s*=\s*["']([^"']*)["']""")


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
            table = _parts(header[2])
            if header[1]:
                table.append(_name_below(lines[number + 1 :]))
        elif assigned := _ASSIGNED.match(line):
            key = [*table, *_parts(assigned[1])]
            rest = list(path[len(key) :])
            if key == list(path[: len(key)]) and all(re.search(rf"\b{re.escape(part)}\b", line) for part in rest):
                return number + 1
    return None


def _parts(dotted: str) -> list[str]:
    return [part.strip("\"'") for part in _PART.findall(dotted)]


def _name_below(lines: Sequence[str]) -> str:
    """The `name` of the entry whose header stands above these lines; empty when it has none."""
    for line in lines:
        if _HEADER.match(line):
            break
        if named := _NAMED.match(line):
            return named[1]
    return ""
