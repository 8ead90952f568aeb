"""One sequence from its beginning to its end, and the shortest sequence that still fails."""

from __future__ import annotations

import gc
import random
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from deaths import Died
from simulator import copies, invariants, values
from simulator.actors import Actor
from simulator.model import Model, Violation
from simulator.operations import Operation, Writer, operation
from simulator.reading import Reader
from simulator.refusals import is_expected
from simulator.sequences import Step
from simulator.world import RemoteWorld, World, simulated

from mopd_dataplane.base.file_urls import is_url
from mopd_dataplane.run import delete as deleting
from mopd_dataplane.store.dataset import Store

LEAPS_DAYS = (20 * 365, 30, 8, 1, -1, -8, -30)
FRESH_READER_EVERY = 3


@dataclass
class Outcome:
    """What became of a sequence."""

    steps: list[Step]
    trace: list[str] = field(default_factory=list)
    """A line for each step."""
    violation: str = ""
    """The invariant that does not hold; empty when all do."""


@dataclass
class Suspended:
    """An operation that somebody stopped."""

    actor: Actor
    operation: Operation
    name: str


@dataclass
class Template:
    """What every sequence begins with."""

    folder: Path
    reader: Reader
    """A reader that has read all of it."""
    bucket: str = ""
    """Prefix of an object store for the stores of sequences; empty: they are in folders."""


class Run:
    """A sequence under way."""

    def __init__(self, template: Template, home: str) -> None:
        self.template = template
        if is_url(home):
            values.make_store(f"{home}/store")
            self.world: World = RemoteWorld()
        else:
            shutil.copytree(template.folder / "home", home)
            self.world = World(Path(home))
        self.model = Model()
        self.trace: list[str] = []
        self._home = home
        self._writers: dict[int, Writer] = {}
        self._suspended: dict[int, Suspended] = {}
        self._reader = Reader(f"{home}/store", None if is_url(home) else template.reader)
        self._checks = 0

    def step(self, step: Step) -> None:
        """Take a step, then check every invariant."""
        self.trace.append(str(step))
        if step.operation == "power loss":
            self._lose_power(random.Random(step.choice))
        elif step.operation == "clock":
            leap = random.Random(step.choice).choice(LEAPS_DAYS)
            self.trace[-1] += f" ({leap:+} days)"
            self.world.set_clock(timedelta(days=leap))
        elif step.operation == "restart":
            self._restart(step.writer)
        elif step.operation in ("end", "audit"):
            self._end(audit=step.operation == "audit")
        else:
            if step.writer in self._suspended:
                self._wake(step.writer)
                self._check()
            self._operate(step)
        self._check()
        if step.operation in ("power loss", "end", "audit", *copies.OPERATIONS) or copies.forks_of(self.model):
            copies.check_targets(self.model, self._home)

    def abandon(self) -> None:
        """Let every thread that is left end."""
        for writer in list(self._suspended):
            self._suspended.pop(writer).actor.kill()

    def _operate(self, step: Step) -> None:
        writer = self._writers.setdefault(step.writer, Writer.open(self._home, self.template.folder / "rows"))
        if step.operation in copies.OPERATIONS:
            chosen = copies.operation(step.operation, writer, self.model, step.choice, self.template.folder)
        else:
            chosen = operation(step.operation, writer, self.model, step.choice)
        if chosen is None:
            self.trace[-1] += ": nothing to do it on"
            return
        self.trace[-1] += f": {chosen.told}" if chosen.told else ""
        self.model.begin(chosen.attempt)
        actor = Actor(chosen.work, f"writer {step.writer}, {step.operation}")
        fault = None if step.operation in copies.CALM else step.fault
        struck = self.world.run(actor, fault, actor.start)
        if not actor.is_done:
            self.trace[-1] += f": suspended at {struck}"
            self._suspended[step.writer] = Suspended(actor, chosen, step.operation)
            return
        self._conclude(step.writer, actor, chosen, step.operation, struck)

    def _conclude(self, writer: int, actor: Actor, chosen: Operation, name: str, struck: str) -> None:
        if actor.error is None:
            self.model.succeed(chosen.attempt)
            chosen.done(actor.result)
            if name == "repair":
                self.model.stragglers.clear()
            return
        self.model.fail(chosen.attempt)
        self.trace[-1] += f": {type(actor.error).__name__}" + (f" at {struck}" if struck else "")
        if not isinstance(actor.error, Died) and not is_expected(actor.error, chosen.attempt, self.model, bool(struck)):
            raise Violation(f"I13: {name} ended with {actor.error!r}") from actor.error
        actor.error = None
        if struck or isinstance(actor.error, Died):
            del self._writers[writer]

    def _wake(self, writer: int) -> None:
        suspended = self._suspended.pop(writer)
        self.trace[-1] += f" [first its {suspended.name} goes on]"
        self.world.run(suspended.actor, None, suspended.actor.wake)
        self._conclude(writer, suspended.actor, suspended.operation, suspended.name, "")

    def _restart(self, writer: int) -> None:
        if (suspended := self._suspended.pop(writer, None)) is not None:
            self.world.run(suspended.actor, None, suspended.actor.kill)
            self.model.fail(suspended.operation.attempt)
        self._writers.pop(writer, None)

    def _lose_power(self, draw: random.Random) -> None:
        """Every writer dies; a disk forgets what was not synced, an object store nothing."""
        after = self.world.power_fails(draw)
        for writer in list(self._suspended):
            self._restart(writer)
        self._writers.clear()
        if after is not None:
            self.world.power_returns(after)
            self.model.lose_power()
        self._reader = Reader(f"{self._home}/store")

    def _end(self, *, audit: bool) -> None:
        """Let every writer come to its end, finish what was begun, and look at all of it once more."""
        for writer in list(self._suspended):
            self._wake(writer)
            self._check()
        store = Store.open(f"{self._home}/store")
        for deletion in store.deletions.unfinished():
            list(deleting.resume(store, deletion))
        if store.deletions.names():
            list(deleting.repair(store))
        self.model.stragglers.clear()
        if audit and not (report := store.verify()).ok:
            raise Violation(f"I15: verify says {[f'{f.table} {f.uid} {f.problem}' for f in report.findings]}")

    def _check(self) -> None:
        self._checks += 1
        if self._checks % FRESH_READER_EVERY == 0:
            self._reader.restart()
        invariants.check(self.model, self._reader)


