"""Settings of the simulated fleet, which are the options of `mopd bench fleet`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

GROUP_SIZE = 4
"""Samples of a prompt."""


@dataclass(frozen=True)
class Lengths:
    """Distribution of the lengths of responses.

    Example: Lengths(mean_tokens=400, longest=8192, multi_turn=0.3).
    """

    mean_tokens: int
    """Mean tokens of a turn, without the long tail."""
    longest: int
    """Most tokens of a response, replies included."""
    multi_turn: float
    """Share of the responses with two or more turns."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Size and speed of the simulated fleet; its fields are options of `mopd bench fleet`.

    Example: Fleet(engines=8, scorers=4, trainers=2, samples=10_000).
    """

    engines: Annotated[int, Option("--engines", min=1, help="Engine processes.")] = 4
    scorers: Annotated[int, Option("--scorers", min=1, help="Scorer processes, each with a teacher.")] = 2
    trainers: Annotated[int, Option("--trainers", min=1, help="Trainer processes, each with a stage.")] = 1
    slots: Annotated[int, Option("--slots", min=1, help="Sequences that an engine decodes together.")] = 64
    samples: Annotated[int, Option("--samples", min=1, help="Samples of the run, rounded up to whole groups.")] = 4000
    mean_tokens: Annotated[int, Option("--mean-tokens", min=2, help="Mean tokens of a turn.")] = 400
    longest: Annotated[int, Option("--longest", min=16, help="Most tokens of a response.")] = 8192
    multi_turn: Annotated[float, Option("--multi-turn", min=0, max=1, help="Share with several turns.")] = 0.3
    pause_s: Annotated[float, Option("--pause", min=0, help="Mean pause between turns, simulated seconds.")] = 10.0
    rate: Annotated[float, Option("--rate", min=0.1, help="Tokens of a slot in a simulated second.")] = 25.0
    batch: Annotated[int, Option("--batch", min=1, help="Samples of a training step.")] = 128
    step_s: Annotated[float, Option("--step", min=0, help="Time of a training step, simulated seconds.")] = 10.0
    topk: Annotated[int, Option("--topk", min=0, help="Also store a top-k of the teacher; 0: log-probs alone.")] = 0
    speed: Annotated[float, Option("--speed", min=0.01, help="Simulated seconds in a second.")] = 4.0
    kills: Annotated[int, Option("--kills", min=0, help="SIGKILLs, spread over the run and all processes.")] = 14
    group: Annotated[bool, Option("--group", help="One process commits for all engines and scorers.")] = False

    @property
    def prompts_per_engine(self) -> int:
        return -(-self.samples // (self.engines * GROUP_SIZE))

    @property
    def lengths(self) -> Lengths:
        return Lengths(mean_tokens=self.mean_tokens, longest=self.longest, multi_turn=self.multi_turn)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Signals that each teacher stores, in the order of their commits."""
        return ("logprob", "topk") if self.topk else ("logprob",)

    def stage_of(self, engine: int) -> str:
        """Return the stage that an engine samples for; each trainer has one."""
        return f"student-{engine % self.trainers}"
