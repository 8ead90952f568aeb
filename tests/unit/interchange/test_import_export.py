"""Rollouts of other frameworks become samples; what is exported comes back equal; what is malformed changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mopd_dataplane import Store, create_store, open_store
from mopd_dataplane.errors import DamagedError, InputError, UnknownNameError
from mopd_dataplane.interchange import row_files
from mopd_dataplane.interchange.conversion import ImportSettings
from mopd_dataplane.interchange.exporter import KINDS, export_samples
from mopd_dataplane.interchange.importer import ImportReport, import_rollouts
from mopd_dataplane.models.chat_template import AnswerTokens, ChatOptions


@dataclass
class Letters:
    """A tokenizer of one token per character; a prompt begins with token 1."""

    digest: str = "letters"
    size: int = 1000
    end: int | None = None
    template: str = "{prompt}"

    def file(self) -> None:
        return None

    def prompt(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def response(self, text: str) -> list[int]:
        return list(map(ord, text))

    def conversation(self, prompt: Any, response: Any, *, options: ChatOptions, is_cut_off: bool) -> AnswerTokens:
        [answer] = response
        ids = self.response(answer["content"])
        return AnswerTokens(
            prompt_ids=self.prompt("".join(f"{m['role']}>{m['content']}" for m in prompt)), response_ids=ids,
            loss_mask=[1] * len(ids), is_terminated=False,
        )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return create_store(str(tmp_path / "store"))


@pytest.fixture
def bring(store: Store, tmp_path: Path) -> Callable[..., ImportReport]:
    """bring("verl", rows) imports rows written to a file of that format."""

    def brought(source: str, rows: list[dict[str, Any]], *, name: str = "", **settings: str) -> ImportReport:
        file = tmp_path / (name or ("1.parquet" if source == "trl" else "1.jsonl"))
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        chosen = ImportSettings(**{"format": source, "stage": "student", "domain": "sums", **settings})
        return import_rollouts(store, file, chosen, Letters())

    return brought


VERL = [
    {"input": "3 + 4 =", "output": " 7", "gts": "7", "score": 1.0, "step": 5, "acc": 1.0},
    {"input": "3 + 4 =", "output": " 8", "gts": "7", "score": 0.0, "step": 5, "acc": 0.0},
]
TRL = [
    {"step": 2, "prompt": "ab", "completion": "c", "exact_match": 1.0, "format": 0.5, "advantage": 0.7},
    {
        "step": 2, "prompt": "ab", "completion": "d", "exact_match": 0.0, "format": 0.5, "advantage": -0.7,
    },
]  # fmt: skip


def turn(prompt: list[int], said: list[int], **more: Any) -> dict[str, Any]:
    """One step of a prime-rl trajectory."""
    tokens = {"prompt_ids": prompt, "completion_ids": said, "completion_logprobs": [-0.5] * len(said)}
    return {"tokens": {**tokens, "completion_mask": [1] * len(said), **more}}


PRIME = [
    {
        "example_id": 3, "env_name": "tools", "prompt": [{"role": "user", "content": "hi"}], "reward": 0.25,
        "trajectory": [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9, 9], [5]), turn([7], [8])],
    }
]  # fmt: skip
TINKER = [
    {
        "transitions": [
            {"ob": {"chunks": [{"tokens": [1, 2]}]}, "ac": {"tokens": [3], "maybe_logprobs": [-0.1]}, "reward": 0.5},
            {"ob": [1, 2, 3, 6], "ac": {"tokens": [4], "maybe_logprobs": [-0.2]}, "reward": 0.25},
        ],
        "final_reward": 1.0, "sampling_client_step": 9,
    }
]  # fmt: skip


def test_verl_text_is_tokenised_and_has_no_logprobs(store: Store, bring: Callable[..., ImportReport]) -> None:
    report = bring("verl", VERL)
    assert report == ImportReport(rows=2, samples=2, inserted=2, tokenised=2, with_logprobs=0, rewards=2)
    samples = store.samples().to_pylist()
    assert {s["writer"] for s in samples} == {"import-verl-text"}
    assert {s["finish_reason"] for s in samples} == {"unknown"}
    assert {(s["iteration"], s["policy_version_first"], s["mean_logprob"]) for s in samples} == {(5, 5, None)}
    assert [s["group_index"] for s in samples] == [0, 1]
    payload = store.read_tokens([0, 1], verify=True).to_pylist()
    assert payload[0]["tokens"] == [1, *map(ord, "3 + 4 = 7")]
    assert (payload[0]["logprobs"], payload[0]["loss_mask"]) == (None, [1, 1])
    [prompt] = store.prompts()
    assert (prompt.text, prompt.answer, prompt.split, prompt.source) == ("3 + 4 =", "7", "import", "import:verl")
    assert store.table("rewards", ["verifier", "reward"]).to_pylist() == [
        {"verifier": "verl", "reward": 1.0}, {"verifier": "verl", "reward": 0.0},
    ]  # fmt: skip


def test_trl_columns_of_rewards_and_messages(store: Store, bring: Callable[..., ImportReport]) -> None:
    assert bring("trl", TRL).rewards == 4
    chat = [{
        "step": 3, "prompt": [{"role": "user", "content": "ab"}], "completion": [{"role": "assistant", "content": "c"}],
    }]  # fmt: skip
    assert bring("trl", chat, name="2.parquet").inserted == 1
    assert store.read_tokens([2], ["tokens"])["tokens"][0].as_py() == [1, *map(ord, "user>abc")]


def test_prime_rl_turns_are_joined_while_the_prompt_continues(store: Store, bring: Callable[..., ImportReport]) -> None:
    report = bring("prime-rl", PRIME, domain="")
    assert report == ImportReport(rows=1, samples=2, inserted=2, tokenised=0, with_logprobs=2, rewards=2)
    first, second = store.read_tokens([0, 1], verify=True).to_pylist()
    assert first["tokens"] == [1, 2, 3, 4, 9, 9, 5]
    assert first["loss_mask"] == [1, 1, 0, 0, 1]
    assert first["logprobs"] == pytest.approx([-0.5, -0.5, 0, 0, -0.5])
    assert second["tokens"] == [7, 8]
    assert store.samples(["turns", "domain", "writer"]).to_pylist() == [
        {"turns": 2, "domain": "tools", "writer": "import-prime-rl"},
        {"turns": 1, "domain": "tools", "writer": "import-prime-rl"},
    ]


def test_tinker_transitions(store: Store, bring: Callable[..., ImportReport]) -> None:
    bring("tinker", TINKER)
    [row] = store.read_tokens([0], verify=True).to_pylist()
    assert (row["tokens"], row["loss_mask"]) == ([1, 2, 3, 6, 4], [1, 0, 1])
    assert row["logprobs"] == pytest.approx([-0.1, 0, -0.2])
    assert store.table("rewards", ["reward"]).to_pylist() == [{"reward": 1.75}]
    assert store.samples(["iteration"])["iteration"].to_pylist() == [9]


@pytest.mark.parametrize(
    ("source", "rows"), [("verl", VERL + VERL), ("trl", TRL), ("prime-rl", PRIME), ("tinker", TINKER)]
)
def test_importing_twice_adds_nothing(
    store: Store, bring: Callable[..., ImportReport], source: str, rows: list[dict[str, Any]]
) -> None:
    first = bring(source, rows)
    assert first.inserted == first.samples
    again = bring(source, rows, name="copy.parquet" if source == "trl" else "copy.jsonl")
    assert (again.inserted, again.rewards, again.samples) == (0, 0, first.samples)
    assert store.verify().findings == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_comes_back_equal(demo_store: Store, tmp_path: Path, kind: str) -> None:
    export_path = tmp_path / ("out" if kind == "datasets" else f"out.{kind}")
    count = export_samples(demo_store, export_path, kind)
    if kind == "datasets":
        import datasets

        assert len(datasets.load_from_disk(str(export_path))) == count
    digest = demo_store.samples(["tokenizer"])["tokenizer"][0].as_py()
    copy = create_store(str(tmp_path / "copy"))
    report = import_rollouts(copy, export_path, ImportSettings(format="plain"), Letters(digest=digest))
    assert report.inserted == count == len(demo_store.samples(["uid"]))
    assert report.ignored == []
    loose = ["payload_row", "created_at", "row_crc"]
    assert copy.samples().drop_columns(loose).to_pylist() == demo_store.samples().drop_columns(loose).to_pylist()
    rows = np.arange(count)
    assert copy.read_tokens(rows, verify=True) == demo_store.read_tokens(rows, verify=True)
    prompt_ids = set(demo_store.samples(["prompt_id"])["prompt_id"].to_pylist())
    assert {p.prompt_id: p for p in copy.prompts()} == {
        p.prompt_id: p for p in demo_store.prompts() if p.prompt_id in prompt_ids
    }
    columns = ["uid", "verifier", "verifier_version", "reward", "detail", "correct"]
    assert copy.table("rewards", columns) == demo_store.table("rewards", columns)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_kept_sets_and_experts_are_exported_with_their_sample(store: Store, tmp_path: Path, kind: str) -> None:
    row = {
        "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "logprobs": [-1.0, 0.0, -2.0], "loss_mask": [1, 0, 1],
        "sampling_mask_sizes": [2, 0], "sampling_mask_ids": [9, 3], "experts": [0, 7, 1, 6, 2, 5, 3, 4],
    }  # fmt: skip
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(GOOD) + "\n")
    settings = ImportSettings(format="plain", stage="student", domain="sums")
    import_rollouts(store, tmp_path / "in.jsonl", settings, Letters())
    recorded = store.samples(["sampling_mask_len", "experts_width"]).to_pylist()
    assert recorded == [
        {"sampling_mask_len": 2, "experts_width": 2},
        {"sampling_mask_len": None, "experts_width": None},
    ]
    export_samples(store, tmp_path / f"out.{kind}", kind)
    copy = create_store(str(tmp_path / "copy"))
    import_rollouts(copy, tmp_path / f"out.{kind}", settings, Letters())
    assert copy.read_tokens([0, 1], verify=True) == store.read_tokens([0, 1], verify=True)
    assert copy.read_tokens([0])["sampling_mask_ids"].to_pylist() == [[9, 3]]


def test_a_token_that_changed_on_disk_is_not_exported(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", prompts=1)
    token_bytes = np.array(store.read_tokens([0])["tokens"][0].as_py(), np.int32).tobytes()
    file = next(f for f in (tmp_path / "store" / "tokens").rglob("*.lance") if token_bytes in f.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(token_bytes)] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match="mopd store verify"):
        export_samples(open_store(store.uri), tmp_path / "out.jsonl")
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]


def test_a_filter_chooses_what_is_exported(demo_store: Store, tmp_path: Path) -> None:
    count = export_samples(demo_store, tmp_path / "some.parquet", "parquet", where="domain = 'chain_sum'")
    assert set(pq.read_table(tmp_path / "some.parquet")["domain"].to_pylist()) == {"chain_sum"}
    assert 0 < count < len(demo_store.samples(["uid"]))
    with pytest.raises(InputError, match="exists; give a path that does not exist"):
        export_samples(demo_store, tmp_path / "some.parquet", "parquet")
    with pytest.raises(UnknownNameError, match="no sample fits"):
        export_samples(demo_store, tmp_path / "none.parquet", "parquet", where="domain = 'x'")
    for wrong in ("domain ==== 1", "domain = 'chain_sum' iteration = 0"):
        with pytest.raises(InputError, match="--where"):
            export_samples(demo_store, tmp_path / "none.parquet", "parquet", where=wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some.parquet"]


GOOD = {"prompt_ids": [1, 2], "response_ids": [3]}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "id of another vocabulary": ({"prompt_ids": [1], "response_ids": [5000]}, "token id 5000"),
    "negative id": ({"prompt_ids": [1], "response_ids": [-4]}, r"response_ids\[0\] is -4"),
    "true is no id": ({"prompt_ids": [1], "response_ids": [True]}, r"response_ids\[0\] is True"),
    "only half of the ids": ({"prompt_ids": [1]}, "'response_ids' is missing"),
    "no response": ({"prompt": "a"}, "'response' is None"),
    "empty response": ({"prompt": "a", "response": ""}, "the response has no tokens"),
    "positive log-prob": ({**GOOD, "logprobs": [0.5]}, "log-prob 0.5"),
    "log-probs of another length": ({**GOOD, "logprobs": [-1.0, -1.0]}, "logprobs has shape \\[2\\]"),
    "mask of another length": ({**GOOD, "loss_mask": [1, 1]}, "loss_mask has shape \\[2\\]"),
    "half a surrogate": ({"prompt": "\ud800", "response": "b"}, "no valid Unicode at character 0"),
    "reward in words": ({**GOOD, "reward": "high"}, "'reward' is 'high'"),
    "reward that no float32 holds": ({**GOOD, "reward": 1e39}, "'reward' is 1e\\+39, expected a finite number"),
    "reward that no float holds": ({**GOOD, "reward": 10**400}, "'reward' is 1000"),
    "another tokenizer": ({**GOOD, "tokenizer": "words"}, "tokenizer with digest 'words'"),
    "a uid that is none": ({**GOOD, "uid": "../../etc"}, "is not 32 hex digits"),
    "a kept id of another vocabulary": (
        {**GOOD, "sampling_mask_sizes": [1], "sampling_mask_ids": [5000]},
        "sampling_mask_ids holds token id 5000, and the ids of the tokenizer end at 999",
    ),
    "a sampling mask without the token": (
        {**GOOD, "sampling_mask_sizes": [1], "sampling_mask_ids": [7]},
        "which its sampling mask does not",
    ),
    "sizes without ids": (
        {**GOOD, "sampling_mask_sizes": [1]},
        "sampling_mask_sizes and sampling_mask_ids have 1 and None values",
    ),
    "experts of some tokens": (
        {**GOOD, "experts": [1, 2, 3]},
        "experts has 3 values, which cannot be divided evenly",
    ),
    "an expert that none is": ({**GOOD, "experts": [40000, 2]}, "allowed: 0 to 32767"),
    "prompt longer than all": ({"tokens": [1], "prompt_len": 2}, "prompt_len is 2"),
    "a known prompt's name": ({**GOOD, "prompt_id": "taken"}, "'taken' is the name of another prompt"),
    "fields of fields": ({**GOOD, "question_fields": [1]}, "expected an object"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_row_is_named_and_nothing_is_imported(
    store: Store, bring: Callable[..., ImportReport], name: str
) -> None:
    row, said = BAD[name]
    with pytest.raises(InputError, match=rf"1\.jsonl:3: .*{said}"):
        bring("plain", [GOOD, {"prompt": "x", "response": "y", "prompt_id": "taken"}, row])
    assert store.samples(["uid"]).num_rows == store.table("prompts").num_rows == store.table("rewards").num_rows == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a", "response": "b"}\n{', r":2: not JSON"),
        (b"[1]\n", r":1: a list"), (b"\xff\xfe\n", r":1: not JSON"),
        (b"[" * 100_000, r":1: not JSON"), (b"\n\n", "no rows"), (b'{"prompt": NaN, "response": ""}', "expected text"),
    ],
)  # fmt: skip
def test_hostile_bytes_are_refused(store: Store, tmp_path: Path, content: bytes, said: str) -> None:
    for suffix in (".jsonl", ".parquet"):
        (tmp_path / f"bad{suffix}").write_bytes(content)
        with pytest.raises(InputError, match=said if suffix == ".jsonl" else "cannot be read"):
            import_rollouts(
                store, tmp_path / f"bad{suffix}", ImportSettings(format="plain", stage="r", domain="d"), Letters()
            )
    assert store.samples(["uid"]).num_rows == 0


def test_fields_that_the_plain_format_does_not_read_are_named(bring: Callable[..., ImportReport]) -> None:
    report = bring("plain", [{**GOOD, "anwser": "7"}, {**GOOD, "meta": {"a": 1}, "prompt": "other"}])
    assert report.ignored == ["anwser", "meta"]


def test_what_a_row_does_not_name_must_be_given(bring: Callable[..., ImportReport]) -> None:
    with pytest.raises(InputError, match="names no stage; give --stage"):
        bring("plain", [GOOD], stage="")
    with pytest.raises(InputError, match="names no domain; give --domain"):
        bring("verl", VERL, domain="")
    with pytest.raises(UnknownNameError, match=r"no importer 'verrl'.*did you mean 'verl'"):
        bring("verrl", VERL)


def test_a_refused_import_makes_no_store(tmp_path: Path) -> None:
    file = tmp_path / "1.jsonl"
    row = {"prompt": "3", "prompt_ids": [1, 2], "response_ids": [3, 4], "loss_mask": [1, 1]}
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "loss_mask": [1, 7]}) + "\n")
    settings = ImportSettings(format="plain", stage="student", domain="sums")
    with pytest.raises(InputError, match=r"1\.jsonl:2: loss_mask holds 7 at place 1; allowed: 0 to 1"):
        import_rollouts(str(tmp_path / "store"), file, settings, Letters())
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("stored", [True, False])
def test_a_uid_with_other_tokens_is_named_and_nothing_is_written(
    store: Store, bring: Callable[..., ImportReport], stored: bool
) -> None:
    row = {"uid": "a" * 32, "prompt_ids": [1, 2], "response_ids": [3, 4]}
    other = {**row, "response_ids": [3, 5]}
    if stored:
        bring("plain", [row])
    before = store.samples().to_pylist()
    with pytest.raises(InputError, match=r"jsonl:\d: uid a{32} is the name of a sample with other tokens"):
        bring("plain", [other] if stored else [row, other], name="2.jsonl")
    assert store.samples().to_pylist() == before
    assert store.table("prompts").num_rows == len(before)


@pytest.mark.parametrize("row", [{"prompt": "a" * 33, "response": "b"}, {"prompt_ids": [1], "response_ids": [2] * 33}])
def test_a_row_that_no_model_reads_is_refused_before_it_is_tokenised(
    store: Store, bring: Callable[..., ImportReport], row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 200 MB took all memory of a machine of 24 GB."""
    monkeypatch.setattr(row_files, "LONGEST", 32)
    with pytest.raises(InputError, match=r"1\.jsonl:2: field '\w+' has 33 \w+; at most 32 are taken"):
        bring("plain", [GOOD, row])
    assert store.samples(["uid"]).num_rows == 0
    monkeypatch.setattr(row_files, "LONGEST", 33)
    assert bring("plain", [GOOD, row]).samples == 2
