"""`mopd store verify` on every kind of damage: table, row, sample and what is wrong, and nothing else."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import store_builders as build
from lance.fragment import RowIdSequence, write_fragments
from replacing import replace_rows

from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.records import PlanWindow, Prompt
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.decode import keep_tokenizer

Row = dict[str, Any]


@pytest.fixture
def scored(store: Store) -> Store:
    """Three samples with a signal, a reward and a plan; nothing wrong."""
    samples = [build.sample(i) for i in range(3)]
    store.commit_samples(samples)
    store.add_teacher(build.teacher("t", head_digest=_sha(b"head")))
    head = store.path("heads/t.safetensors")
    head.parent.mkdir(exist_ok=True)
    head.write_bytes(b"head")
    store.commit_signals("t", "logprob", [build.signal(s, row, "logprob") for row, s in enumerate(samples)])
    store.add_rewards(
        [{"uid": s.uid, "sample_row": i, "verifier": "v", "verifier_version": "1", "reward": 1.0}
         for i, s in enumerate(samples)]
    )  # fmt: skip
    store.add_plan(
        PlanWindow(
            stage="student", window=4, seed=0, settings={}, snapshot=store.snapshot(), sample_rows=np.array([2, 0, 1]),
            pack_starts=np.array([0, 3]), pack_teachers=np.zeros(1, np.int16), step_starts=np.array([0, 1]),
            teachers=["t"], stats={}, digest="d",
        )
    )  # fmt: skip
    assert store.verify().findings == []
    return store


def _sha(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def rewrite(table: str, change: Callable[[list[Row]], list[Row]]) -> Callable[[Store], None]:
    """Replace a table's rows behind the library's back."""

    def damage(store: Store) -> None:
        dataset = store.dataset(table)
        rows = pa.Table.from_pylist(change(dataset.to_table().to_pylist()), dataset.schema)
        replace_rows(f"{store.uri}/{table}", rows)

    return damage


def at(row: int, **values: object) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [old | values if index == row else old for index, old in enumerate(rows)]


def without_last(rows: list[Row]) -> list[Row]:
    return rows[:-1]


def uid(number: int) -> str:
    return build.sample(number).uid


DAMAGES = {
    "missing payload row": (
        rewrite("tokens", without_last), [("samples", 2, uid(2), "points to row 2 of 'tokens', which has 2 rows")],
    ),
    "payload of another sample": (
        rewrite("tokens", at(1, uid="e" * 32)), [("samples", 1, uid(1), f"which holds {'e' * 32}")],
    ),
    "changed tokens": (
        rewrite("tokens", lambda rows: at(0, tokens=[7, *rows[0]["tokens"][1:]])(rows)),
        [("tokens", 0, uid(0), "crc32c")],
    ),
    "wrong checksum": (rewrite("samples", at(1, payload_crc=1)), [("tokens", 1, uid(1), "00000001 was committed")]),
    "lengths that contradict": (rewrite("samples", at(1, total_len=99)), [("samples", 1, uid(1), "total_len 99")]),
    "dangling signal": (
        rewrite("signals/t/logprob", without_last),
        [("scores", 2, uid(2), "points to row 2 of 'signals/t/logprob', which has 2 rows")],
    ),
    "signal of another sample": (
        rewrite("signals/t/logprob", at(0, uid="e" * 32)), [("scores", 0, uid(0), f"which holds {'e' * 32}")],
    ),
    "signal table gone": (
        lambda store: shutil.rmtree(f"{store.uri}/signals/t/logprob"),
        [("scores", row, uid(row), "which cannot be read") for row in range(3)],
    ),
    "score of no sample": (
        rewrite("scores", at(1, sample_row=99)), [("scores", 1, uid(1), "row 99 of 'samples', which has 3 rows")],
    ),
    "score by other weights": (rewrite("scores", at(2, teacher_digest="x")), [("scores", 2, uid(2), "with digest x")]),
    "reward of another sample": (
        rewrite("rewards", at(0, sample_row=1)), [("rewards", 0, uid(0), f"which holds {uid(1)}")],
    ),
    "plan of no sample": (
        rewrite("plans", at(0, sample_rows=[2, 0, 41])), [("plans", 0, "student", "window 4 plans sample row 41")],
    ),
    "head gone": (
        lambda store: store.path("heads/t.safetensors").unlink(),
        [("teachers", 0, "t", "heads/t.safetensors is missing")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_named_and_nothing_else(scored: Store, name: str) -> None:
    damage, expected = DAMAGES[name]
    damage(scored)
    findings = Store.open(scored.uri).verify().findings
    reported_rows = [(f.table, f.row, f.uid) for f in findings if not (f.row == -1 and "cannot be read" in f.problem)]
    assert reported_rows == [expected_finding[:3] for expected_finding in expected], findings
    for finding, (*_, problem) in zip((f for f in findings if f.row >= 0), expected, strict=True):
        assert problem in finding.problem


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [("samples", "temperature", 0.5), ("prompts", "text", "y"), ("teachers", "logit_scale", 2.0),
     ("rewards", "reward", 0.5), ("scores", "teacher_digest", "x"), ("plans", "sample_rows", [2, 0, 0])],
)  # fmt: skip
def test_any_value_of_metadata_that_changed_is_named(scored: Store, table: str, column: str, value: object) -> None:
    scored.add_prompts([Prompt(prompt_id="p", domain="d", text="x")])
    dataset = scored.dataset(table)
    rows = dataset.to_table().to_pylist()
    fragments = write_fragments(
        pa.Table.from_pylist([rows[0] | {column: value}, *rows[1:]], dataset.schema), dataset, mode="append",
        data_storage_version=dataset.data_storage_version,
    )  # fmt: skip
    old_fragments = dataset.get_fragments()
    fragments[0].row_id_meta = RowIdSequence(list(range(len(rows)))).to_inline_metadata()
    operation = lance.LanceOperation.Update(
        removed_fragment_ids=[fragment.fragment_id for fragment in old_fragments], new_fragments=fragments
    )
    lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
    named = [
        (finding.table, finding.row)
        for finding in scored.verify(deep=False).findings
        if "row crc32c" in finding.problem
    ]
    assert named == [(table, 0)]


def test_a_flipped_size_of_hidden_states_is_named(scored: Store) -> None:
    """Readers here know the size from other columns, so the states are read as before; other readers fail."""
    samples = [build.sample(i) for i in range(3)]
    signals = [build.signal(s, row, "hidden") for row, s in enumerate(samples)]
    scored.commit_signals("t", "hidden", signals)
    [file] = scored.path("signals/t/hidden/data").glob("*.lance")
    content = bytearray(file.read_bytes())
    size = signals[1].hidden.nbytes.to_bytes(8, "little")  # type: ignore[union-attr]
    content[content.index(size) + 3] ^= 1 << 6
    file.write_bytes(content)
    [finding] = Store.open(scored.uri).verify().findings
    assert (finding.table, finding.row, finding.uid) == ("signals/t/hidden", 1, uid(1))
    assert "Lance records 1,07" in finding.problem


def test_columns_of_different_lengths_are_named(scored: Store) -> None:
    """A bit that makes one column of a file of payload longer than the others, which are read one by one."""
    samples = [build.sample(number) for number in range(3, 11)]
    rows = scored.commit_samples(samples).rows.tolist()
    scored.commit_signals("t", "logprob", [build.signal(s, r, "logprob") for s, r in zip(samples, rows, strict=True)])
    folder = scored.path("signals/t/logprob")
    path = max((folder / "data").iterdir(), key=lambda file: file.stat().st_size)
    content = path.read_bytes()
    for bit in range(len(content) * 8 * 3 // 4, len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        if _has_different_lengths(folder, path.name):
            break
    else:
        pytest.fail("no bit changes the length of a column")
    [finding] = [finding for finding in scored.verify().findings if "differing lengths" in finding.problem]
    assert (finding.table, path.name in finding.problem) == ("signals/t/logprob", True)


def _has_different_lengths(folder: Path, name: str) -> bool:
    try:
        for fragment in lance.dataset(str(folder)).get_fragments():
            if name in str(fragment.data_files()):
                fragment.to_table(limit=1)
    except BaseException as error:
        return "differing lengths" in str(error)
    return False


def test_a_merge_by_lance_alone_keeps_a_store_sound(scored: Store) -> None:
    for row in range(3):
        scored.add_rewards(
            [{"uid": uid(row), "sample_row": row, "verifier": "u", "verifier_version": "1", "reward": 0.0}]
        )
    before = scored.dataset("rewards").to_table().sort_by("created_at")
    lance.dataset(f"{scored.uri}/rewards").optimize.compact_files()
    after = Store.open(scored.uri)
    assert len(after.dataset("rewards").get_fragments()) == 1
    assert after.dataset("rewards").to_table().sort_by("created_at").equals(before)
    assert after.verify().findings == []


def test_files_of_interrupted_commits_are_swept_when_they_are_old(scored: Store) -> None:
    """A committer may still be at work on a young file; after seven days nobody is."""
    assert scored.root is not None
    data = scored.root / "tokens" / "data"
    young, old = data / "young.lance", data / "old.lance"
    for file in (young, old):
        shutil.copy(next(data.iterdir()), file)
    week = time.time() - 8 * 86400
    os.utime(old, (week, week))
    assert scored.verify().findings == []
    scored.compact()
    assert (young.exists(), old.exists()) == (True, False)
    assert scored.verify().findings == []


def _beside(store: Store) -> None:
    """What else a store may hold: statistics of tokens, a tokenizer, what ran the job, merged weights."""
    entropy = np.linspace(0, 1, build.sample(0).loss_tokens, dtype=np.float32)
    for step in range(2):
        stats = TokenStats(sample_row=0, stage="student", step=step, values={"student_entropy": entropy})
        write_token_stats(store, [stats])
    keep_tokenizer(store, "9f2c", {"model": "none"})
    store.write_json("provenance.json", {"runs": [{"commit": "a"}]})
    merged = store.path("policies/student/merged-v1")
    merged.mkdir(parents=True)
    (merged / "model.safetensors").write_bytes(b"weights")
    write_checksums(merged, identities=True)
    assert store.verify().findings == []


def _flip(name: str) -> Callable[[Store], None]:
    def damage(store: Store) -> None:
        content = bytearray(store.path(name).read_bytes())
        content[len(content) // 2] ^= 1
        store.path(name).write_bytes(content)

    return damage


def _cut(name: str) -> Callable[[Store], None]:
    def damage(store: Store) -> None:
        for manifest in store.path(f"{name}/_versions").glob("*.manifest"):
            manifest.write_bytes(manifest.read_bytes()[:-9])

    return damage


@pytest.mark.parametrize(
    ("damage", "table"),
    [(_flip("policies/student/merged-v1/model.safetensors"), "policies/student/merged-v1/model.safetensors"),
     (_flip("policies/student/merged-v1/checksums.json"), "policies/student/merged-v1/checksums.json"),
     (_flip("provenance.json"), "provenance.json"), (_flip("tokenizers/9f2c.json"), "tokenizers/9f2c.json"),
     (_cut("token_stats"), "token_stats"),
     (lambda store: shutil.rmtree(store.path("token_stats")), "token_stats"),
     (lambda store: shutil.rmtree(store.path("acknowledged/samples")), "samples"),
     (lambda store: shutil.rmtree(store.path("acknowledged/token_stats")), "token_stats")],
)  # fmt: skip
def test_what_lies_beside_the_first_tables_is_audited_too(
    scored: Store, damage: Callable[[Store], None], table: str
) -> None:
    _beside(scored)
    scored.commit_samples([build.sample(9)])
    damage(scored)
    for deep in (True, False):
        reported_tables = {finding.table for finding in Store.open(scored.uri).verify(deep=deep).findings}
        # a quick audit does not read weights
        assert reported_tables == ({table} if deep or "safetensors" not in table else set())


def test_what_somebody_else_put_into_a_store_is_no_table(scored: Store) -> None:
    (scored.path("signals") / "t" / "My Notes").mkdir()
    (scored.path("signals") / ".DS_Store").write_bytes(b"")
    assert scored.verify().findings == []
    assert "signals/t/logprob" in scored.info()["tables"]


def test_an_audit_runs_under_a_limit_that_is_lower_than_the_free_memory(scored: Store) -> None:
    limit = 16 << 30

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    command = [sys.executable, "-m", "mopd_dataplane", "store", "verify", scored.uri]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=limited, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
