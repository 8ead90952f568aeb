"""What goes in comes out: tokens and signals bit for bit, in the asked order; damage and wrong shapes are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
import store_builders as build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mopd_dataplane.errors import DamagedError, EngineError, InputError, MismatchError, UnknownNameError
from mopd_dataplane.records import Prompt, Sample
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.arrow_rows import sample_crc, token_rows
from mopd_dataplane.store.read.row_reader import take_payload

counter = iter(range(10_000, 1 << 30))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Samples of any legal shape: empty responses, no log-probs, tool tokens, several policy versions."""
    response = draw(st.integers(0, 40))
    mask = draw(hnp.arrays(np.uint8, response, elements=st.integers(0, 1)))
    finite = st.floats(-(2.0**100), 0, width=32)
    logprobs = draw(st.none() | hnp.arrays(np.float32, response, elements=finite))
    later = draw(st.sets(st.integers(1, max(response - 1, 1)), max_size=4)) if response > 1 else set()
    starts = np.array([0, *sorted(later)], np.int32)
    sizes = draw(st.none() | hnp.arrays(np.int32, int(mask.sum()), elements=st.integers(0, 3)))
    prompt = draw(st.integers(0, 10))
    tokens = draw(hnp.arrays(np.int32, prompt + response, elements=st.integers(0, 2**31 - 1)))
    return build.sample(
        next(counter),
        response=response,
        prompt_len=prompt,
        tokens=tokens,
        logprobs=logprobs,
        loss_mask=mask,
        version_starts=starts,
        versions=np.arange(len(starts), dtype=np.int32),
        finish_reason="length",
        experts=draw(st.none() | hnp.arrays(np.int16, (max(prompt + response - 1, 0), 3), elements=st.integers(0, 99))),
        sampling_mask_sizes=sizes,
        # Any ids, with the drawn one first.
        sampling_mask_ids=None if sizes is None else _sets(tokens[prompt:][mask.astype(bool)], sizes),
    )


def _sets(drawn: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    pairs = zip(drawn.tolist(), sizes.tolist(), strict=True)
    return np.array([abs(token - offset) for token, size in pairs for offset in range(size)], np.int32)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.create(tmp_path_factory.mktemp("payload") / "store")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(samples(), min_size=1, max_size=6), data=st.data())
def test_round_trip_in_any_order(shared: Store, batch: list[Sample], data: st.DataObject) -> None:
    receipt = shared.commit_samples(batch)
    positions = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=12))
    payload = shared.read_tokens(receipt.rows[positions] if positions else [], verify=True).to_pylist()
    for row, position in zip(payload, positions, strict=True):
        sample = batch[position]
        assert row["uid"] == sample.uid
        for name in ("tokens", "loss_mask", "version_starts", "versions"):
            assert np.array_equal(np.array(row[name], getattr(sample, name).dtype), getattr(sample, name))
        stored = None if row["logprobs"] is None else np.array(row["logprobs"], np.float32)
        for name in ("sampling_mask_sizes", "sampling_mask_ids", "experts"):
            expected = getattr(sample, name)
            assert row[name] == (None if expected is None else expected.reshape(-1).tolist())
        assert (stored is None) == (sample.logprobs is None)
        assert stored is None or stored.tobytes() == sample.logprobs.tobytes(), "log-probs bit for bit"
    metadata = shared.take_samples(receipt.rows).to_pylist()
    for row, sample in zip(metadata, batch, strict=True):
        assert row["payload_crc"] == sample_crc(sample)
        assert row["experts_width"] == (None if sample.experts is None else 3)
        assert row["version_spans"] == len(sample.versions)
        assert row["sampling_mask_len"] == (None if sample.sampling_mask_ids is None else len(sample.sampling_mask_ids))
        assert (row["response_len"], row["loss_tokens"]) == (sample.response_len, sample.loss_tokens)
        assert (row["policy_version_first"], row["policy_version_last"]) == (sample.versions[0], sample.versions[-1])


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (
            {"loss_mask": np.ones(3, np.uint8)},
            MismatchError,
            r"loss_mask has shape \[3\]; a value for each of 20",
        ),
        ({"logprobs": np.zeros(19, np.float32)}, MismatchError, r"logprobs has shape \[19\]; a value for each of 20"),
        ({"logprobs": np.full(20, np.nan, np.float32)}, EngineError, "log-prob nan at response position 0"),
        ({"logprobs": np.full(20, 0.1, np.float32)}, EngineError, "finite and <= 0"),
        ({"uid": "../../etc/passwd"}, MismatchError, "not 32 hex digits"),
        ({"prompt_len": 26}, MismatchError, "prompt_len 26 outside 0 to 25"),
        ({"version_starts": np.array([1], np.int32)}, MismatchError, "first start 0"),
        ({"version_starts": np.array([0, 20]), "versions": np.array([1, 2], np.int32)}, MismatchError, "past"),
        ({"finish_reason": "stopped"}, MismatchError, "did you mean 'stop'"),
        ({"resume": "maybe"}, MismatchError, "known: exact, none, statistical"),
        ({"experts": np.zeros((25, 4), np.int16)}, MismatchError, r"experts has shape \[25, 4\]; a row for each of"),
        (
            {"sampling_mask_ids": np.zeros(3, np.int32)},
            MismatchError,
            "have None and 3 values; a size for each of the 17",
        ),
        (
            {"sampling_mask_sizes": np.ones(17, np.int32), "sampling_mask_ids": np.zeros(14, np.int32)},
            MismatchError,
            "have 17 and 14 values",
        ),
        (
            {"sampling_mask_sizes": np.ones(17, np.int32), "sampling_mask_ids": np.full(17, 2000, np.int32)},
            MismatchError,
            "which its sampling mask does not hold",
        ),
    ],
)
def test_impossible_samples_are_refused_before_anything_is_written(
    store: Store, change: dict[str, object], error: type[Exception], said: str
) -> None:
    bad = build.sample(1, **change)
    with pytest.raises(error, match=said):
        store.commit_samples([build.sample(0), bad])
    assert store.dataset("tokens").count_rows() == store.dataset("samples").count_rows() == 0


