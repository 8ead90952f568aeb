"""Row 16 of the fault list: hostile names, symbolic links, SQL in ids, pickles in payloads, bombs."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from deaths import folder, told_by
from inject import Row, Tally
from mismatch_rows import everything
from tinystage import TEACHER, build, make_stage

from mopd_dataplane.errors import DamagedError, MopdError
from mopd_dataplane.job import sections
from mopd_dataplane.job.load import check_job, load_job
from mopd_dataplane.load.protocol import Channel
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.prompts import load_prompts
from mopd_dataplane.records import Prompt, Signal
from mopd_dataplane.rollout.log.wal import TokenLog
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.testing.toy_engine import ToyEngine
from mopd_dataplane.train.checkpoint import latest_checkpoint
from mopd_dataplane.train.heads import TeacherHeads
from mopd_dataplane.train.spec import HeadFile

warnings.filterwarnings("ignore", message="lance is not fork-safe")

NAMES = {
    "parent": "../x", "absolute": "/tmp/x", "NUL": "a\0b", "option": "-rf", "right to left": "a\u202egpj",
    "4 KiB": "x" * 4096, "folder": "a/b", "dots": "..", "SQL": "x'; drop table samples; --", "new line": "a\n",
}  # fmt: skip
MOST_SECONDS, MOST_BYTES = 30.0, 512 << 20
Act = Callable[[Path], object]


def with_name(name: str) -> Iterator[tuple[str, Act]]:
    """Every place where a name from outside becomes part of a path or a query."""
    yield "stage of a rollout", lambda home: roll_as(home, stage=name)
    yield "writer of a rollout", lambda home: roll_as(home, writer=name)
    yield "snapshot tag", lambda home: Store.open(home).snapshot(tag=name)
    yield "teacher", lambda home: Store.open(home).add_teacher(build.teacher(name))
    yield "signals of a teacher", lambda home: Store.open(home).commit_signals(name, "logprob", [])
    yield "table", lambda home: Store.open(home).table(name)
    yield "sample uid", lambda home: Store.open(home).commit_samples([build.sample(0, uid=name)])
    yield "name of a job", lambda home: check_job({"name": name, "store": "s"}, where="job.toml")
    yield "checkpoint pointer", lambda home: read_checkpoint(home, name)


def roll_as(home: Path, **names: str) -> None:
    """A rollout under these names."""
    run_rollout(
        ToyEngine(slots=4),
        [Prompt(prompt_id="p", domain="d", text="1")],
        RolloutTask(
            iteration=1,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=4),
            wal=sections.Wal(),
            wal_dir=home / "wal",
            render=lambda prompt: [1],
            **({"stage": "student"} | names),  # type: ignore[arg-type]
        ),
        commit=lambda samples: None,
    )


def read_checkpoint(home: Path, name: str) -> object:
    """Resume where `latest` names something else than a checkpoint."""
    pointer = home / "checkpoints" / "latest"
    pointer.parent.mkdir()
    pointer.write_text(name)
    return latest_checkpoint(pointer.parent)


def refused(home: Path, act: Act, name: str) -> str:
    """What went wrong in refusing; empty when the name was refused before anything was opened or written."""
    opened: list[str] = []
    before = everything(home)
    tail = os.path.normpath(name.partition("\0")[0]).rpartition("/")[2]

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove") and tail in os.fspath(str(args[0])).split("/"):
            opened.append(str(args[0]))

    sys.addaudithook(look)
    try:
        act(home)
    except MopdError as error:
        masks = {k: v for k, v in everything(home).items() if k != "checkpoints/latest"}
        opened = [path for path in opened if not path.startswith("/proc/")]
        return "" if masks == before and not opened else f"opened {opened}, after {error!r:.200}"
    return "it was taken"


def sql_in_ids(home: Path) -> str:
    """Text is kept as text, whatever it says."""
    store = Store.open(home)
    hostile = "x'; drop table samples; --"
    store.add_prompts([Prompt(prompt_id=hostile, domain=hostile, text=hostile)])
    masks = [prompt.text for prompt in store.prompts(domains=[hostile])] == [hostile]
    return "" if masks and store.plan(hostile, 0) is None and store.samples().num_rows else "not kept as text"


def pickled_payload(home: Path) -> str:
    """A pickle in a payload is bytes like any other."""
    store = Store.open(home)
    sample, trap = build.sample(0), home / "trap"
    bomb = pickle.dumps(Trap(str(trap)))
    hidden = np.frombuffer((bomb * 40)[: sample.loss_tokens * 16], np.uint8).reshape(-1, 16)
    store.commit_signals(TEACHER, "hidden", [
        Signal(uid=sample.uid, sample_row=0, kind="hidden", codec="bf16", hidden=hidden)
    ])  # fmt: skip
    (payload,) = store.read_signal(TEACHER, "hidden", [0], verify=True)
    return "" if np.array_equal(payload, hidden) and not trap.exists() else "not bytes like any other"


class Trap:
    """Unpickling makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def pickled_model(home: Path) -> None:
    """A model folder whose only weights are a pickle."""
    model_dir = home / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 9, "hidden_size": 8}))
    (model_dir / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(str(home / "trap"))))
    try:
        load_model(model_dir)
    except OSError as error:
        assert not (home / "trap").exists()
        raise DamagedError(str(error)) from None


