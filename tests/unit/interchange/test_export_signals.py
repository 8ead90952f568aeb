"""What teachers said leaves with its samples and comes back bit for bit; forms of other tools hold what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from mopd_dataplane import Signal, Store, create_store
from mopd_dataplane.errors import InputError, UnknownNameError
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.exporter import KINDS, export_samples, kind_of
from mopd_dataplane.interchange.importer import ImportReport, import_rollouts

ALL = ("logprob", "topk", "hidden", "margin")
TEACHER = "number_sorting-expert"


class Vocabulary:
    """The tokenizer of the demonstration store, by its digest."""

    digest = "0123456789abcdef"
    size = 98
    template = "{prompt}"

    def file(self) -> None:
        return None

    def prompt(self, text: str | list[dict[str, Any]]) -> list[int]:
        raise AssertionError("an export has ids")

    response = prompt


@pytest.fixture(scope="module")
def store(make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with log-probs, hidden states and, of one teacher, a top-3 of the student's choice and another package's
    kind."""
    signal_store = make_store(tmp_path_factory.mktemp("signals") / "store", prompts=2)
    rng = np.random.default_rng(1)
    samples = signal_store.samples(["uid", "loss_tokens", "response_len", "domain"]).to_pylist()
    signal_store.commit_signals(TEACHER, "topk", [
        Signal(
            uid=sample["uid"], sample_row=row, kind="topk", topk_source="student",
            topk_ids=rng.integers(0, 98, (sample["loss_tokens"], 3), dtype=np.int32),
            topk_logprobs=-rng.random((sample["loss_tokens"], 3), dtype=np.float32),
        )
        for row, sample in enumerate(samples) if sample["domain"] == "number_sorting"
    ])  # fmt: skip
    signal_store.commit_signals(TEACHER, "margin", [
        Signal(
            uid=sample["uid"], sample_row=row, kind="margin",
            extra={"margin": rng.random(sample["response_len"], dtype=np.float32)},
        )
        for row, sample in enumerate(samples) if sample["domain"] == "number_sorting"
    ])  # fmt: skip
    return signal_store


def bring(folder: Path, export_path: Path) -> tuple[Store, ImportReport]:
    """An export, imported into a new store."""
    copy = create_store(str(folder / "copy"))
    return copy, import_rollouts(copy, export_path, ImportSettings(format="plain"), Vocabulary())


@pytest.mark.parametrize("kind", KINDS)
def test_every_signal_comes_back_bit_for_bit(store: Store, tmp_path: Path, kind: str) -> None:
    export_path = tmp_path / ("out" if kind == "datasets" else f"out.{kind}")
    export_samples(store, export_path, signals=ALL)
    copy, report = bring(tmp_path, export_path)
    assert report.signals == store.table("scores", ["uid"]).num_rows == copy.table("scores", ["uid"]).num_rows
    facts = ["uid", "teacher", "kind", "codec", "rows", "bytes", "mean_reverse_kl", "payload_crc", "teacher_digest"]
    order = [("uid", "ascending"), ("teacher", "ascending"), ("kind", "ascending")]
    assert copy.table("scores", facts).sort_by(order) == store.table("scores", facts).sort_by(order)
    rows = store.table("scores", ["sample_row"], filter=f"teacher = '{TEACHER}' and kind = 'topk'")["sample_row"]
    for name in ALL:
        for before, after in zip(
            store.read_signal(TEACHER, name, rows), copy.read_signal(TEACHER, name, rows, verify=True), strict=True
        ):
            assert np.array_equal(np.asarray(before, object), np.asarray(after, object))
    assert copy.signal_reader(TEACHER, "topk", rows).topk_forms(rows.to_numpy()) == [(3, "student")]
    assert copy.teachers() == store.teachers()
    assert copy.verify().findings == []
    again = import_rollouts(copy, export_path, ImportSettings(format="plain"), Vocabulary())
    assert (again.inserted, again.signals) == (0, 0)