@pytest.fixture
def scored(store: Store) -> Store:
    """Eight samples, two teachers; teacher a has every signal for all of them."""
    batch = [build.sample(i) for i in range(8)]
    store.commit_samples(batch)
    for name in ("a", "b"):
        store.add_teacher(build.teacher(name))
    for kind in ("logprob", "topk", "hidden"):
        assert store.commit_signals("a", kind, [build.signal(s, i, kind) for i, s in enumerate(batch)]) == 8
    return store


def test_signals_round_trip_in_the_asked_order(scored: Store) -> None:
    rows = [5, 0, 7, 5]
    sample_by_row = {i: build.sample(i) for i in rows}
    for row, values in zip(rows, scored.read_signal("a", "logprob", rows, verify=True), strict=True):
        assert values.tobytes() == build.signal(sample_by_row[row], row, "logprob").logprob.tobytes()
    for row, (ids, logprobs) in zip(rows, scored.read_signal("a", "topk", rows, verify=True), strict=True):
        assert np.array_equal(ids, build.signal(sample_by_row[row], row, "topk").topk_ids)
        assert logprobs.tobytes() == build.signal(sample_by_row[row], row, "topk").topk_logprobs.tobytes()
    for row, states in zip(rows, scored.read_signal("a", "hidden", rows, verify=True), strict=True):
        assert np.array_equal(states, build.signal(sample_by_row[row], row, "hidden").hidden)


def test_scores_say_how_much_of_the_teacher_a_stored_topk_holds(scored: Store) -> None:
    rows = scored.sql("select uid, kind, coverage from scores").to_pylist()
    coverage_by_uid = {row["uid"]: row["coverage"] for row in rows if row["kind"] == "topk"}
    for row in range(8):
        sample = build.sample(row)
        logprobs = build.signal(sample, row, "topk").topk_logprobs
        assert coverage_by_uid[sample.uid] == pytest.approx(np.exp(logprobs).sum(1).mean(), rel=1e-5)
    assert {row["coverage"] for row in rows if row["kind"] != "topk"} == {1.0}


