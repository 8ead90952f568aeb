"""The trainer and the loader of a stage as processes: started for a window, watched, ended.

One trainer process reads the loader's socket; several ([scale] ranks) are started and watched by torchrun's agent.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.processes import exit_error, parent_named, scratch_folder, stop_child
from mopd_dataplane.errors import EngineError, InputError, MismatchError
from mopd_dataplane.job import memory_advice
from mopd_dataplane.job.job import Stage
from mopd_dataplane.job.scale import Scale
from mopd_dataplane.load.launch import start_server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.run.changes import last_change, next_change
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.steps.checkpoints import StoredCheckpoints
from mopd_dataplane.run.steps.spikes import spike_error
from mopd_dataplane.run.steps.train_spec import train_spec
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.train.checkpoint import latest_checkpoint
from mopd_dataplane.train.failed_step import take_failed_step
from mopd_dataplane.train.node_agent import node_count

POLL_S = 0.1
STOP_S = 30.0
"""How long an interrupted trainer may take to write its last checkpoint."""


class TrainerProcess:
    """The trainer of a stage with its loader: one at a time, each for the windows that go by the same job."""

    def __init__(self, run: Run, stage: Stage, checkpoints: StoredCheckpoints, samples: int) -> None:
        """Nothing is started yet. samples: as for Training."""
        self._run = run
        self._stage = stage
        self._samples = samples
        self._checkpoints = checkpoints
        self._process: subprocess.Popen[bytes] | None = None
        self._resources = contextlib.ExitStack()

    @property
    def is_started(self) -> bool:
        """Whether a trainer was started and not stopped; it may have ended by itself."""
        return self._process is not None

    def ensure_running_for(self, window: int) -> None:
        """Ensure that a trainer runs that takes a window: the running one, unless the job changed for this window.

        Raises InputError for ranks that do not divide among the nodes, MismatchError for another run's checkpoint.
        """
        run, name = self._run, self._stage.name
        if self.is_started and last_change(run.changes, name, window) < window:
            return
        self.stop()
        # A kill between a policy and its checkpoint leaves a window to take again, by the job that it was taken by.
        first = min(self._checkpoints.checkpointed_window_count(), window)
        while (end := next_change(run.changes, name, first)) is not None and end <= window:
            self._start(first)
            self.wait_until(partial(self._has_windows, end))
            self.stop()
            first = end
        self._start(first)

    def wait_until(self, is_reached: Callable[[], bool], on_poll: Callable[[], None] = lambda: None) -> None:
        """Wait for the trainer's work. on_poll: called after every poll until then.

        Raises the trainer's error under its own exit code when it ends before, EngineError when it died without one.
        """
        assert self._process is not None
        while not is_reached():
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(POLL_S)
                if not is_reached():
                    self._raise_error(code)
            on_poll()

    def train_with_first_node(self, has_enough: Callable[[], bool]) -> None:
        """Train on a node other than the first until the trainer ends or `has_enough()`. Raises as `wait_until`."""
        assert self._process is not None
        while self._process.poll() is None and not has_enough():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)
        if self._process.returncode:
            self._raise_error(self._process.returncode)

    def interrupt(self) -> None:
        """Ask the trainer to save its state and end; `wait_until` then raises in the thread that waits."""
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        """End trainer and loader, if they run."""
        self._resources.close()
        self._process = None

    def _has_windows(self, count: int) -> bool:
        """Whether the checkpoint of that many windows is written."""
        return self._checkpoints.checkpointed_window_count() >= count

    def _start(self, window: int) -> None:
        """Start a trainer that begins with a window and ends before the next one that goes by another job."""
        run, stage = self._run.at(self._stage, window)
        folder = self._checkpoints.folder
        run.policies.folder(stage, run.policies.latest(stage))
        check_cursor(run.store, stage.name, folder)
        scratch = self._resources.enter_context(scratch_folder())
        spec = train_spec(run, stage, window, checkpoints=folder, scratch=scratch, samples=self._samples)
        publish_file(scratch / "train.json", spec.model_dump_json().encode())
        process = self._process = _popen(scratch / "train.json", ranks_here(run.job.scale))
        # Both start at once, the trainer waits for the loader; the trainer must end first, or it would miss its loader.
        try:
            loader = start_server(run.store.uri, scratch / "loader.sock", _load_spec(run, stage))
            self._resources.enter_context(loader)
        except BaseException:
            stop_child(process, STOP_S)
            raise
        self._resources.callback(stop_child, process, STOP_S)

    def _raise_error(self, code: int) -> NoReturn:
        failed = take_failed_step(self._checkpoints.folder)
        if failed is not None:
            raise spike_error(*self._run.at(self._stage, failed.window), failed)
        error = exit_error(f"stage {self._stage.name!r}: the trainer", code)
        if code == -signal.SIGKILL:
            advice = memory_advice.for_training(self._stage)
            raise EngineError(f"{error}; the system kills so when memory runs out, and if it did: {advice}")
        raise error


def _load_spec(run: Run, stage: Stage) -> LoadSpec:
    # A micro-batch holds all its packs at once, and the next one is read meanwhile.
    load = run.job.load.model_copy(update={"slots": max(run.job.load.slots, 2 * stage.train.micro_batch_packs)})
    sources = {"topk_source": stage.score.topk_source, "verifier": stage.verifier}
    return LoadSpec.for_stage(stage.name, load, run.job.objective(stage), **sources)


def check_cursor(store: Store, stage: str, folder: Path) -> None:
    """Refuse a checkpoint whose plan the store has not recorded: another run left it, and training would wait for ever.

    Plans are recorded before they are used, so a checkpoint's own is always there. Raises MismatchError.
    """
    saved = latest_checkpoint(folder)
    if saved is None:
        return
    position, identity = saved
    near = (store.plan(stage, window) for window in (position.window - 1, position.window) if window >= 0)
    if identity.plan_digest not in {plan.digest for plan in near if plan is not None}:
        raise MismatchError(
            f"the checkpoint in {folder} belongs to plan {identity.plan_digest[:16]}, near window {position.window}, "
            f"which {store.uri} has not recorded: another run left it; delete the folder to train the stage anew"
        )


def ranks_here(scale: Scale) -> int:
    """Trainer processes of this node. Raises InputError when the nodes cannot have equally many."""
    nodes = node_count()
    if scale.ranks % nodes:
        raise InputError(f"scale.ranks = {scale.ranks} is no multiple of the {nodes} nodes (PET_NNODES); change one")
    return scale.ranks // nodes


def _popen(spec: Path, ranks: int) -> subprocess.Popen[bytes]:
    """The trainer, or the agent of its ranks: out of the terminal's reach, so that Ctrl-C comes to each rank once."""
    if ranks * node_count() == 1:
        return subprocess.Popen([sys.executable, "-m", "mopd_dataplane.train", str(spec)], env=parent_named())
    command = [sys.executable, "-m", "mopd_dataplane.train.node_agent", str(spec), str(ranks)]
    return subprocess.Popen(command, start_new_session=True, env=parent_named())
