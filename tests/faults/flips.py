"""One-bit flips in the files of a real store: what does `verify` say of them, and is what is read still the same?

A process of its own applies a flip, audits, reads everything, and puts the byte back; when Lance takes it down with
it, or it does not answer, the parent says so and starts another one.

    found      verify names damage, or the store is refused by name when it is opened
    harmless   verify is silent, and everything that is read is as before the flip
    silent     verify is silent, and something that is read is not as before
    raised     verify ended with an exception, took its process down, or did not end
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER_S = 600.0
OUTCOMES = ("found", "harmless", "silent", "raised")
UNREAD = ("locks/", "report.html", ".lock", ".torn", "wal/")
"""Parts of names of files whose bytes nothing reads back; the token log has rows of its own."""
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "base.json")
"""Files of a policy that is an adapter: a few among those of many whole models, so each is a kind of its own."""


@dataclass(frozen=True)
class Flip:
    """One bit of one file."""

    file: str
    byte: int
    bit: int


@dataclass(frozen=True)
class Outcome:
    """What came of a flip."""

    flip: Flip
    kind: str
    what: str
    said: str


def kind_of(name: str) -> str:
    """What sort of file this is, so that rare sorts are flipped as often as common ones."""
    table = re.match(r"(signals/[^/]+/[a-z]+|queues/[^/]+|[a-z_]+)/(_versions|_transactions|_refs|data)/", name)
    if table is None:
        head, _, rest = name.partition("/")
        last = Path(rest).name if Path(rest).name in ADAPTER else Path(rest).suffix or Path(rest).name
        return f"{head}/{last}" if rest else head
    part = table[2]
    if part == "_versions":
        return "version hint" if name.endswith("hint.json") else f"manifest of {_plain(table[1])}"
    if part == "data":
        return f"data of {_plain(table[1])}"
    return {"_transactions": "transaction", "_refs": "tag"}[part]


def _plain(table: str) -> str:
    return re.sub(r"signals/[^/]+/", "signals/*/", table)


def files_by_kind(root: Path) -> dict[str, list[str]]:
    """Names of the files of a store, by kind; those that are empty or that nothing reads are left out."""
    names_by_kind: dict[str, list[str]] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size):
        name = path.relative_to(root).as_posix()
        if not any(part in name for part in UNREAD):
            names_by_kind.setdefault(kind_of(name), []).append(name)
    return names_by_kind


def draw(root: Path, count: int, seed: int) -> Iterator[Flip]:
    """`count` flips: every kind of file in turn, then any file of it, any byte, any bit."""
    chance = random.Random(seed)
    kinds = files_by_kind(root)
    for number in range(count):
        file = chance.choice(kinds[sorted(kinds)[number % len(kinds)]])
        yield Flip(file, chance.randrange((root / file).stat().st_size), chance.randrange(8))


def try_flips(root: Path, flips: Iterator[Flip]) -> Iterator[Outcome]:
    """Apply each flip to the store, which is as it was afterwards."""
    worker: _Worker | None = None
    for flip in flips:
        worker = worker or _Worker(root)
        path = root / flip.file
        before = path.read_bytes()
        answer = worker.ask(flip)
        if answer is None:
            worker.end()
            worker, answer = None, {"what": "raised", "said": "the process of the audit died, or did not answer"}
            path.write_bytes(before)
        assert path.read_bytes() == before, f"{path} was changed"
        yield Outcome(flip, kind_of(flip.file), answer["what"], answer["said"])
    if worker is not None:
        worker.end()


class _Worker:
    """The process in which flips are tried."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, __file__, str(root)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, flip: Flip) -> dict[str, str] | None:
        """What came of a flip; None when there is no answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([flip.file, flip.byte, flip.bit]) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def read_everything(root: Path) -> dict[str, str]:
    """Digest of everything that is read of a store, by place: rows of every table at the newest and every pinned
    version, payload bytes, JSON as it parses, other files as they are."""
    from mopd_dataplane.store.dataset import Store

    store = Store.open(root)
    said: dict[str, str] = {}
    versions = {"newest": None} | {f"pinned {tag}": store.snapshot(tag) for tag in store.info()["snapshots"]}
    for when, snapshot in versions.items():
        for name in store.names():
            if snapshot is None or name in snapshot.versions:
                said[f"{name}, {when}"] = _rows(store.dataset(name, snapshot))
    for names in files_by_kind(root).values():
        for name in names:
            if not re.search(r"(^|/)(_versions|_transactions|_refs|data|wal)/", name):
                said[name] = _file(root / name)
    return said


def _rows(dataset: Any) -> str:
    from mopd_dataplane.store.read import row_reader

    with row_reader.lance_errors.reading(dataset.uri):
        blobs = [field.name for field in dataset.schema if "blob" in str(field.type)]
        plain = [field.name for field in dataset.schema if field.name not in blobs]
        rows = dataset.to_table(columns=plain, with_row_id=True).combine_chunks()
        whole = hashlib.sha256(repr([(field.name, str(field.type)) for field in rows.schema]).encode())
        whole.update(json.dumps(rows.to_pylist(), default=str).encode())
        for name in blobs:
            for blob in dataset.take_blobs(name, indices=list(range(rows.num_rows))) if rows.num_rows else []:
                whole.update(blob.readall() if blob is not None else b"none")
    return whole.hexdigest()


def _file(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".json":
        content = json.dumps(json.loads(content), sort_keys=True).encode()
    elif path.name == "latest":
        content = content.strip()
    return hashlib.sha256(content).hexdigest()


def _quietly(work: Callable[[], Any]) -> Any:
    """What the work returns, or the error it ended with; a panic of Rust derives from BaseException."""
    try:
        return work()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return error


def checked(root: Path, before: Mapping[str, str]) -> tuple[str, str]:
    """(outcome, what was said) of the store as it is now."""
    from mopd_dataplane.errors import MopdError
    from mopd_dataplane.store.dataset import Store

    store = _quietly(lambda: Store.open(root))
    if isinstance(store, MopdError):
        return "found", f"refused: {store}"
    if isinstance(store, BaseException):
        return "raised", f"open: {store!r}"
    audit = _quietly(store.verify)
    if isinstance(audit, BaseException):
        return "raised", f"verify: {audit!r}"
    if not audit.ok:
        return "found", "; ".join(f"{f.table} {f.row} {f.uid}: {f.problem}" for f in audit.findings[:3])
    after = _quietly(lambda: read_everything(root))
    if isinstance(after, BaseException):
        return "silent", f"cannot be read: {after!r:.300}"
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return ("silent", f"reads otherwise: {', '.join(sorted(changed)[:4])}") if changed else ("harmless", "")


def serve(root: Path) -> None:
    """Try the flips that come in, one JSON line each, and answer each with one."""
    before = read_everything(root)
    for line in sys.stdin:
        name, byte, bit = json.loads(line)
        path = root / name
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[byte] ^= 1 << bit
        path.write_bytes(flipped)
        try:
            what, said = checked(root, before)
        finally:
            path.write_bytes(content)
        print(json.dumps({"what": what, "said": said[:600]}), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
