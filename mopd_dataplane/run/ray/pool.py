"""Runs tasks on actors that may join, die and be replaced.

    waiting actor ──ready──▶ idle ──task──▶ busy ──result──▶ idle … ──no task left──▶ ended, its resources are free
                                              └──dies──▶ its task goes back to the front; a new actor waits for room

The worker of a group that `stays` keeps its resources when no task is left, and takes the tasks of the next call.

Ray places, starts and watches the actors. A task must be safe to repeat: what it has committed is exactly once by uid.
Ray's own restarts (`max_restarts`, `max_task_retries`) are not used: they repeat a task on the same actor only, while
here the next idle one takes it, and an actor that is unreachable but alive would come back beside its successor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import DeadlineError, EngineError

if TYPE_CHECKING:
    from ray.exceptions import RayActorError

POLL_S = 0.5
DEATHS = 10
"""Workers that may die on one task before it is given up; for each worker of a group, those that may die before they
are ready."""
ROOM_S = 86400.0
"""Longest wait for room in the cluster while nothing runs."""
TELL_S = 30.0
"""Seconds after which a wait for room is first reported."""


@dataclass
class Task:
    """One call of a worker's `work` method."""

    arguments: tuple[Any, ...]
    deaths: int = 0
    actor: Any = None
    """The worker that was given the task last."""


@dataclass
class Group:
    """Workers of one kind and the tasks they share."""

    name: str
    worker: type
    """Class with `ready()` and `work(*arguments)`; made from `settings` in a process of its own."""
    settings: tuple[Any, ...]
    resources: dict[str, float]
    """{"num_cpus", "num_gpus"} that each worker reserves."""
    size: int
    tasks: deque[Task]
    take: Callable[[Group], Task | None] = lambda group: group.tasks.popleft() if group.tasks else None
    """The next task for an idle worker; None when there is none just now."""
    running: list[Task] = field(default_factory=list)
    failed_starts: int = 0
    """Workers that died before they were ready, since the last one that was ready."""
    threads: int = 1
    """Methods that a worker runs at once."""
    stop_s: float = 0.0
    """How long a worker may take for its method `stop`, which is called before it is ended; 0: it has none."""
    stays: bool = False
    """Whether the only worker of the group outlives a call of `drive`; `end` ends it."""
    idle: Any = None
    """The worker that stays, between two calls."""


@dataclass
class _Call:
    group: Group
    actor: Any
    task: Task | None
    """None: it is only asked whether it is there."""


def drive(
    groups: Iterable[Group],
    *,
    done: Callable[[Group, Task, Any], None],
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run every task of every group; `done` gets each result, `tick` is called twice a second, `say` gets notices.

    Raises what a worker raised, EngineError when workers die again and again or cannot start, DeadlineError after a day
    without room.
    """
    import ray

    calls: dict[Any, _Call] = {}
    try:
        for group in groups:
            if group.idle is not None:
                actor, group.idle = group.idle, None
                _next(group, actor, calls)
                continue
            for _ in range(min(group.size, len(group.tasks))):
                _start(group, calls)
        room = _Room(say)
        while calls:
            finished, _ = ray.wait(list(calls), timeout=POLL_S)
            tick()
            room.look(calls)
            for reference in finished:
                call = calls.pop(reference)
                alive = _settle(reference, call, done, say)
                _next(call.group, call.actor if alive else None, calls)
    finally:
        for call in calls.values():
            _stop(call.group, call.actor)


def end(group: Group) -> None:
    """End the worker that stayed, if one did."""
    if group.idle is not None:
        _stop(group, group.idle)
        group.idle = None


def _stop(group: Group, actor: Any) -> None:
    """End a worker, after its `stop` if it has one; what fails meanwhile is the worker's loss."""
    import ray
    from ray.exceptions import RayError

    if group.stop_s:
        with suppress(RayError):
            ray.get(actor.stop.remote(), timeout=group.stop_s)
    ray.kill(actor)


def _start(group: Group, calls: dict[Any, _Call]) -> None:
    """Ask Ray for one more worker; it comes when there is room."""
    import ray

    options = {"name": None, "max_concurrency": group.threads, **group.resources}
    actor = ray.remote(group.worker).options(**options).remote(*group.settings)
    calls[actor.ready.remote()] = _Call(group, actor, None)


def _settle(reference: Any, call: _Call, done: Callable[[Group, Task, Any], None], say: Callable[[str], None]) -> bool:
    """Take a result; False when the worker is gone, its task then waits again."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    task = call.task
    if task is not None:
        call.group.running.remove(task)
    try:
        result = ray.get(reference, timeout=POLL_S)
    except RayActorError as error:
        if error.actor_init_failed:
            raise _cannot_start(call.group, error) from None
        ray.kill(call.actor)  # unreachable is not dead: it must not come back beside its successor
        say(f"a worker of {call.group.name} is gone ({str(error).splitlines()[0]:.120}); another continues")
        if task is None:
            call.group.failed_starts += 1
            if call.group.failed_starts >= DEATHS * call.group.size:
                raise EngineError(
                    f"{call.group.failed_starts} workers of {call.group.name} died before they were ready; see their "
                    "messages above, and run the same command again to continue"
                ) from None
        else:
            task.deaths += 1
            if task.deaths >= DEATHS:
                raise EngineError(
                    f"{DEATHS} workers of {call.group.name} died over one task; see their messages above, and run the "
                    "same command again to continue"
                ) from None
            call.group.tasks.appendleft(task)
        return False
    except RayTaskError as error:
        _stop(call.group, call.actor)
        raise error.cause from None
    if task is None:
        call.group.failed_starts = 0
    else:
        done(call.group, task, result)
    return True


def _cannot_start(group: Group, error: RayActorError) -> EngineError:
    """The error for a node on which a worker cannot even be imported: another worker would fail as well."""
    cause = str(error).strip().splitlines()[-1]
    return EngineError(
        f"a worker of {group.name} cannot start ({cause:.200}); every node needs the same Python and this package in "
        "the same release"
    )


def _next(group: Group, actor: Any, calls: dict[Any, _Call]) -> None:
    """Give an idle worker its next task or let it go; replace one that died while there is work."""
    import ray

    task = group.take(group) if actor is not None else None
    if task is not None:
        group.running.append(task)
        task.actor = actor
        calls[actor.work.remote(*task.arguments)] = _Call(group, actor, task)
    elif actor is not None and group.stays:
        group.idle = actor
    elif actor is not None:
        ray.kill(actor)
    waiting = sum(call.group is group and call.task is None for call in calls.values())
    busy = len(group.running)
    if waiting < min(len(group.tasks), group.size - busy):
        _start(group, calls)
    if not group.tasks and not busy:
        for reference in [r for r, call in calls.items() if call.group is group]:
            ray.kill(calls.pop(reference).actor)


class _Room:
    """Says when the cluster has no room for anything, and gives up after ROOM_S."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since: float | None = None
        self._told = False

    def look(self, calls: dict[Any, _Call]) -> None:
        if any(call.task is not None for call in calls.values()):
            self._since, self._told = None, False
            return
        self._since = self._since or time.monotonic()
        waited = time.monotonic() - self._since
        resources = {call.group.name: call.group.resources for call in calls.values()}
        if waited > ROOM_S:
            raise DeadlineError(f"the cluster has had no room for {resources} for {ROOM_S / 3600:.0f} h; add nodes")
        if waited > TELL_S and not self._told:
            self._told = True
            self._say(f"no worker has started yet; the cluster must have room for {resources}")