def test_hidden_states_by_byte_range_into_memory_of_the_caller(scored: Store) -> None:
    expected = build.signal(build.sample(3), 3, "hidden").hidden.reshape(-1)
    rows = scored.signal_rows("a", "hidden", [3])
    reader = scored.hidden_reader("a")
    assert reader.describe(rows["payload_row"].to_numpy()).to_pylist() == [
        {"uid": build.sample(3).uid, "codec": "bf16", "rows": len(expected) // 16, "row_bytes": 16}
    ]
    target = np.zeros(100, np.uint8)
    reader.read_into(rows["payload_row"][0].as_py(), 32, memoryview(target)[10:90])
    assert np.array_equal(target[10:90], expected[32:112])
    assert not target[:10].any()
    assert not target[90:].any()
    with pytest.raises(DamagedError, match="80 bytes from byte"):
        reader.read_into(rows["payload_row"][0].as_py(), len(expected) - 8, memoryview(target)[10:90])


def test_a_second_teacher_touches_no_byte_of_samples_or_tokens(scored: Store) -> None:
    assert scored.root is not None
    tables = ["samples", "tokens", *(f"signals/a/{kind}" for kind in ("logprob", "topk", "hidden"))]

    def state() -> dict[str, tuple[int, int, int]]:
        files = [p for name in tables for p in (scored.root / name).rglob("*")]  # type: ignore[operator]
        return {str(p): (p.stat().st_ino, p.stat().st_size, p.stat().st_mtime_ns) for p in files}

    before = state()
    signals = [build.signal(build.sample(i), i, "logprob") for i in range(8)]
    assert scored.commit_signals("b", "logprob", signals) == 8
    assert state() == before
    assert scored.missing_signals("b", "hidden", range(8)).tolist() == list(range(8))
    assert scored.missing_signals("b", "logprob", range(8)).tolist() == []


@pytest.mark.parametrize(
    ("kind", "change", "error", "said"),
    [
        (
            "logprob",
            {"logprob": np.zeros(3, np.float32)},
            MismatchError,
            r"shape \[3\]; a value for each of 20",
        ),
        ("logprob", {"logprob": np.full(20, np.nan, np.float32)}, EngineError, "NaN"),
        ("logprob", {"uid": build.sample(1).uid}, MismatchError, "names row 0, which is sample"),
        ("logprob", {"sample_row": 99}, MismatchError, "`samples` has: 8 rows"),
        ("topk", {"topk_logprobs": np.zeros((1, 4), np.float32)}, MismatchError, "a row for each of 14"),
        ("hidden", {"hidden": np.zeros((15, 4), np.float32)}, MismatchError, "hidden"),
        ("logprob", {"kind": "topk"}, MismatchError, "passed to commit_signals as 'logprob'"),
    ],
)
def test_impossible_signals_are_refused(
    scored: Store, kind: str, change: dict[str, object], error: type[Exception], said: str
) -> None:
    signal = dataclasses.replace(build.signal(build.sample(0), 0, kind), **change)  # type: ignore[arg-type]
    with pytest.raises(error, match=said):
        scored.commit_signals("b", kind, [signal])
    assert f"signals/b/{kind}" not in scored.names()


def test_unknown_teachers_and_missing_signals_are_named(scored: Store) -> None:
    with pytest.raises(UnknownNameError, match="known: a, b"):
        scored.commit_signals("c", "logprob", [])
    scored.commit_signals("b", "logprob", [build.signal(build.sample(0), 0, "logprob")])
    with pytest.raises(UnknownNameError, match="2 samples lack signal 'logprob' of teacher 'b', the first in row 4"):
        scored.read_signal("b", "logprob", [0, 4, 2])
    assert scored.read_signal("b", "logprob", []) == []


def test_an_unknown_column_of_tokens_is_no_damage(scored: Store) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tokens'"):
        scored.read_tokens([0], columns=["token"])


def test_a_prompt_that_is_given_twice_is_the_same_prompt(store: Store) -> None:
    prompt = Prompt(prompt_id="p", domain="d", text="one")
    with pytest.raises(MismatchError, match="text is 'one' in an earlier row, 'two' now"):
        store.add_prompts([prompt, dataclasses.replace(prompt, text="two")])
    assert store.add_prompts([prompt, prompt]) == 1
    with pytest.raises(InputError, match="surrogates not allowed"):
        store.add_prompts([dataclasses.replace(prompt, prompt_id="q", text="\ud800")])


def test_rows_that_do_not_exist_are_refused(scored: Store) -> None:
    for rows in ([8], [-1]):
        with pytest.raises(InputError, match="has rows 0 to 7"):
            scored.read_tokens(rows)


def flip(path: Path, offset: int) -> None:
    """Invert one byte of a file in place."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


def test_verify_is_content_with_a_sound_store(scored: Store) -> None:
    write_heads(scored)
    report = scored.verify(deep=False)
    assert report.ok, report.findings
    assert report.checked["samples"] == 8
    assert report.orphans == {}


def write_heads(store: Store) -> None:
    """Put a file where each teacher's row says that its head lies."""
    for teacher in store.teachers().values():
        store.path(teacher.head_file).parent.mkdir(exist_ok=True)
        store.path(teacher.head_file).write_bytes(b"head")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e300])
def test_a_reward_is_a_finite_number(store: Store, reward: float) -> None:
    row = {"uid": "f" * 32, "sample_row": 0, "verifier": "v", "verifier_version": "1"}
    with pytest.raises(InputError, match=f"that of {'f' * 32} is (nan|inf); a finite number is needed"):
        store.add_rewards([row | {"reward": 1.0, "verifier": "w"}, row | {"reward": reward}])
    assert store.table("rewards").num_rows == 0


@pytest.mark.parametrize(
    "filter", ["domain = 'math' iteration = 0", "domain =", "nosuch = 1", "domain = 'a'; and true"]
)
def test_a_filter_is_a_predicate_to_its_end(store: Store, filter: str) -> None:
    store.commit_samples([build.sample(0)])
    with pytest.raises(InputError, match="is no predicate over samples"):
        store.samples(filter=filter)


