"""One process of the simulated fleet: an engine, a scorer or a trainer.

Each member works until its share is done, and may be killed and started again at any time. After each commit it appends
a line of JSON to a file of its own in acknowledged/: what the store has acknowledged.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.bench.fleet_settings import GROUP_SIZE, Fleet
from mopd_dataplane.bench.replay import VOCABULARY, ReplayEngine, reply
from mopd_dataplane.job import sections
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, Columns, collect_columns
from mopd_dataplane.plan.plan import Training, build_window
from mopd_dataplane.records import PlanWindow, Prompt, Sample, Signal, Snapshot, StepMetrics, sample_uid
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.group_commit.writer import GroupWriter

PROMPT_TOKENS = (20, 500)
"""Shortest and longest prompt."""
SCORE_BATCH = 128
"""Most samples of one commit of a scorer."""
SCORE_RATE = 50_000.0
"""Tokens that a simulated teacher reads in a second."""
POLL_S = 0.3
"""Pause of a scorer or trainer that has no work."""


def prompts_of(fleet: Fleet, engine: int) -> list[Prompt]:
    """Return the prompts of an engine. Their domains take turns, and each domain has a teacher."""
    numbers = range(engine * fleet.prompts_per_engine, (engine + 1) * fleet.prompts_per_engine)
    return [Prompt(prompt_id=f"p{number}", domain=f"domain-{number % fleet.scorers}", text="") for number in numbers]


def expected_samples(fleet: Fleet) -> Iterator[tuple[str, str, str]]:
    """Yield (uid, stage, domain) of every sample of the run."""
    for engine in range(fleet.engines):
        stage = fleet.stage_of(engine)
        for prompt in prompts_of(fleet, engine):
            for index in range(GROUP_SIZE):
                yield sample_uid(0, stage, prompt.prompt_id, index, 0), stage, prompt.domain


def teacher_of(domain: str) -> str:
    """Return the teacher of a domain."""
    return domain.replace("domain", "teacher")


class Acknowledgements:
    """File of what this process knows to be committed: one line for each commit, written after it has returned."""

    def __init__(self, folder: Path, role: str, number: int) -> None:
        self._file = (folder / "acknowledged" / f"{role}-{number}-{os.getpid()}.jsonl").open("ab", buffering=0)

    def add(self, **facts: Any) -> None:
        """Append a line in one write, so that a kill leaves no line without its end."""
        self._file.write(json.dumps({"time": time.time(), **facts}).encode() + b"\n")


def policy_version(folder: Path, stage: str) -> int:
    """Return the newest policy version that the trainer of a stage has published."""
    file = folder / "policies" / stage
    return int(file.read_text()) if file.exists() else 0


def writer_of(fleet: Fleet, store: Store) -> Store | GroupWriter:
    """Return what commits samples and signals of a member."""
    return GroupWriter(store.uri) if fleet.group else store


def run_engine(fleet: Fleet, folder: Path, number: int) -> None:
    """Sample the engine's prompts through the real token log and committer."""
    store, acknowledged = Store.open(folder / "store"), Acknowledgements(folder, "engine", number)
    commits = writer_of(fleet, store)
    stage, writer = fleet.stage_of(number), f"engine-{number}"
    engine = ReplayEngine(
        slots=fleet.slots, rate=fleet.rate * fleet.speed, pause_s=fleet.pause_s / fleet.speed, lengths=fleet.lengths,
        version=policy_version(folder, stage),
    )  # fmt: skip
    task = RolloutTask(
        stage=stage, iteration=0, seed=0, writer=writer, wal=sections.Wal(), wal_dir=folder / "wal",
        rollout=sections.Rollout(
            group_size=GROUP_SIZE, max_new_tokens=fleet.longest, max_prompt_tokens=PROMPT_TOKENS[1],
            weight_change="span",
        ),
        render=_prompt_ids,
    )  # fmt: skip

    def commit(batch: list[Sample]) -> None:
        start = time.monotonic()
        receipt = commits.commit_samples(batch, keep_first=True)
        now = time.monotonic()
        ends = [engine.finished.pop(sample.uid, None) for sample in batch]
        acknowledged.add(
            uids=[sample.uid for sample in batch], tokens=sum(len(sample.tokens) for sample in batch),
            commit_s=now - start, waits_s=[now - end for end in ends if end is not None],
            dropped=len(receipt.dropped),
        )  # fmt: skip

    run_rollout(
        engine, prompts_of(fleet, number), task, commit=commit, environment=lambda turn: reply(turn, fleet.lengths),
        skip_uids=frozenset(store.samples(["uid"], f"writer = '{writer}'")["uid"].to_pylist()),
        published=lambda: (policy_version(folder, stage), folder),
    )  # fmt: skip


