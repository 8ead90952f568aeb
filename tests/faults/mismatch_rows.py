"""Row 14 of the fault list: another format version, renamed columns, other types, another tokenizer or vocabulary."""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import lance
import pyarrow as pa
from deaths import Died, folder, raiser, told_by
from inject import Row, Tally
from tinystage import TEACHER, build, make_stage

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.log import framing
from mopd_dataplane.base.sealed_json import seal, unseal
from mopd_dataplane.errors import DamagedError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.load import slot_layout as slots
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.models.vocabulary import compare_vocabularies
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.runner import RolloutTask, run_rollout
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.dataset_format import FORMAT_KEY, spec_of
from mopd_dataplane.tables import FORMAT_VERSION, TABLES, signal_table
from mopd_dataplane.testing.toy_engine import ToyEngine
from mopd_dataplane.train import checkpoint as checkpoints

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenizers_apart import exchanged_letters

warnings.filterwarnings("ignore", message="lance is not fork-safe")

Spoil = Callable[[Path], None]
Case = tuple[str, Spoil, Callable[[Path], object], tuple[str, ...]]
"""what is wrong, how it comes about, what is then tried, words that the refusal must have"""


def others(current: int) -> list[tuple[int, tuple[str, str]]]:
    """The format before and the one after, and how a refusal names both."""
    return [(version, (f" {version},", f" {current}")) for version in (current + 1, current - 1)]


def cases() -> Iterator[Case]:
    """Every mismatch there is a format for."""
    for version, words in others(FORMAT_VERSION):
        yield f"store of format {version}", partial(mark_store, version=version), Store.open, words
    for version, words in others(framing.VERSION):
        yield f"log of format {version}", partial(mark_log, version=version), roll, words
    for version, words in others(checkpoints.FORMAT):
        yield f"checkpoint of format {version}", partial(mark_checkpoint, version=version), read_checkpoint, words
    for version, words in others(slots.FORMAT):
        yield f"slot of format {version}", no_change, partial(read_slot, version=version), words
    for name in (*TABLES, signal_table(TEACHER, "logprob")):
        for version, _ in others(FORMAT_VERSION):
            both = (f"format version {version}", f"reads {FORMAT_VERSION}")
            yield f"{name} of format {version}", partial(mark_table, name=name, version=version), use(name), both
        yield f"{name}, column renamed", partial(change_column, name=name, how="renamed"), use(name), ("is missing",)
        yield f"{name}, column of another type", partial(change_column, name=name, how="retyped"), use(name), (
            "expected", "bool",
        )  # fmt: skip
    yield "log of another tokenizer", begin_log, partial(roll, tokenizer="other"), ("toy", "other")
    other = {"tokenizer": {"tokenizer_digest": "other"}, "weights": {"weights_digest": "other"}}
    for what, change in other.items():
        yield f"teacher of other {what}", no_change, partial(teach, **change), ("in the store", "other")
    yield "teacher of another tokenizer than the student", no_change, same_tokenizer, ("'a'", "'b'")


def refused(count: int, seed: int) -> Tally:
    """Each is refused with what was found and what is allowed, and not a byte is written."""
    tally, draw = Tally(), random.Random(seed)
    mismatches = list(cases())
    draw.shuffle(mismatches)
    with folder() as template:
        told_by(partial(make_stage, template))
        for what, spoil, act, words in mismatches[: max(count, 1)]:
            problem = told_by(partial(try_it, template, spoil, act, words))
            tally.case(problem == "", f"{what}: {problem}")
    return tally


def try_it(template: Path, spoil: Spoil, act: Callable[[Path], object], words: tuple[str, ...]) -> str:
    """What was not as it should be; empty when the refusal was."""
    with folder() as home:
        shutil.copytree(template, home)
        spoil(home)
        before = everything(home)
        try:
            act(home)
        except (MismatchError, DamagedError) as error:
            missing = [word for word in words if word not in str(error)]
            if missing:
                return f"the message lacks {missing}: {error}"
        else:
            return "it was taken"
        after = everything(home)
        return "" if after == before else f"written: {sorted(before.items() ^ after.items())[:2]!r:.200}"


def everything(home: Path) -> dict[str, bytes]:
    """Every file but locks."""
    files = (file for file in home.rglob("*") if file.is_file() and "lock" not in str(file.relative_to(home)).lower())
    return {str(file.relative_to(home)): file.read_bytes() for file in files}