def pickled_head(home: Path) -> None:
    """A head file that is a pickle."""
    file = home / "head.safetensors"
    file.write_bytes(pickle.dumps(Trap(str(home / "trap"))))
    TeacherHeads({"t": HeadFile(path=str(file), digest="0" * 64)}, torch.device("cpu")).get("t")


def linked_lock(home: Path) -> None:
    """Somebody put a symbolic link where the log's lock will be."""
    target = planted(home, "LOCK")
    try:
        TokenLog.open(home / "wal", sections.Wal())
    finally:
        assert target.read_text() == "precious"


def linked_segment(home: Path) -> str:
    """Somebody put symbolic links where segments may be: a new epoch writes somewhere else."""
    target = planted(home, "00000001/0000000000000000.tmp")
    log, _ = TokenLog.open(home / "wal", sections.Wal())
    log.close()
    return "" if target.read_text() == "precious" else "written through a link"


def planted(home: Path, log_path: str) -> Path:
    """The file that a symbolic link at a place of the log points to."""
    target = home.with_name("victim")
    target.write_text("precious")
    link = home / "wal" / log_path
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    return target


def parquet_bomb(home: Path) -> None:
    """A small file of prompts that unpacks to gigabytes."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), pa.array(["x" * 100_000]))
    pq.write_table(pa.table({"text": column}), home / "bomb.parquet", compression="zstd")
    load_prompts("d", sections.Domain(source=str(home / "bomb.parquet"), train=1))


def deep_prompts(home: Path) -> None:
    """A line of JSON that is nested a hundred thousand deep."""
    (home / "deep.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    load_prompts("d", sections.Domain(source=str(home / "deep.jsonl"), train=1))


def wide_job(home: Path) -> None:
    """A job file with a million keys."""
    (home / "job.toml").write_text("name = 'j'\nstore = 's'\n" + "".join(f"key{i} = 1\n" for i in range(1_000_000)))
    load_job(home)


def message(body: bytes, announced: int = 0) -> Act:
    """A message to the loader that is larger, deeper or wider than any."""

    def act(home: Path) -> None:
        ours, theirs = socket.socketpair()
        theirs.sendall(struct.pack("<I", announced or len(body)) + body[: 1 << 16])
        theirs.shutdown(socket.SHUT_WR)
        Channel(ours).receive(deadline_s=5)

    return act


WIDE = json.dumps({str(number): 0 for number in range(1_000_000)}).encode()
OTHERS: dict[str, Act] = {
    "pickled model": pickled_model,
    "pickled head": pickled_head,
    "link at the lock": linked_lock,
    "parquet bomb": parquet_bomb,
    "deep prompts": deep_prompts,
    "million keys in a job file": wide_job,
    "million keys in a message": message(WIDE),
    "message of 4 GiB": message(b"", announced=(1 << 32) - 1),
    "deep message": message(b"[" * 30_000),
    "zip in a message": message(b"PK\x03\x04" + bytes(1000)),
    "head file outside the store": lambda home: Store.open(home).add_teacher(
        build.teacher("t", head_file="../../etc/passwd")
    ),
    "two statements": lambda home: Store.open(home).sql("select 1; drop table samples"),
    "a file in SQL": lambda home: Store.open(home).sql("select * from read_text('/etc/passwd')"),
    "writing SQL": lambda home: Store.open(home).sql(f"copy samples to '{home}/out.csv'"),
}
KEPT: dict[str, Callable[[Path], str]] = {
    "SQL in ids": sql_in_ids,
    "pickle in a payload": pickled_payload,
    "link at a segment": linked_segment,
}


def bounded(home: Path, act: Act) -> str:
    """What went wrong in refusing something too large or not what it says; empty when it was refused at little cost."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        act(home)
    except MopdError as error:
        seconds = time.monotonic() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        cheap = seconds < MOST_SECONDS and grown < MOST_BYTES and len(str(error)) < 1 << 14
        return "" if cheap else f"{seconds:.1f} s, {grown >> 20} MiB, message of {len(str(error))} characters"
    return "it was taken"


def hostile(count: int, seed: int) -> Tally:
    """Refused before anything is opened, or kept as the plain text or bytes it is."""
    tally, draw = Tally(), random.Random(seed)
    attempts: list[tuple[str, Callable[[Path], str]]] = [
        (f"{role} {kind}", partial(refused, act=act, name=name))
        for kind, name in NAMES.items()
        for role, act in with_name(name)
        if (role, kind) != ("checkpoint pointer", "new line")  # a pointer ends with a line end or not
    ]
    attempts += [(what, partial(bounded, act=act)) for what, act in OTHERS.items()]
    attempts += list(KEPT.items())
    draw.shuffle(attempts)
    with folder() as template:
        told_by(partial(make_stage, template))
        for what, try_it in attempts[: max(count, 1)]:
            problem = told_by(partial(in_a_copy, template, try_it))
            tally.case(problem == "", f"{what}: {problem}")
    return tally


def in_a_copy(template: Path, try_it: Callable[[Path], str]) -> str:
    """Try something on a store of its own."""
    with folder() as home:
        shutil.copytree(template, home)
        return try_it(home)


ROWS = [
    Row(
        16, "hostile names, links, SQL, pickles, bombs", "refused before any open, or kept as plain bytes",
        hostile, (20, 200, 200),
    ),
]  # fmt: skip
