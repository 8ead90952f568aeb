"""Progress of a job: bars with rates and time left on a terminal, one line per finished step everywhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.text import Text

from mopd_dataplane.query.text import size

LONG_TO_LOAD = 200 << 20
"""Bytes of weights from which on loading them is worth a line."""
NARROW = 120
"""Columns of a terminal below which the bar leaves its room to the facts beside it."""
Advance = Callable[..., None]
"""advance(done=0, **facts): `done` is the count so far; facts are shown beside the bar."""


@dataclass
class StepReport:
    """Facts of a finished step, for the line that stays on the screen."""

    facts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class _Rate(bars.ProgressColumn):
    def render(self, task: bars.Task) -> Text:
        speed, unit = task.finished_speed or task.speed, task.fields["unit"]
        return Text(f"{speed:,.1f}{' ' if unit else ''}{unit}/s" if speed else "", style="progress.data.speed")


class _Facts(bars.ProgressColumn):
    """The facts beside a bar, cut where the terminal ends."""

    def render(self, task: bars.Task) -> Text:
        return Text(task.fields["facts"], no_wrap=True, overflow="ellipsis")


class Progress:
    """Reports to one console; `quiet` shows nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._iteration = ""

    @contextmanager
    def iteration(self, number: int, total: int) -> Iterator[None]:
        """Name iteration `number` of `total` in the lines of every step inside, as `student 3/12`; a single one has no
        number, and a total of 0 is not known."""
        before = self._iteration
        self._iteration = f" {number}/{total}" if total > 1 else "" if total else f" {number}"
        try:
            yield
        finally:
            self._iteration = before

    def say(self, text: str) -> None:
        """One plain line."""
        if not self.quiet:
            self.console.print(escape(text), soft_wrap=True)

    def describe_wait(self, stage: str, activity: str, folders: Iterable[Path], *, slow: bool = False) -> str:
        """Describe a wait for models, with the size of the weights in these folders: "loading teacher sorter, 0.5 GiB".

        The text is for the progress bar. It is also printed as a line of its own if the weights are large, or if the
        wait is `slow` for another reason.
        """
        weight = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
        waiting = f"{activity}, {size(weight)}"
        if slow or weight >= LONG_TO_LOAD:
            self.say(f"{stage:<16} {waiting}")
        return waiting

    @contextmanager
    def step(self, stage: str, action: str, *, total: int | None, unit: str) -> Iterator[tuple[Advance, StepReport]]:
        """Show one step of a stage while it runs, and a line with its facts when it ends."""
        stage += self._iteration
        report = StepReport()
        began = time.monotonic()
        narrow = self.console.width < NARROW
        whole = partial(Column, no_wrap=True)  # numbers are never cut: bar and facts take what room is left
        bar = bars.Progress(
            bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.BarColumn(8 if narrow else 40),
            bars.MofNCompleteColumn(table_column=whole()), _Rate(table_column=whole()),
            bars.TimeRemainingColumn(table_column=whole()), _Facts(),
            console=self.console, transient=True, disable=self.quiet or not self.console.is_terminal,
        )  # fmt: skip
        with bar:
            name = f"{escape(stage)} {action}" if narrow else f"{escape(stage):<16} {action:<8}"
            task = bar.add_task(name, total=total, unit="" if narrow else unit, facts="")

            def advance(done: int = 0, **facts: str) -> None:
                bar.update(task, completed=done, facts="  ".join(_said(facts)))

            yield advance, report
        report.seconds = time.monotonic() - began
        if not self.quiet:
            head = f"{stage:<16} {action:<8} {report.seconds:7.1f} s   "
            width = self.console.width if self.console.is_terminal else sys.maxsize
            self.console.print(escape(_folded(head, report.facts, width)), soft_wrap=True)


def _said(facts: dict[str, str]) -> list[str]:
    return [f"{name} {value}" for name, value in facts.items()]


def _folded(head: str, facts: dict[str, str], width: int) -> str:
    """`head` and the facts, in lines of at most `width` columns that break between facts and begin below the first."""
    lines: list[list[str]] = [[]]
    for fact in _said(facts):
        if lines[-1] and len(head) + len("  ".join([*lines[-1], fact])) > width:
            lines.append([])
        lines[-1].append(fact)
    return head + f"\n{'':{len(head)}}".join("  ".join(line) for line in lines)
