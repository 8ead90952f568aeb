"""Progress of a job: bars with rates and time left on a terminal, one line per finished step everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from mopd_dataplane.query.text import size

LONG_TO_LOAD = 200 << 20
"""Bytes of weights from which on loading them is worth a line."""
Advance = Callable[..., None]
"""advance(done=0, **facts): `done` is the count so far; facts are shown beside the bar."""


@dataclass
class StepReport:
    """Facts of a finished step, for the line that stays on the screen."""

    facts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.1f} {task.fields['unit']}/s" if speed else "", style="progress.data.speed")


class Progress:
    """Reports to one console; `quiet` shows nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet

    def say(self, text: str) -> None:
        """One plain line."""
        if not self.quiet:
            self.console.print(escape(text), soft_wrap=True)

    def waits_for(self, stage: str, what: str, folders: Iterable[Path], *, slow: bool = False) -> str:
        """What a step waits for, with the size of the weights in these folders: "loading teacher sorter, 0.5 GiB".

        Returned to stand beside the bar; also a line of its own where it takes long, or is `slow` for another reason.
        """
        weight = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
        waiting = f"{what}, {size(weight)}"
        if slow or weight >= LONG_TO_LOAD:
            self.say(f"{stage:<16} {waiting}")
        return waiting

    @contextmanager
    def step(self, stage: str, action: str, *, total: int | None, unit: str) -> Iterator[tuple[Advance, StepReport]]:
        """Show one step of a stage while it runs, and a line with its facts when it ends."""
        report = StepReport()
        began = time.monotonic()
        bar = RichProgress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(),
            TimeRemainingColumn(), TextColumn("{task.fields[facts]}"),
            console=self.console, transient=True, disable=self.quiet or not self.console.is_terminal,
        )  # fmt: skip
        with bar:
            task = bar.add_task(f"{escape(stage):<16} {action:<8}", total=total, unit=unit, facts="")

            def advance(done: int = 0, **facts: str) -> None:
                bar.update(task, completed=done, facts=escape(_listing(facts)))

            yield advance, report
        report.seconds = time.monotonic() - began
        if not self.quiet:
            line = f"{stage:<16} {action:<8} {report.seconds:7.1f} s   {_listing(report.facts)}"
            self.console.print(escape(line), soft_wrap=True)


def _listing(facts: dict[str, str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in facts.items())
