"""Tokens of a teacher with another tokenizer: what a store accepts, checks, copies and shows of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from aligned_store import ANSWERS, DIGESTS, PROMPT, TEACHER, Vocabulary, aligned_store, texts, tokenizers
from rich.console import Console
from viewing import BEARER, client_of, get, unpack

from mopd_dataplane import Signal, Store, Teacher, create_store, open_store
from mopd_dataplane.errors import InputError, MismatchError
from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.exporter import export_samples
from mopd_dataplane.interchange.importer import import_rollouts
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.models.token_chunks import chunk_ends, chunk_problem, chunk_spans
from mopd_dataplane.query.show import read_sample
from mopd_dataplane.query.show_terminal import render
from mopd_dataplane.run.whole_copy import copy_whole
from mopd_dataplane.store.maintain.copy_samples import copy_samples
from mopd_dataplane.store.read.decode import KEPT, find_decoder
from mopd_dataplane.view.topk import INSIDE_A_CHUNK

ROWS = [*range(len(ANSWERS))]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return aligned_store(tmp_path_factory.mktemp("aligned") / "store")


@pytest.fixture
def store(original: Store, tmp_path: Path) -> Store:
    """A store of its own, for tests that change it."""
    shutil.copytree(original.root or "", tmp_path / "store")
    return open_store(str(tmp_path / "store"))


def alignment(student: list[int], tokens: list[int], teacher: list[int], *, row: int = 0, uid: str = "") -> Signal:
    """A signal of these chunk ends and tokens."""
    return Signal(
        uid=uid, sample_row=row, kind=ALIGNMENT, student_chunk_ends=np.array(student, np.uint8),
        teacher_tokens=np.array(tokens, np.int32), teacher_chunk_ends=np.array(teacher, np.uint8),
    )  # fmt: skip


def test_the_record_has_the_text_in_the_tokens_of_both(original: Store) -> None:
    """Against a plain search for the positions where both tokenizations have a boundary."""
    tokens = original.read_tokens(ROWS, ["tokens"])["tokens"].to_pylist()
    student = tokenizers()[0]
    for row, answer in enumerate(ANSWERS):
        ends, own, teacher_ends = original.read_signal(TEACHER, ALIGNMENT, [row], verify=True)[0]
        pieces = [[student.decode([token]) for token in tokens[row][len(PROMPT) :]], texts(own.tolist())]
        assert ["".join(side[:-1]) for side in pieces] == [answer, answer]
        boundaries = [{len("".join(side[: end + 1])) for end in range(len(side) - 1)} for side in pieces]
        common = sorted(boundaries[0] & boundaries[1])
        for side, marks in zip(pieces, (ends, teacher_ends), strict=True):
            assert [len("".join(side[:last])) for _, last in chunk_spans(marks)[:-1]] == common
            assert marks[-1] == 1  # the ends of the answer are a chunk


def test_chunk_ends_and_spans_are_inverse() -> None:
    for chunks in ([], [0], [0, 0, 1, 2, 2], [0, 1, 1, 1]):
        ends = chunk_ends(np.array(chunks, np.int64))
        assert [n for n, (start, stop) in enumerate(chunk_spans(ends)) for _ in range(start, stop)] == chunks
    assert chunk_problem(np.array([1, 1], np.uint8), np.array([0, 1], np.uint8)) != ""
    assert chunk_problem(np.array([1, 0], np.uint8), np.array([0, 1], np.uint8)) != ""
    assert chunk_problem(np.array([0, 1], np.uint8), np.array([1], np.uint8)) == ""


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (alignment([1], [15, 2], [1, 1]), "a value for each of 2 response tokens"),
        (alignment([1, 1], [15, 2], [0, 1]), "the student's tokens have 2 chunks, the teacher's 1"),
        (alignment([1, 1], [15, 2, 3], [1, 1, 0]), "the last token of the teacher ends no chunk"),
        (alignment([1, 1], [15, 2], [1]), "a value for each of 2 tokens of the teacher"),
        (alignment([1, 1], [15, -2], [1, 1]), "teacher_tokens"),
        (alignment([2, 1], [15, 2], [1, 1]), "student_chunk_ends"),
    ],
)
def test_a_wrong_record_is_refused(store: Store, changed: Signal, problem: str) -> None:
    changed.uid, changed.sample_row = store.samples(["uid"])["uid"][1].as_py(), 1
    with pytest.raises((MismatchError, InputError), match=problem):
        store.commit_signals(TEACHER, ALIGNMENT, [changed])


def test_verify_finds_bytes_that_differ(store: Store) -> None:
    """Records whose chunks fit together, but not the text: a token exchanged, and a boundary moved."""
    uids = store.samples(["uid"])["uid"].to_pylist()
    ends, tokens, teacher_ends = (values.copy() for values in store.read_signal(TEACHER, ALIGNMENT, [0])[0])
    store.add_teacher(renamed_teacher(store, "wrong"))
    tokens[2] += 1
    store.commit_signals("wrong", ALIGNMENT, [alignment(*map(list, (ends, tokens, teacher_ends)), uid=uids[0])])
    ends, tokens, teacher_ends = (values.copy() for values in store.read_signal(TEACHER, ALIGNMENT, [3])[0])
    ends[1:3] = ends[1:3][::-1].copy()
    moved = alignment(*map(list, (ends, tokens, teacher_ends)), row=3, uid=uids[3])
    store.commit_signals("wrong", ALIGNMENT, [moved])
    report = store.verify()
    assert {(finding.table, finding.uid) for finding in report.findings} == {
        (f"signals/wrong/{ALIGNMENT}", uids[0]), (f"signals/wrong/{ALIGNMENT}", uids[3]),
    }  # fmt: skip
    by_uid = {finding.uid: finding.problem for finding in report.findings}
    assert by_uid[uids[0]] == "chunk 2 is b'i' in the student's tokens and b'j' in the teacher's"
    assert by_uid[uids[3]] == "chunk 0 is b'in' in the student's tokens and b'ing' in the teacher's"


def renamed_teacher(store: Store, name: str) -> Teacher:
    """The teacher under another name."""
    return replace(store.teachers()[TEACHER], name=name)


def test_verify_misses_the_teachers_tokenizer(store: Store) -> None:
    file = f"{KEPT}/{DIGESTS['teacher']}.json"
    store.path(file).unlink()
    findings = store.verify().findings
    assert [(finding.table, finding.problem) for finding in findings] == [
        (file, f"the tokenizer of teacher {TEACHER!r} is missing")
    ]


def test_samples_are_never_shown_with_the_teachers_tokenizer(store: Store) -> None:
    student = find_decoder(store).texts([[15, 100]])
    store.path(f"{KEPT}/{DIGESTS['student']}.json").unlink()
    assert find_decoder(store).texts([[15, 100]]) == ["⟨15⟩⟨100⟩"] != student
    assert store.verify().findings == []  # the chunks are still checked


def test_a_store_without_alignments_is_sound(store: Store) -> None:
    """As one that an older version scored."""
    uid = store.samples(["uid"])["uid"][0].as_py()
    store.add_teacher(renamed_teacher(store, "older"))
    logprob = store.read_signal(TEACHER, "logprob", [0])[0]
    store.commit_signals("older", "logprob", [Signal(uid=uid, sample_row=0, kind="logprob", logprob=logprob)])
    assert store.verify().findings == []
    assert read_sample(store, uid, teacher="older").chunks == []
    assert store.missing_signals("older", ALIGNMENT, np.arange(2)).tolist() == [0, 1]


@pytest.mark.parametrize("where", ["", "response_len < 30"])
def test_a_copy_has_them(original: Store, tmp_path: Path, where: str) -> None:
    target = str(tmp_path / "copy")
    list(copy_samples(original, target, where) if where else copy_whole(original, target))
    copy = open_store(target)
    assert copy.verify().findings == []
    assert copy.table("scores", ["uid"], f"kind = '{ALIGNMENT}'").num_rows == len(ROWS) - bool(where)
    uid = original.samples(["uid"])["uid"][0].as_py()
    assert read_sample(copy, uid).chunks == read_sample(original, uid).chunks


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_an_export_has_them_and_the_tokenizer(original: Store, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"out.{suffix}"
    export_samples(original, out, signals=["logprob", ALIGNMENT])
    copy = create_store(str(tmp_path / "copy"))
    import_rollouts(copy, out, ImportSettings(format="plain"), Vocabulary())
    facts, order = ["uid", "teacher", "kind", "bytes", "payload_crc"], [("uid", "ascending"), ("kind", "ascending")]
    assert copy.table("scores", facts).sort_by(order) == original.table("scores", facts).sort_by(order)
    assert copy.verify().findings == []
    uid = original.samples(["uid"])["uid"][0].as_py()
    assert read_sample(copy, uid).chunks == read_sample(original, uid).chunks
    again = import_rollouts(copy, out, ImportSettings(format="plain"), Vocabulary())
    assert (again.inserted, again.signals) == (0, 0)


def test_an_export_without_them_or_their_tokenizer_is_refused(original: Store, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    export_samples(original, out, signals=["logprob"])
    settings = ImportSettings(format="plain")
    with pytest.raises(InputError, match="for a teacher with another tokenizer export its 'alignment' signals too"):
        import_rollouts(str(tmp_path / "copy"), out, settings, Vocabulary())
    out = tmp_path / "both.jsonl"
    export_samples(original, out, signals=["logprob", ALIGNMENT])
    file = tmp_path / "both.jsonl.tokenizers" / f"{DIGESTS['teacher']}.json"
    content = file.read_text()
    file.write_text("{}")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        import_rollouts(str(tmp_path / "copy"), out, settings, Vocabulary())
    file.unlink()
    with pytest.raises(InputError, match=rf"{DIGESTS['teacher']}\.json is missing"):
        import_rollouts(str(tmp_path / "copy"), out, settings, Vocabulary())
    file.write_text(content)
    assert import_rollouts(str(tmp_path / "copy"), out, settings, Vocabulary()).signals == 2 * len(ROWS)


def test_an_export_of_exact_tokens_has_columns_of_them(original: Store, tmp_path: Path) -> None:
    export_samples(original, tmp_path / "t.jsonl", form="tokens", signals=["logprob", ALIGNMENT])
    for row, line in enumerate((tmp_path / "t.jsonl").read_text().splitlines()):
        ends, tokens, teacher_ends = (v.tolist() for v in original.read_signal(TEACHER, ALIGNMENT, [row])[0])
        exported = json.loads(line)
        assert exported[f"chunk_ends/{TEACHER}"] == [0] * len(PROMPT) + ends
        assert exported[f"teacher_tokens/{TEACHER}"] == tokens
        assert exported[f"teacher_chunk_ends/{TEACHER}"] == teacher_ends


def test_show_prints_two_rows_over_one_text(original: Store) -> None:
    def shown(row: int) -> str:
        console = Console(width=100, record=True, file=StringIO())
        console.print(render(read_sample(original, original.samples(["uid"])["uid"][row].as_py())))
        return console.export_text()

    assert "25 tokens of the student, 15 of other" in shown(0)
    assert "student  t│h│e┃ │b┃i┃g┃" in shown(0)
    assert "teacher  the  ┃ b ┃i┃g┃" in shown(0)
    assert "121 more chunks" in shown(3)
    first = read_sample(original, original.samples(["uid"])["uid"][0].as_py()).chunks[0]
    logprobs = original.read_signal(TEACHER, "logprob", [0])[0]
    assert (first.start, first.end, first.teacher_texts) == (0, 3, ["the"])
    assert first.teacher_logprob == pytest.approx(float(logprobs[:3].astype(np.float64).sum()))


def test_the_page_of_a_sample_gets_both_rows(original: Store) -> None:
    page = client_of(original, **BEARER)
    uid = original.samples(["uid"])["uid"][0].as_py()
    (teacher,) = get(page, "sample", uid=uid)["teachers"]
    ends, tokens, teacher_ends = original.read_signal(TEACHER, ALIGNMENT, [0])[0]
    alignment = teacher["alignment"]
    assert unpack(alignment["ids"]).tolist() == tokens.tolist()
    assert (unpack(alignment["ends"]).tolist(), unpack(alignment["teacher_ends"]).tolist()) == (
        ends.tolist(),
        teacher_ends.tolist(),
    )
    assert "".join(alignment["pieces"][:-1]) == ANSWERS[0]
    assert alignment["pieces"][:4] == ["the", " b", "i", "g"]


def test_a_page_names_a_damaged_tokenizer(store: Store) -> None:
    file = store.path(f"{KEPT}/{DIGESTS['teacher']}.json")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    uid = store.samples(["uid"])["uid"][0].as_py()
    (teacher,) = get(client_of(store, **BEARER), "sample", uid=uid)["teachers"]
    assert "alignment" not in teacher
    assert f"{DIGESTS['teacher']}.json" in teacher["errors"]["alignment"]
    assert any(finding.table.startswith(KEPT) for finding in store.verify().findings)


def test_no_pack_carries_them() -> None:
    with pytest.raises(ValueError, match="'alignment' is in no pack"):
        LoadSpec(stage="student", signals=("logprob", ALIGNMENT))


def test_a_token_without_a_distribution_is_shown_as_such(store: Store) -> None:
    """Slots of a top-k that are not used: inside of a chunk the teacher's next token begins elsewhere."""
    uid = store.samples(["uid"])["uid"][1].as_py()
    ids, logprobs = np.full((2, 3), -1, np.int32), np.full((2, 3), -1e5, np.float32)
    ids[0, :2], logprobs[0, :2] = [15, 16], np.log([0.5, 0.25])
    store.commit_signals(
        TEACHER, "topk", [Signal(uid=uid, sample_row=1, kind="topk", topk_ids=ids, topk_logprobs=logprobs)]
    )
    assert store.verify().findings == []
    page = client_of(store, **BEARER)
    (teacher,) = get(page, "sample", uid=uid)["teachers"]
    assert unpack(teacher["topk"]["tail"]).tolist() == pytest.approx([0.25, np.nan], nan_ok=True)
    (used,), (unused,) = (get(page, "candidates", uid=uid, position=at)["teachers"] for at in range(2))
    assert (used["ids"], used["rank"]) == ([15, 16], 1)
    assert unused["error"] == INSIDE_A_CHUNK
