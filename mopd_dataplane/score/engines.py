"""Engines that run teachers, by name (`score.engine`), and their capabilities. Importing this loads none of them."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScoringEngine:
    """A way to run teachers. Its attributes tell which settings a job may use with it."""

    quantises: bool = False
    """True if it applies a teacher's `quantisation`."""
    here: bool = False
    """True if it runs in this process, on `score.device`."""
    settings: tuple[str, ...] = ()
    """Keys of `[score]` that only this engine uses."""
    package: str = ""
    """Module that must be installed on its machine; empty for none."""


SCORING: dict[str, ScoringEngine] = {
    "hf": ScoringEngine(quantises=True, here=True),
    "vllm": ScoringEngine(settings=("reads", "options"), package="vllm"),
}
"""Engines by their names in `score.engine`."""


SERVER_READS = ("echo", "sglang")
"""Values of `score.reads` that only a running server has."""
LOGPROB_READS = ("prompt_logprobs", *SERVER_READS)
"""Values of `score.reads` with which a teacher gives log-probs of text and no hidden states."""
CHOSEN_READS = ("sglang",)
"""Those of LOGPROB_READS with which a teacher also gives log-probs of tokens that a request names."""


def engines_that(can: Callable[[ScoringEngine], bool]) -> str:
    """List the engines with a capability, as written in a job, for messages.

    >>> engines_that(lambda engine: engine.quantises)
    '"hf"'
    """
    return " or ".join(f'"{name}"' for name, engine in SCORING.items() if can(engine))
