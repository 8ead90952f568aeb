"""Everybody at work on one store at once: who they are, and the audit of what they leave behind.

Nothing here touches Lance in the calling process: it forks, and Lance's threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from deaths import Child
from tinystage import client_of

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "store"))

import store_builders as build

from mopd_dataplane.job import sections
from mopd_dataplane.load import server
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS, collect_columns
from mopd_dataplane.plan.follow import end_window
from mopd_dataplane.plan.plan import build_window
from mopd_dataplane.records import Sample
from mopd_dataplane.store.commit import fragments
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.lance_errors import is_commit_conflict
from mopd_dataplane.store.location import StoreLocation

warnings.filterwarnings("ignore", message="lance is not fork-safe")

STAGE, TEACHER, VERIFIER = "student", "teacher", "checker"
KINDS = ("logprob", "topk", "hidden")
WRITERS, KILLED, SAMPLES, BATCH = 3, 2, 60, 6
"""Writers of as many samples each, in batches; all share a third of theirs. KILLED more share with nobody."""
WINDOWS = 4
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Ground:
    """Where a race is run."""

    uri: str
    notes: Path
    """Folder for what was acknowledged: a line for each, written by the process that was told so."""
    locks: bool
    """Whether committers take the lock."""
    samples: int = SAMPLES

    def open(self) -> Store:
        """The store, merging its small files early; without locks where there are to be none."""
        fragments.TIERS = ((4 << 20, 4),)
        if not self.locks:
            mock.patch.object(StoreLocation, "committing", return_value=contextlib.nullcontext(False)).start()
        return Store.open(self.uri)

    def acknowledge(self, lines: list[dict[str, Any]]) -> None:
        """Note what a call said on return; kept when this process is killed the next moment."""
        with open(self.notes / f"{os.getpid()}.jsonl", "ab", buffering=0) as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())

    def acknowledged(self) -> list[dict[str, Any]]:
        """Every line that was written whole."""
        texts = [file.read_text() for file in self.notes.glob("*.jsonl")]
        return [json.loads(line) for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]

    def work_of(self, writer: int) -> list[int]:
        """Numbers of one writer's samples, in the order it commits them in: first those that all commit at once."""
        shared, own = self.samples // 3, self.samples * 2 // 3
        if writer >= WRITERS:
            return list(range(writer * 1000, writer * 1000 + self.samples))
        return [*range(shared), *range(shared + writer * own, shared + (writer + 1) * own)]

    @property
    def promised(self) -> range:
        """Numbers of the samples of the writers that live."""
        return range(self.work_of(WRITERS - 1)[-1] + 1)

    @property
    def numbers(self) -> list[int]:
        """Numbers of every sample that anybody may commit."""
        doomed = (self.work_of(WRITERS + number) for number in range(KILLED))
        return [*self.promised, *itertools.chain(*doomed)]


def begin(ground: Ground) -> None:
    """An empty store with a teacher."""
    store = Store.create(ground.uri)
    store.add_teacher(build.teacher(TEACHER))
    for kind in KINDS:
        store.table_handle(f"signals/{TEACHER}/{kind}").create()


