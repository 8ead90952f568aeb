"""Many seeds at once: worker processes, each with one sequence at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from simulator.run import Template, open_template, run_steps, shortest, template_folder
from simulator.sequences import sequence

AHEAD = 4
"""Seeds that are handed out for each worker."""
_template: list[Template] = []


@dataclass(frozen=True)
class Verdict:
    """What became of a seed; the violation is empty when every invariant held."""

    seed: int
    violation: str
    trace: tuple[str, ...]
    """The shortest sequence that still fails, a line for each step; empty when none does."""

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {self.violation}", *(f"    {line}" for line in self.trace)])


def judge(seed: int, template: Template, *, focus: Collection[str] = (), shorten: bool = True) -> Verdict:
    """Run the sequence of a seed; of one that fails, find the shortest that breaks the same invariant."""
    outcome = run_steps(sequence(seed, focus), template)
    if outcome.violation and shorten:
        number = outcome.violation.partition(":")[0]
        steps = shortest(outcome.steps, lambda some: run_steps(some, template).violation.startswith(f"{number}:"))
        outcome = run_steps(steps, template)
    return Verdict(seed, outcome.violation, tuple(outcome.trace) if outcome.violation else ())


def judge_all(
    seeds: Iterable[int], jobs: int, *, focus: Collection[str] = (), bucket: str = "", shorten: bool = True
) -> Iterator[Verdict]:
    """Verdicts on some seeds as they come, by so many worker processes. focus: see sequence. bucket: see Template."""
    numbers = iter(seeds)
    with template_folder() as folder, _workers(folder, bucket, jobs) as pool:
        running: set[Future[Verdict]] = set()
        while True:
            following = islice(numbers, AHEAD * jobs - len(running))
            running |= {pool.submit(_judge, seed, tuple(focus), shorten) for seed in following}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def _workers(folder: Path, bucket: str, jobs: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # Lance's threads do not survive a fork
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(folder, bucket))


def _begin(folder: Path, bucket: str) -> None:
    _template.append(open_template(folder, bucket))


def _judge(seed: int, focus: tuple[str, ...], shorten: bool) -> Verdict:
    return judge(seed, _template[0], focus=focus, shorten=shorten)