def test_without_hidden_states_no_head_travels(store: Store, tmp_path: Path) -> None:
    export_samples(store, tmp_path / "out.parquet", signals=["logprob"])
    copy, _ = bring(tmp_path, tmp_path / "out.parquet")
    assert {teacher.head_file for teacher in copy.teachers().values()} == {""}
    assert copy.verify().findings == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "out.parquet"]


def test_one_teacher_of_several(store: Store, tmp_path: Path) -> None:
    export_samples(store, tmp_path / "out.parquet", signals=ALL, teachers=[TEACHER])
    said = pq.read_table(tmp_path / "out.parquet")["signals"].to_pylist()
    assert {entry["teacher"]["name"] for row in said for entry in row} == {TEACHER}
    assert [head.name for head in (tmp_path / "out.parquet.heads").iterdir()] == [f"{TEACHER}.safetensors"]
    with pytest.raises(UnknownNameError, match="no teacher 'sorter'"):
        export_samples(store, tmp_path / "b.parquet", signals=ALL, teachers=["sorter"])
    with pytest.raises(InputError, match="no signal 'logits'"):
        export_samples(store, tmp_path / "b.parquet", signals=["logits"])


def test_the_name_says_the_format(store: Store, tmp_path: Path) -> None:
    export_samples(store, tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text().partition("\n")[0])["signals"] == []
    assert [kind_of(name) for name in ("a.parquet", "s3://b/a.arrow", "folder")] == ["parquet", "arrow", "datasets"]
    with pytest.raises(InputError, match=r"ends in \.csv says no format"):
        export_samples(store, tmp_path / "out.csv")