def write(ground: Ground, writer: int, moment_s: float | None = None) -> int:
    """Commit samples, their signals and rewards, batch by batch; die at the moment, if one is given."""
    if moment_s is not None:
        threading.Timer(moment_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    store, work = ground.open(), ground.work_of(writer)
    for first in range(0, len(work), BATCH):
        numbers = work[first : first + BATCH]
        samples = [build.sample(number) for number in numbers]
        receipt = store.commit_samples(samples)
        rows = receipt.rows.tolist()
        ground.acknowledge([{"sample": n, "row": row} for n, row in zip(numbers, rows, strict=True)])
        for kind in KINDS:
            store.commit_signals(TEACHER, kind, [signal_of(n, row, kind) for n, row in zip(numbers, rows, strict=True)])
            ground.acknowledge([{"sample": n, "signal": kind} for n in numbers])
        store.add_rewards([reward_of(n, row) for n, row in zip(numbers, rows, strict=True)])
        ground.acknowledge([{"sample": n, "reward": True} for n in numbers])
    return len(work)


def signal_of(number: int, row: int, kind: str) -> Any:
    """The signal of a sample, wherever the sample lies."""
    return replace(build.signal(build.sample(number), number, kind), sample_row=row)


def reward_of(number: int, row: int) -> dict[str, Any]:
    """The reward of a sample."""
    return {"uid": build.sample(number).uid, "sample_row": row, "verifier": VERIFIER, "verifier_version": "1",
            "reward": number / 1000, "detail": f"n{number}"}  # fmt: skip


def until_told(stop: Path) -> Iterator[int]:
    """Count until a file is there."""
    for turn in itertools.count():
        if stop.exists():
            return
        yield turn


def merge(ground: Ground, stop: Path, moment_s: float | None = None) -> int:
    """Compact, every second time with `now`; how often."""
    if moment_s is not None:
        threading.Timer(moment_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    store, turns = ground.open(), 0
    for turn in until_told(stop):
        store.compact(now=turn % 2 == 0)
        turns += 1
    return turns


def merge_as_a_stranger(ground: Ground, stop: Path) -> int:
    """`compact_files` of Lance itself, on every table that holds rows of samples; how many went through."""
    import lance

    options = Store.open(ground.uri).location.storage_options or None
    merged = 0
    names = ("tokens", "samples", "scores", "rewards", f"signals/{TEACHER}/logprob", f"signals/{TEACHER}/topk")
    for turn in until_told(stop):
        try:
            table = lance.dataset(f"{ground.uri}/{names[turn % len(names)]}", storage_options=options)
            table.optimize.compact_files()
            merged += 1
        except OSError as error:
            if not is_commit_conflict(error):
                raise
    return merged


def read(ground: Ground, stop: Path, seed: int) -> list[str]:
    """Look rows up at the newest version, at snapshots and by SQL: what was wrong in what was read."""
    store, draw = ground.open(), random.Random(seed)
    row_by_uid: dict[str, int] = {}
    tokens = {sample.uid: sample.tokens.tolist() for sample in map(build.sample, ground.numbers)}
    for turn in until_told(stop):
        at = store.snapshot(tag=f"read-{seed}") if turn % 4 == 3 else store.snapshot()
        for rows, batch in store.scan_samples(["uid"], at):
            for row, uid in zip(rows.tolist(), batch["uid"].to_pylist(), strict=True):
                if row_by_uid.setdefault(uid, row) != row:
                    return [f"{uid} moved from row {row_by_uid[uid]} to {row}"]
        if len(samples := store.samples(["uid"], snapshot=at)) > len(row_by_uid):
            return [f"{len(samples)} rows by table, {len(row_by_uid)} by scan"]
        uids = draw.sample(sorted(row_by_uid), min(8, len(row_by_uid)))
        payloads = (
            store.read_tokens([row_by_uid[uid] for uid in uids], snapshot=at, verify=True).to_pylist() if uids else []
        )
        for uid, row in zip(uids, payloads, strict=True):
            if row["uid"] != uid or row["tokens"] != tokens[uid]:
                return [f"row {row_by_uid[uid]} of {uid} read as {row['uid']}"]
        counted = store.sql("select count(*) n, count(distinct uid) d from samples join tokens using (uid)", at)
        if counted.to_pylist() != [{"n": len(samples), "d": len(samples)}]:
            return [f"{counted.to_pylist()} by SQL, {len(samples)} by table"]
        if turn % 4 == 3:
            store.release(f"read-{seed}")
    return []


def plan(ground: Ground) -> int:
    """Plan window after window over what has all its signals by then; how many samples the last one holds."""
    store, columns = ground.open(), list(SAMPLE_COLUMNS)
    planned, most = 0, len(ground.numbers)
    for window in range(WINDOWS):
        least = max(planned, len(ground.promised) * (window + 1) // (2 * WINDOWS))
        while True:
            at = store.snapshot()
            candidates = collect_columns(
                store.scan_samples(columns, at), most, route=lambda domain, effort: TEACHER,
                teachers=[TEACHER], scores=store.table("scores", ["sample_row", "teacher", "kind"], snapshot=at),
                signals=("logprob", "topk"),
            )  # fmt: skip
            if (ready := int(candidates.has_signals.sum())) >= least:
                break
            time.sleep(0.05)
        store.pin(at, f"window-{window}")
        window_plan = build_window(
            candidates, sections.Plan(pack_tokens=64, batch_samples=6), seed=window, stage=STAGE, window=window,
            snapshot=at, teachers=[TEACHER],
        )  # fmt: skip
        store.add_plan(window_plan)
        planned = ready
    store.add_plan(end_window(STAGE, WINDOWS, 0, at))
    return planned


def load(ground: Ground, path: Path) -> int:
    """Serve packs of the planned windows to whoever asks."""
    ground.open()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    spec = LoadSpec(stage=STAGE, signals=("logprob", "topk"), slots=2, deadline_s=DEADLINE_S, verify=True,
                    cache_dir=str(ground.notes / "cache"))  # fmt: skip
    return server.main(["--store", ground.uri, "--socket", str(path), "--spec", spec.model_dump_json()])


def train(ground: Ground, path: Path) -> tuple[int, list[str]]:
    """Read every window as a trainer does: (rows compared, what was wrong)."""
    rows, wrong = 0, []
    samples = {sample.tokens.tobytes(): (number, sample) for number, sample in _built(ground.numbers)}
    number_by_row: dict[int, int] = {}
    with client_of(path, deadline_s=DEADLINE_S) as client:
        for window in range(WINDOWS):
            for batch in client.batches(STAGE, window):
                for pack in batch.packs:
                    for index, row in enumerate(pack.sample_rows.tolist()):
                        span = slice(*pack.cu_seqlens[index : index + 2].tolist())
                        number, sample = samples.get(pack.tokens[span].tobytes(), (-1, None))
                        rows += 1
                        if number_by_row.setdefault(row, number) != number or not _as_given(pack, span, number, sample):
                            wrong.append(f"window {window}: row {row} is not as sample {number} was committed")
    return rows, wrong


def _built(numbers: Iterable[int]) -> Iterator[tuple[int, Sample]]:
    return ((number, build.sample(number)) for number in numbers)


def _as_given(pack: Any, span: slice, number: int, sample: Sample | None) -> bool:
    """Whether log-probs of the sampler and of the teacher are those of the sample."""
    if sample is None:
        return False
    response = slice(span.start + sample.prompt_len, span.stop)
    scored = signal_of(number, 0, "logprob").logprob
    return bool(
        np.array_equal(pack.sampler_logprobs[response], sample.logprobs)
        and np.array_equal(pack.loss_mask[response], sample.loss_mask)
        and np.array_equal(pack.teacher_logprobs[response], scored)
    )


def audit(ground: Ground) -> tuple[int, list[str]]:
    """(rows compared, what is wrong): everything there is, everything that was acknowledged."""
    store = ground.open()
    rows_of = {uid: row for part, batch in store.scan_samples(["uid"])
               for row, uid in zip(part.tolist(), batch["uid"].to_pylist(), strict=True)}  # fmt: skip
    there = {number: rows_of[sample.uid] for number, sample in _built(ground.numbers) if sample.uid in rows_of}
    wrong = []
    if not store.dataset("samples").count_rows() == len(rows_of) == len(there):
        wrong.append(f"{store.dataset('samples').count_rows()} rows, {len(rows_of)} uids, {len(there)} of them ours")
    told = ground.acknowledged()
    for number in {*ground.promised, *(line["sample"] for line in told)} - there.keys():
        wrong.append(f"sample {number} is lost")
    for line in told:
        if "row" in line and there.get(line["sample"]) != line["row"]:
            wrong.append(
                f"sample {line['sample']} was acknowledged as row {line['row']}, is {there.get(line['sample'])}"
            )
    wrong += _differing(store, there)
    compared = 2 * len(there)
    for kind in KINDS:
        owed = {*ground.promised, *(line["sample"] for line in told if line.get("signal") == kind)}
        count, problems = _signals(store, there, kind, owed)
        compared, wrong = compared + count, wrong + problems
    owed = {*ground.promised, *(line["sample"] for line in told if "reward" in line)}
    count, problems = _rewards(store, there, owed)
    report = store.verify()
    wrong += [*problems, *(f"verify: {finding}" for finding in report.findings if finding.table != "teachers")]
    return compared + count, wrong


def _signals(store: Store, there: dict[int, int], kind: str, owed: set[int]) -> tuple[int, list[str]]:
    """(signals of one kind compared, what is wrong with them); owed: samples that must have one."""
    lacking = set(store.missing_signals(TEACHER, kind, list(there.values())).tolist())
    scored = {number: row for number, row in there.items() if row not in lacking}
    wrong = [f"{kind} of sample {number} is lost" for number in owed - scored.keys()]
    payloads = store.read_signal(TEACHER, kind, list(scored.values()), verify=True)
    for number, payload in zip(scored, payloads, strict=True):
        expected = signal_of(number, 0, kind)
        parts = {
            "logprob": (expected.logprob,),
            "hidden": (expected.hidden,),
            "topk": (expected.topk_ids, expected.topk_logprobs),
        }
        payload = payload if isinstance(payload, tuple) else (payload,)
        if not all(np.array_equal(a, b) for a, b in zip(parts[kind], payload, strict=True)):
            wrong.append(f"{kind} of sample {number} is not what was committed")
    return len(scored), wrong


def _rewards(store: Store, there: dict[int, int], owed: set[int]) -> tuple[int, list[str]]:
    rewards = {row["uid"]: row for row in store.table("rewards").to_pylist()}
    wrong = []
    for number, row in there.items():
        expected = reward_of(number, row)
        expected["reward"] = float(np.float32(expected["reward"]))
        reward_row = rewards.get(expected["uid"])
        if reward_row is None and number not in owed:
            continue
        if reward_row is None or {name: reward_row[name] for name in expected} != expected:
            wrong.append(f"reward of sample {number}: {reward_row}")
    return len(rewards), wrong


_STORED = {"writer", "writer_seq"}
"""What of a sample the first of two writers decides."""


def _differing(store: Store, there: dict[int, int]) -> Iterator[str]:
    """Fields of `samples` and `tokens` that are not those of the samples that were committed."""
    rows = list(there.values())
    tables = [store.take_samples(rows), store.read_tokens(rows, verify=True)]
    columns = {name: table[name].to_pylist() for table in tables for name in table.column_names}
    compared = [field.name for field in fields(Sample) if field.name in columns and field.name not in _STORED]
    assert {"uid", "prompt_id", "tokens", "logprobs", "loss_mask", "versions", "temperature"} <= set(compared)
    for index, (number, sample) in enumerate(_built(there)):
        for name in compared:
            expected, value = getattr(sample, name), columns[name][index]
            expected = expected.tolist() if isinstance(expected, np.ndarray) else expected
            if expected is not None and value != expected:
                yield f"sample {number}: {name} is {value!r:.80}, {expected!r:.80} was committed"


def run(ground: Ground, seed: int) -> tuple[int, list[str]]:
    """One race: (rows compared, what was wrong)."""
    draw, stop, path = random.Random(seed), ground.notes / "stop", ground.notes / "l.sock"
    _told(partial(begin, ground))
    writers = [Child(partial(write, ground, number)) for number in range(WRITERS)]
    others = {
        "a merger": Child(partial(merge, ground, stop)),
        "a stranger's merges": Child(partial(merge_as_a_stranger, ground, stop)),
        "a reader": Child(partial(read, ground, stop, seed)),
    }
    planner, loader = Child(partial(plan, ground)), Child(partial(load, ground, path))
    trainer = Child(partial(train, ground, path))
    for number in range(KILLED):  # each dies at a moment of its own, while everybody else is at work
        doomed = [Child(partial(write, ground, WRITERS + number, draw.uniform(0.05, 1.5))),
                  Child(partial(merge, ground, stop, draw.uniform(0.05, 1.5)))]  # fmt: skip
        for child in doomed:
            child.end_by(DEADLINE_S)
    wrong = [f"writer {n} failed" for n, child in enumerate(writers) if child.answer(DEADLINE_S) is None]
    wrong += ["the planner failed"] if not wrong and planner.answer(DEADLINE_S) is None else []
    trained, problems = trainer.answer(DEADLINE_S) or (0, ["the trainer failed"])
    stop.touch()
    loader.end_by(DEADLINE_S)
    answers = {who: child.answer(DEADLINE_S) for who, child in others.items()}
    wrong += [*problems, *(f"{who} failed" for who, answer in answers.items() if answer is None)]
    wrong += answers["a reader"] or []
    wrong += [f"{who}: none went through" for who in ("a merger", "a stranger's merges") if answers[who] == 0]
    audited, lost = _told(partial(audit, ground)) or (0, ["the audit failed"])
    return trained + audited, wrong + lost


def _told(work: Callable[[], Any]) -> Any:
    return Child(work).answer(DEADLINE_S)