def no_change(home: Path) -> None:
    """The store is as it should be; what is tried on it is not."""


def mark_store(home: Path, version: int) -> None:
    """Another release made this store."""
    mark = unseal((home / "store.json").read_bytes(), "store.json")
    (home / "store.json").write_bytes(seal({**mark, "format_version": version}))


def mark_table(home: Path, name: str, version: int) -> None:
    """Another release made this table."""
    lance.dataset(str(home / name)).update_schema_metadata({FORMAT_KEY.decode(): str(version)})


def change_column(home: Path, name: str, how: str) -> None:
    """The first column that must be there has another name, or is a truth value."""
    schema = lance.dataset(str(home / name)).schema
    index = next(i for i, field in enumerate(schema) if not field.nullable)
    field = schema.field(index)
    changed = field.with_name(f"{field.name}_2") if how == "renamed" else pa.field(field.name, pa.bool_(), False)
    table = schema.set(index, changed).empty_table()
    lance.write_dataset(table, str(home / name), mode="overwrite", data_storage_version=spec_of(name).storage)


def use(name: str) -> Callable[[Path], object]:
    """Write to a table where there is a plain way to, else read it."""

    def act(home: Path) -> object:
        store = Store.open(home)
        if name in ("samples", "tokens"):
            return store.commit_samples([build.sample(99)])
        if name == "events":
            return store.add_event("e", "s", "k", 0, None, {})
        if name == "teachers":
            return store.add_teacher(build.teacher("other"))
        return store.table(name)

    return act


def begin_log(home: Path) -> None:
    """A rollout that died in the middle."""
    fault_points.observe(raiser("rollout.commit"))
    try:
        roll(home)
    except Died:
        pass
    finally:
        fault_points.observe(None)


def mark_log(home: Path, version: int) -> None:
    """Another release wrote this log."""
    begin_log(home)
    for path in (home / "wal").rglob("*.wal"):
        content = bytearray(path.read_bytes())
        struct.pack_into("<I", content, len(framing.MAGIC), version)
        head = bytes(content[: framing.SEGMENT_HEADER - 4])
        struct.pack_into("<I", content, len(head), framing._masked(crc32c(head)))
        path.write_bytes(content)


def roll(home: Path, tokenizer: str = "toy") -> None:
    """A rollout over whatever log there is."""
    engine = ToyEngine(slots=4)
    engine.tokenizer_digest = tokenizer
    prompts = [Prompt(prompt_id=f"p{i}", domain="d", text=f"{i} + {i} =") for i in range(8)]
    run_rollout(
        engine,
        prompts,
        RolloutTask(
            stage="student",
            iteration=1,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=40),
            wal=sections.Wal(full_disk_wait_s=0),
            wal_dir=home / "wal",
            render=lambda prompt: [ord(c) % 12 for c in prompt.text],
        ),
        commit=lambda samples: None,
    )


def mark_checkpoint(home: Path, version: int) -> None:
    """Another release wrote this checkpoint."""
    checkpoint_dir = home / "checkpoints" / "step-00000002"
    checkpoint_dir.mkdir(parents=True)
    (checkpoint_dir / "state.json").write_text(
        json.dumps({"format": version, "position": {}, "identity": {}, "digests": {}})
    )
    (checkpoint_dir.parent / "latest").write_text(checkpoint_dir.name)


def read_checkpoint(home: Path) -> object:
    """Resume from the newest checkpoint."""
    return checkpoints.latest_checkpoint(home / "checkpoints")


def read_slot(home: Path, version: int) -> object:
    """Read shared memory that another release filled."""
    slot = bytearray(4096)
    slots.HEADER.pack_into(slot, 0, slots.MAGIC, version, 0, 1, 0, 0, 0)
    return slots.read_header(memoryview(slot))


def teach(home: Path, **change: str) -> None:
    """Another teacher under a known name."""
    Store.open(home).add_teacher(build.teacher(TEACHER, **change))


def same_tokenizer(home: Path) -> None:
    """A teacher with another tokenizer than the student's."""
    student = character_tokenizer()
    compare_vocabularies(student, exchanged_letters(student), name="t")


ROWS = [
    Row(
        14, "other format version, column, type, tokenizer or vocabulary", "refused with both named, nothing written",
        refused, (12, 100, 100),
    ),
]  # fmt: skip
