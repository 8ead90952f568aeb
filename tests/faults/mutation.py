"""A rule of the package that is broken on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = "mopd_dataplane/"


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new` in `file`, of rollout/ unless it says another folder; `test` must fail.

    test: a row number, a pytest selection, or `simulator`. focus: operations that the simulator's sequences have often.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    focus: tuple[str, ...] = ()


def mutate(root: Path, mutation: Mutation) -> None:
    """Break the rule in the package under `root`. Raises ValueError unless its text is there exactly once."""
    file = root / PACKAGE / (mutation.file if "/" in mutation.file else f"rollout/{mutation.file}")
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: {mutation.file} has the text {text.count(mutation.old)} times, not once")
    file.write_text(text.replace(mutation.old, mutation.new))