def _prompt_ids(prompt: Prompt) -> list[int]:
    noise = np.random.default_rng(int(prompt.prompt_id[1:]))
    length = int(np.exp(noise.uniform(*np.log(PROMPT_TOKENS))))
    ids: list[int] = noise.integers(0, VOCABULARY, length).tolist()
    return ids


def run_scorer(fleet: Fleet, folder: Path, number: int) -> None:
    """Commit the signals of one teacher for every sample of its domain."""
    store, acknowledged = Store.open(folder / "store"), Acknowledgements(folder, "scorer", number)
    domain = f"domain-{number}"
    commits = writer_of(fleet, store)
    teacher, total = teacher_of(domain), sum(own == domain for _, _, own in expected_samples(fleet))
    while True:
        rows = np.concatenate([
            rows[np.array(part["domain"]) == domain] for rows, part in store.scan_samples(["domain"])
        ] or [np.empty(0, np.int64)])  # fmt: skip
        missing = store.missing_signals(teacher, fleet.kinds[-1], rows)[:SCORE_BATCH]
        if len(missing):
            _score(fleet, store, commits, teacher, missing, acknowledged)
        elif len(rows) == total:
            return
        else:
            time.sleep(POLL_S)


def _score(
    fleet: Fleet,
    store: Store,
    commits: Store | GroupWriter,
    teacher: str,
    rows: NDArray[np.int64],
    acknowledged: Acknowledgements,
) -> None:
    uids = store.take_samples(rows, ["uid"])["uid"].to_pylist()
    payload = store.read_tokens(rows, ["tokens", "loss_mask"], verify=True)
    read = sum(len(tokens) for tokens in payload["tokens"])
    time.sleep(read / (SCORE_RATE * fleet.speed))
    for kind in fleet.kinds:
        signals = [
            _signal(kind, uid, row, np.asarray(mask.values, np.uint8), fleet.topk)
            for uid, row, mask in zip(uids, rows.tolist(), payload["loss_mask"], strict=True)
        ]
        start = time.monotonic()
        commits.commit_signals(teacher, kind, signals)
        acknowledged.add(
            uids=uids, kind=kind, commit_s=time.monotonic() - start, tokens=read if kind == "logprob" else 0
        )


def _signal(kind: str, uid: str, row: int, mask: NDArray[np.uint8], topk: int) -> Signal:
    noise = np.random.default_rng(row)
    if kind == "logprob":
        return Signal(uid=uid, sample_row=row, kind=kind, logprob=-noise.random(len(mask), np.float32) * mask)
    shape = (int(mask.sum()), topk)
    ids, logprobs = noise.integers(0, VOCABULARY, shape, dtype=np.int32), -1 - noise.random(shape, np.float32)
    return Signal(uid=uid, sample_row=row, kind=kind, topk_ids=ids, topk_logprobs=logprobs)


def run_trainer(fleet: Fleet, folder: Path, number: int) -> None:
    """Train a stage: plan a window of scored samples, read it, wait for a step, record it, publish a policy version."""
    store, acknowledged = Store.open(folder / "store"), Acknowledgements(folder, "trainer", number)
    stage = f"student-{number}"
    total = sum(own == stage for _, own, _ in expected_samples(fleet))
    trained = store.table("steps", ["stage", "window"], f"stage = '{stage}'")["window"].to_pylist()
    window = len(set(trained))
    rows = [np.empty(0, np.int64)]
    for earlier in range(window):
        plan = store.plan(stage, earlier)
        assert plan is not None  # a plan is durable before its first step
        rows.append(plan.sample_rows)
        store.release(f"{stage}-{earlier}")  # a kill may have come between the step and this
    while len(planned := np.concatenate(rows)) < total:
        publish_file(folder / "policies" / stage, str(window).encode())
        plan = store.plan(stage, window) or _plan(fleet, store, stage, window, planned, total)
        if plan is None:
            time.sleep(POLL_S)
            continue
        _train(fleet, store, plan, window, acknowledged)
        rows.append(plan.sample_rows)
        window += 1
    publish_file(folder / "policies" / stage, str(window).encode())