def run_steps(steps: list[Step], template: Template) -> Outcome:
    """Run a sequence on a store of its own."""
    outcome = Outcome(steps)
    with tempfile.TemporaryDirectory(prefix="simulated-", dir=template.folder) as scratch:
        run = Run(template, f"{template.bucket}/{uuid.uuid4().hex}" if template.bucket else f"{scratch}/home")
        outcome.trace = run.trace
        with simulated(run.world), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for step in steps:
                    run.step(step)
            except Violation as violation:
                outcome.violation = str(violation)
            except Exception as error:
                outcome.violation = f"I1: the store cannot be used: {error!r}"
            finally:
                run.abandon()
    return outcome


def shortest(steps: list[Step], fails: Callable[[list[Step]], bool]) -> list[Step]:
    """The shortest sequence that still fails, by delta debugging: without parts of it, then without single faults."""
    parts = 2
    while len(steps) > 1:
        size = -(-len(steps) // parts)
        for first in range(0, len(steps), size):
            rest = steps[:first] + steps[first + size :]
            if rest and fails(rest):
                steps, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(steps))
    for index, step in enumerate(steps):
        calmer = [*steps[:index], replace(step, fault=None), *steps[index + 1 :]]
        if step.fault is not None and fails(calmer):
            steps = calmer
    return steps


@contextmanager
def template_folder() -> Iterator[Path]:
    """A folder, in memory, with what every sequence begins with."""
    with tempfile.TemporaryDirectory(prefix="simulator-", dir="/dev/shm") as scratch:
        values.make_template(Path(scratch))
        yield Path(scratch)


def open_template(folder: Path, bucket: str = "") -> Template:
    """Make this process ready to run sequences."""
    reader = Reader(f"{folder}/home/store")
    invariants.check(Model(), reader)
    gc.collect()
    gc.freeze()  # clean-up collects garbage, and from now on has only that of a sequence to look at
    return Template(folder, reader, bucket)
