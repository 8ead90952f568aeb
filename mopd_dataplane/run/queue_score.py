"""Scores the trajectories of a running TransferQueue as they come, and puts the signals back beside them.

A signal is in the store before it is in the queue. So a process that is killed anywhere and started again computes no
signal twice: it puts those of the store that the queue lacks.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from mopd_kernels.codecs import decode
from numpy.typing import NDArray

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import InputError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.follow import StallTimeout, has_ended
from mopd_dataplane.run.stage_rows import Rows, stage_samples
from mopd_dataplane.run.steps.score import register_teachers, score, signal_kinds, stored_samples

if TYPE_CHECKING:
    from mopd_dataplane.transferqueue.teacher_fields import RunningQueue, TeacherFields, Trajectory

CHUNK = 32
"""Trajectories of one put: their fields are in memory together."""


def score_queue(run: Run, stage: Stage, queue: str) -> dict[str, float]:
    """Score a stage's samples as they come, and put the signals into the running queue, until that or the rollouts end.

    Returns {"signals": how many are new, "loss_tokens", "put": trajectories that got the fields of their teacher}.
    Raises InputError when the stage's samples do not come from outside, or when no such queue runs.
    """
    if not stage.has_stored_samples:
        raise InputError(f'stage {stage.name!r} has data = {stage.data!r:.20}; --queue scores data = "stored"')
    if "://" in run.job.store.removeprefix("file://"):
        raise InputError(f"store {run.job.store} is an object store, whose queues have no samples")
    if not signal_kinds(run, stage):
        raise InputError(f"the objective of stage {stage.name!r} needs no signal, so there is nothing to put")
    from mopd_dataplane.transferqueue.teacher_fields import QueueClosedError, running_queue

    folder = Path(run.job.store.removeprefix("file://")).absolute()
    counts: defaultdict[str, float] = defaultdict(float)
    stall = StallTimeout(f"the framework that puts into queue {queue!r}")
    with running_queue(folder, queue) as running, closing(register_teachers(run, stage)) as pool:
        run.progress.say(f"{stage.name:<16} queue    attached to {queue}")
        while True:
            is_open = running.is_open()
            is_last_round = not is_open or has_ended(run, stage, "rollout")
            if is_last_round:
                running.fold()
            new = score(run, stage, pool=pool)
            fault_point("queue.signals.scored")
            try:
                new["put"] = put_signals(run, stage, running) if is_open else 0.0
            except QueueClosedError:
                new["put"] = 0.0  # the next round finds it closed
            for name, count in new.items():
                counts[name] += count
            if is_last_round:
                return dict(counts)
            if any(new.values()):
                stall.renew()
            else:
                stall.pause()


def put_signals(run: Run, stage: Stage, running: "RunningQueue") -> float:
    """Put the signals of the store that the trajectories of a stage lack. Returns how many trajectories got theirs."""
    unscored = {trajectory.uid: trajectory for trajectory in running.unscored(stage.name)}
    if not unscored:
        return 0.0
    rows, samples = stage_samples(run.store, stage, None, ["uid", "domain", "effort"])
    are_unscored = pc.is_in(samples["uid"], value_set=pa.array(unscored, pa.string())).to_numpy()
    by_teacher: dict[str, dict[int, Trajectory]] = defaultdict(dict)
    for row, sample in zip(rows[are_unscored].tolist(), samples.filter(are_unscored).to_pylist(), strict=True):
        by_teacher[run.job.teacher_of(stage, sample["domain"], sample["effort"])][row] = unscored[sample["uid"]]
    kinds = _put_kinds(run, stage, running)
    count = 0
    for teacher, trajectories in by_teacher.items():
        ready = np.array([*trajectories], np.int64)
        for kind in kinds:
            ready = np.setdiff1d(ready, run.store.missing_signals(teacher, kind, ready))
        for start in range(0, len(ready), CHUNK):
            count += running.put(_fields(run, teacher, kinds, ready[start : start + CHUNK], trajectories))
    return float(count)


def _put_kinds(run: Run, stage: Stage, running: "RunningQueue") -> list[str]:
    """Kinds of signals that are put: top-k or else log-probs, and hidden states if the queue has a field for them.

    The top-k of a teacher with another tokenizer has unused slots, which other trainers do not know.
    """
    kinds = signal_kinds(run, stage)
    has_own_tokens = any(run.job.teachers[teacher].tokenizer == "own" for teacher in run.job.teachers_of(stage))
    states = ["hidden"] if "hidden" in kinds and running.takes_hidden else []
    return ["topk" if "topk" in kinds and not has_own_tokens else "logprob", *states]


def _fields(
    run: Run, teacher: str, kinds: Sequence[str], rows: Rows, trajectories: "Mapping[int, Trajectory]"
) -> "list[TeacherFields]":
    """Return a teacher's signals of rows of `samples`, laid out for the queue."""
    from mopd_dataplane.transferqueue.teacher_fields import TeacherFields

    signals = run.store.read_signal(teacher, kinds[0], rows)
    states = _states(run, teacher, rows) if "hidden" in kinds else [None] * len(rows)
    fields = []
    for sample, signal, state in zip(stored_samples(run, rows), signals, states, strict=True):
        mask, length = sample.loss_mask.astype(bool), len(sample.tokens)
        if kinds[0] == "topk":
            ids, logprobs = (token_rows(values, mask, length) for values in signal)
        else:
            ids = np.append(sample.tokens[1:], np.int32(0))[:, None]
            logprobs = token_rows(signal[mask][:, None], mask, length)
        hidden = None
        if state is not None:
            hidden = torch.zeros(len(mask), state.shape[1], dtype=state.dtype)
            hidden[torch.from_numpy(mask)] = state
        fields.append(TeacherFields(trajectories[sample.sample_row], teacher, logprobs, ids, hidden))
    return fields


def _states(run: Run, teacher: str, rows: Rows) -> Iterator[torch.Tensor]:
    """Yield the hidden states [M, d] of each row; bfloat16 unless they are stored as float32."""
    codecs = run.store.signal_rows(teacher, "hidden", rows)["codec"].to_pylist()
    width = run.store.teachers()[teacher].hidden_size
    for encoded, codec in zip(run.store.read_signal(teacher, "hidden", rows), codecs, strict=True):
        dtype = torch.float32 if codec == "fp32" else torch.bfloat16
        yield decode(torch.from_numpy(encoded.copy()), codec, width, dtype)


def token_rows(values: NDArray[Any], mask: NDArray[np.bool_], length: int) -> NDArray[Any]:
    """Lay out values of trained tokens [M, K] over all tokens [L, K]: row t is of the token t + 1, others are 0.

    mask: [R], the trained tokens of the response. length: L.
    """
    laid_out = np.zeros((length, values.shape[1]), values.dtype)
    laid_out[length - len(mask) - 1 : length - 1][mask] = values
    return laid_out