def _plan(
    fleet: Fleet, store: Store, stage: str, window: int, planned: NDArray[np.int64], total: int
) -> PlanWindow | None:
    """Plan and record the next window; None while too few samples are scored."""
    size = min(fleet.batch, total - len(planned))
    if len(_scored(fleet, store, stage, planned, store.snapshot())) < size:
        return None
    snapshot = store.snapshot(tag=f"{stage}-{window}")
    columns = _scored(fleet, store, stage, planned, snapshot).take(np.arange(size))
    settings = sections.Plan(pack_tokens=fleet.longest + PROMPT_TOKENS[1], batch_samples=size)
    teachers = [f"teacher-{number}" for number in range(fleet.scorers)]
    training = Training(policy_version=window, first_step=window)
    plan = build_window(
        columns, settings, seed=0, stage=stage, window=window, snapshot=snapshot, teachers=teachers, training=training
    )
    store.add_plan(plan)
    return plan


def _scored(fleet: Fleet, store: Store, stage: str, planned: NDArray[np.int64], snapshot: Snapshot) -> Columns:
    """Return the samples of a stage that have every signal and are in no earlier window."""

    def own() -> Iterator[tuple[NDArray[np.int64], pa.Table]]:
        for rows, part in store.scan_samples([*SAMPLE_COLUMNS, "stage"], snapshot):
            mask = np.array(part["stage"]) == stage
            yield rows[mask], part.filter(pa.array(mask))

    columns = collect_columns(
        own(), store.dataset("samples", snapshot).count_rows(), route=lambda domain, effort: teacher_of(domain),
        teachers=[f"teacher-{number}" for number in range(fleet.scorers)],
        scores=store.table("scores", ["sample_row", "teacher", "kind"], snapshot=snapshot), signals=fleet.kinds,
    )  # fmt: skip
    return columns.take(columns.has_signals & ~np.isin(columns.sample_rows, planned))


def _train(fleet: Fleet, store: Store, plan: PlanWindow, version: int, acknowledged: Acknowledgements) -> None:
    """Read the payload and the signals of a window with their checksums, wait, and record its one step."""
    start = time.monotonic()
    rows = plan.sample_rows
    metadata = store.take_samples(rows, ["domain", "total_len", "loss_tokens"], plan.snapshot)
    spans = store.read_tokens(rows, snapshot=plan.snapshot, verify=True)
    domains = np.array(metadata["domain"])
    for domain in np.unique(domains).tolist():
        for kind in fleet.kinds:
            store.read_signal(teacher_of(domain), kind, rows[domains == domain], plan.snapshot, verify=True)
    read_s = time.monotonic() - start
    time.sleep(fleet.step_s / fleet.speed)
    behind = []
    for row in range(len(rows)):
        mask = np.asarray(spans["loss_mask"][row].values, bool)
        starts, versions = (np.asarray(spans[name][row].values) for name in ("version_starts", "versions"))
        behind.append(version - np.repeat(versions, np.diff(starts, append=len(mask)))[mask])
    staleness = np.concatenate(behind)
    step = StepMetrics(
        stage=plan.stage, step=version, window=plan.window, plan_digest=plan.digest, policy_version=version, loss=0.0,
        grad_norm=0.0, learning_rate=0.0, samples=len(rows), tokens=sum(metadata["total_len"].to_pylist()),
        loss_tokens=sum(metadata["loss_tokens"].to_pylist()), reverse_kl=0.0, staleness_mean=float(staleness.mean()),
        staleness_max=int(staleness.max()), step_time_s=time.monotonic() - start, data_wait_s=read_s,
    )  # fmt: skip
    store.add_steps([step])
    store.release(f"{plan.stage}-{plan.window}")
    acknowledged.add(stage=plan.stage, window=plan.window, rows=rows.tolist(), read_s=read_s, tokens=step.tokens)


def run_member(fleet: Fleet, folder: Path, role: str, number: int) -> None:
    """Run one member of the fleet until its share of the work is done. role: engine, scorer or trainer."""
    {"engine": run_engine, "scorer": run_scorer, "trainer": run_trainer}[role](fleet, folder, number)