def _row(store: Store, folder: Path) -> dict[str, Any]:
    """An exported row with every signal."""
    export_samples(store, folder / "whole.jsonl", signals=ALL, where="domain = 'number_sorting'")
    row: dict[str, Any] = json.loads((folder / "whole.jsonl").read_text().partition("\n")[0])
    return row


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a kind nobody knows": (lambda row: row["signals"][0].update(kind="log its"), "no signal 'log its'"),
    "a log-prob too few": (lambda row: row["signals"][0]["logprob"].pop(), "logprob has shape"),
    "no number": (lambda row: row["signals"][0]["logprob"].__setitem__(0, "x"), r"logprob\[0\] is 'x'"),
    "ids of another vocabulary": (
        lambda row: row["signals"][1]["topk_ids"].__setitem__(0, 5000),
        "topk_ids holds token id 5000",
    ),
    "a number too few": (lambda row: row["signals"][3]["values"].pop(), "margin has shape"),
    "another package's kind without numbers": (lambda row: row["signals"][0].update(kind="logits"), "values"),
    "rows of no width": (lambda row: row["signals"][1].update(width=0), "topk_ids has"),
    "no base64": (lambda row: row["signals"][2].update(hidden="*"), "hidden is no base64"),
    "no teacher": (lambda row: row["signals"][0].update(teacher=None), "names the teacher"),
    "a name that leaves the store": (lambda row: row["signals"][0]["teacher"].update(name="../x"), "teacher name"),
    "another tokenizer": (lambda row: row["signals"][0]["teacher"].update(tokenizer_digest="f"), "with digest 'f'"),
    "two teachers of one name": (
        lambda row: row["signals"][1]["teacher"].update(weights_digest="1" * 64),
        "rename one of them",
    ),
    "another head": (lambda row: row["signals"][2]["teacher"].update(head_digest="1" * 64), "export again"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_signal_is_named_and_nothing_is_imported(store: Store, tmp_path: Path, name: str) -> None:
    row = _row(store, tmp_path)
    change, said = WRONG[name]
    change(row)
    (tmp_path / "whole.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=rf"whole\.jsonl.*{said}|{said}.*whole\.jsonl|{said}"):
        import_rollouts(str(tmp_path / "none"), tmp_path / "whole.jsonl", ImportSettings(format="plain"), Vocabulary())
    assert not (tmp_path / "none").exists()


def test_hidden_states_without_their_head_are_refused(store: Store, tmp_path: Path) -> None:
    _row(store, tmp_path)
    (tmp_path / "whole.jsonl.heads" / f"{TEACHER}.safetensors").unlink()
    with pytest.raises(InputError, match=r"heads/number_sorting-expert\.safetensors is missing"):
        bring(tmp_path, tmp_path / "whole.jsonl")


def test_exact_tokens_with_columns_for_each_teacher(store: Store, tmp_path: Path) -> None:
    export_samples(store, tmp_path / "t.parquet", form="tokens", signals=ALL)
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    samples = store.samples(["prompt_len", "domain"]).to_pylist()
    payload = store.read_tokens(np.arange(len(rows))).to_pylist()
    for number, (row, sample, tokens) in enumerate(zip(rows, samples, payload, strict=True)):
        assert row["input_ids"] == tokens["tokens"]
        start, mask = sample["prompt_len"], tokens["loss_mask"]
        assert row["completion_mask"] == [0] * start + mask
        trained = [token for token in row["labels"] if token != -100]
        assert trained == [t for t, is_trained in zip(tokens["tokens"][start:], mask, strict=True) if is_trained]
        own = f"{sample['domain']}-expert"
        assert row[f"logprob/{own}"][start:] == store.read_signal(own, "logprob", [number])[0].tolist()
        assert [name for name in row if name.startswith("logprob/") and row[name]] == [f"logprob/{own}"]
        hidden = store.read_signal(own, "hidden", [number])[0]
        assert b"".join(row[f"hidden/{own}"]) == hidden.tobytes()
        if own == TEACHER:
            ids, logprobs = store.read_signal(own, "topk", [number])[0]
            assert (row[f"topk_ids/{own}"], row[f"topk_logprobs/{own}"]) == (ids.tolist(), logprobs.tolist())


def test_text_and_conversations(store: Store, tmp_path: Path) -> None:
    export_samples(store, tmp_path / "s.jsonl", form="sft", where="domain = 'chain_sum'")
    [first, *_] = map(json.loads, (tmp_path / "s.jsonl").read_text().splitlines())
    assert first["prompt"] == "0 + 4 ="
    assert first["completion"].startswith("\x1b[31mred")
    assert (first["domain"], first["reward"]) == ("chain_sum", first["reward"])
    export_samples(store, tmp_path / "m.parquet", form="messages", where="domain = 'chain_sum'")
    messages = pq.read_table(tmp_path / "m.parquet")["messages"][0].as_py()
    assert messages == [
        {"role": "user", "content": "0 + 4 ="}, {"role": "assistant", "content": first["completion"]}
    ]  # fmt: skip


def test_a_trace_has_one_reference(store: Store, tmp_path: Path) -> None:
    export_samples(store, tmp_path / "t.jsonl", form="traces", signals=["logprob"])
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    payload = store.read_tokens(np.arange(len(lines))).to_pylist()
    for episode, tokens in zip(lines, payload, strict=True):
        [trace] = episode["traces"]
        assert [token for node in trace["nodes"] for token in node["token_ids"]] == tokens["tokens"]
        sampled = [node for node in trace["nodes"] if node["sampled"]]
        sampled_logprobs = [value for value, own in zip(tokens["logprobs"], tokens["loss_mask"], strict=True) if own]
        assert [value for node in sampled for value in node["logprobs"]] == sampled_logprobs
        assert all(len(node["reference_logprobs"]) == sum(node["mask"]) for node in sampled)
    row = 0
    store.commit_signals(TEACHER, "logprob", [
        Signal(
            uid=store.samples(["uid"])["uid"][row].as_py(), sample_row=row, kind="logprob",
            logprob=np.zeros(len(payload[row]["logprobs"]), np.float32),
        )
    ])  # fmt: skip
    with pytest.raises(InputError, match="a trace holds one reference; give --teacher"):
        export_samples(store, tmp_path / "u.jsonl", form="traces", signals=["logprob"])
    with pytest.raises(InputError, match="traces are written as jsonl, not as parquet"):
        export_samples(store, tmp_path / "u.parquet", form="traces")
