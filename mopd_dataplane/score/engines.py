"""Engines that run teachers, by name (`score.engine`), and their capabilities. Importing this loads none of them."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScoringEngine:
    """A way to run teachers. Its attributes say what a job may ask of it."""

    quantises: bool = False
    """Whether it applies a teacher's `quantisation`."""
    here: bool = False
    """Whether it runs in this process, on `score.device`."""
    settings: tuple[str, ...] = ()
    """Keys of `[score]` that are its alone."""
    package: str = ""
    """Module that must be installed where it runs; empty for none."""


SCORING: dict[str, ScoringEngine] = {
    "hf": ScoringEngine(quantises=True, here=True),
    "vllm": ScoringEngine(settings=("reads", "options"), package="vllm"),
}
"""By the name that `score.engine` gives it."""


def engines_that(can: Callable[[ScoringEngine], bool]) -> str:
    """Those that can do something, as a job names them: for messages.

    >>> engines_that(lambda engine: engine.quantises)
    '"hf"'
    """
    return " or ".join(f'"{name}"' for name, engine in SCORING.items() if can(engine))