def test_verify_names_damage_row_by_row(store: Store) -> None:
    assert store.root is not None
    for start in range(0, 6, 2):
        store.commit_samples([build.sample(i, response=400) for i in (start, start + 1)])
    middle = sorted((store.root / "tokens" / "data").iterdir(), key=os.path.getmtime)[1]
    flip(middle, 300)
    report = Store.open(store.uri).verify()
    assert {finding.table for finding in report.findings} == {"tokens"}
    assert {finding.row for finding in report.findings} <= {2, 3}
    assert {finding.uid for finding in report.findings} <= {build.sample(2).uid, build.sample(3).uid}
    assert not report.ok
    with pytest.raises((DamagedError, OSError)):
        Store.open(store.uri).read_tokens([2, 3], verify=True)
    assert Store.open(store.uri).read_tokens([0, 1, 4, 5], verify=True).num_rows == 4


def test_verify_names_broken_references(store: Store) -> None:
    store.commit_samples([build.sample(i) for i in range(3)])
    store.add_teacher(build.teacher("t"))
    store.add_rewards([{"uid": "f" * 32, "sample_row": 1, "verifier": "v", "verifier_version": "1", "reward": 1.0}])
    samples = store.table("samples").to_pylist()
    stray = samples[0] | {"uid": "e" * 32, "payload_row": 77}
    swapped = samples[1] | {"uid": "d" * 32}
    broken = pa.Table.from_pylist([stray, swapped, samples[2]], store.dataset("samples").schema)
    lance.write_dataset(broken, store.uri + "/samples", mode="append")
    findings = {(f.table, f.row, f.uid): f.problem for f in store.verify(deep=False).findings}
    assert "points to row 77 of 'tokens', which has 3 rows" in findings["samples", 3, "e" * 32]
    assert f"which holds {build.sample(1).uid}" in findings["samples", 4, "d" * 32]
    assert "is in 2 rows" in findings["samples", 5, build.sample(2).uid]
    assert f"which holds {build.sample(1).uid}" in findings["rewards", 0, "f" * 32]
    assert "is missing" in findings["teachers", 0, "t"]
    assert len(findings) == 5


def test_verify_checks_head_digests(store: Store) -> None:
    digest = hashlib.sha256(b"head").hexdigest()
    store.add_teacher(build.teacher("good", head_digest=digest))
    store.add_teacher(build.teacher("bad", head_digest="0" * 64))
    write_heads(store)
    assert [(f.uid, "sha256" in f.problem) for f in store.verify().findings] == [("bad", True)]
    assert store.verify(deep=False).ok


def test_verify_counts_what_interrupted_commits_left(store: Store) -> None:
    store.commit_samples([build.sample(0)])
    store.table_handle("tokens").append(token_rows([build.sample(1)]))
    report = store.verify()
    assert report.ok
    assert report.orphans == {"tokens": 1}


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    """Rows 0 to 899 in files of 200, 300 and 400."""
    uri = str(tmp_path_factory.mktemp("files") / "d.lance")
    for first, last in ((0, 200), (200, 500), (500, 900)):
        rows = pa.table({"n": range(first, last), "list": [[row] * (row % 5) for row in range(first, last)]})
        lance.write_dataset(rows, uri, mode="append", data_storage_version="2.0", enable_stable_row_ids=True)
    return lance.dataset(uri)


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 899), max_size=600), ascending=st.booleans(), distinct=st.booleans())
def test_payload_of_many_files_is_what_one_take_gives(many_files, rows, ascending, distinct):
    row_ids = list(dict.fromkeys(rows)) if distinct else rows
    row_ids = sorted(row_ids) if ascending else row_ids
    payload = take_payload(many_files, row_ids, ["list", "n"])
    assert payload["n"].to_pylist() == row_ids
    assert payload["list"].to_pylist() == [[row] * (row % 5) for row in row_ids]


@pytest.mark.parametrize(
    ("rows", "reads"),
    [
        (range(900), [200, 300, 400]),
        (range(100, 400), [100, 200]),
        (range(0, 900, 2), [100, 150, 200]),
        (range(0, 900, 9), [100]),  # few of each file
        (range(899, -1, -1), [900]),  # not as they lie
        (range(10), [10]),
    ],
)
def test_many_payload_rows_are_read_file_by_file(many_files, monkeypatch, rows, reads):
    taken: list[int] = []
    take = lance.LanceDataset.take

    def counted(self: lance.LanceDataset, indices: list[int], **options) -> pa.Table:
        taken.append(len(indices))
        return take(self, indices, **options)

    monkeypatch.setattr(lance.LanceDataset, "take", counted)
    assert take_payload(many_files, rows, ["n"])["n"].to_pylist() == list(rows)
    assert taken == reads
