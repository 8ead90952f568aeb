"""Payload of samples of several stores is read as if it were in one: any mixture, order, kind and way of reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import store_builders as build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mopd_dataplane.errors import InputError, MismatchError
from mopd_dataplane.fields import PAYLOAD, column_names, of_signal, value
from mopd_dataplane.records import Prompt, Sample
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.linked.link import Wanted, link_samples, link_signals, link_stage
from mopd_dataplane.store.linked.references import OWN, by_store, other_uid, reference, rows_there, store_numbers

KINDS = ("logprob", "topk", "hidden")
EVERY = 12
"""Samples of each store."""


def filled(uri: str | Path, number: int, *, teacher: str = "t", seed: int = 0) -> tuple[Store, list[Sample]]:
    """A store with samples of prompts `p0`, `p1` …, their signals and rewards. Another seed gives other content under
    the same uids."""
    store = Store.create(uri)
    own = [build.sample(i, tokens=_tokens(i, seed)) for i in range(number, number + EVERY)]
    store.add_prompts([Prompt(prompt_id=one.prompt_id, domain=one.domain, text=one.prompt_id) for one in own])
    store.commit_samples(own)
    store.add_teacher(build.teacher(teacher, weights_digest="w", head_file=""))
    for kind in KINDS:
        store.commit_signals(teacher, kind, [build.signal(one, row, kind) for row, one in enumerate(own)])
    store.add_rewards(
        [{"uid": one.uid, "sample_row": row, "verifier": "v", "verifier_version": "1", "reward": row / EVERY,
          "detail": None, "correct": None} for row, one in enumerate(own)]
    )  # fmt: skip
    return store, own


def _tokens(number: int, seed: int) -> np.ndarray:
    return np.random.default_rng((number, seed)).integers(0, 1000, 25).astype(np.int32)


WANTED = [Wanted("logprob"), Wanted("topk", k=4, topk_source="teacher"), Wanted("hidden", codec="bf16")]


def link_all(store: Store, source: Store) -> pa.Array:
    at = source.snapshot()
    uids = link_samples(store, source, np.arange(source.dataset("samples").count_rows()), at)
    link_stage(store, "student", uids, source.uri)
    [teacher] = [one for one in store.teachers().values() if one.weights_digest == "w"]
    link_signals(store, source, teacher, WANTED, uids)
    return uids


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, tuple[Sample, int]]]:
    """A store with samples of its own, of two others, and of a third through one of these; uid here -> the sample and
    its row where it is."""
    home = tmp_path_factory.mktemp("linked")
    third, thirds = filled(home / "third", 100, teacher="other-name")
    second, seconds = filled(home / "second", 0, seed=2)
    first, firsts = filled(home / "first", 0, seed=1)
    link_all(second, third)
    store, own = filled(home / "own", 200)
    link_all(store, first)
    link_all(store, second)
    expected = {one.uid: (one, row) for part in (own, firsts, thirds) for row, one in enumerate(part)}
    expected |= {other_uid(one.uid, second.uuid): (one, row) for row, one in enumerate(seconds)}
    return store, expected


def test_every_sample_is_here_once_under_its_own_name(mixture: tuple[Store, dict[str, tuple[Sample, int]]]) -> None:
    store, expected = mixture
    samples = store.samples(["uid", "stage", "payload_row", "prompt_id"]).to_pylist()
    assert sorted(row["uid"] for row in samples) == sorted(expected)
    stages = {row["uid"]: row["stage"] for row in samples}
    names = sorted(set(stages.values()))
    assert names == ["first/student", "second/student", "second/third/student", "student"]
    assert {record.uri.rpartition("/")[2] for record in store.sources.all().values()} == {"first", "second", "third"}
    assert len(store.table("rewards")) == 4 * EVERY
    assert store.verify().ok


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_in_any_order_are_those_of_their_samples(
    mixture: tuple[Store, dict[str, tuple[Sample, int]]], data: st.DataObject
) -> None:
    store, expected = mixture
    every = store.samples(["uid"])["uid"].to_pylist()
    rows = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=30))
    chosen = [expected[every[row]] for row in rows]
    verify = data.draw(st.booleans())
    read = store.read_tokens(rows, ["uid", *column_names(PAYLOAD)], verify=verify).to_pylist()
    assert [row["uid"] for row in read] == [every[row] for row in rows]
    assert [row["tokens"] for row in read] == [one.tokens.tolist() for one, _ in chosen]
    assert [row["loss_mask"] for row in read] == [one.loss_mask.tolist() for one, _ in chosen]
    for kind in KINDS:
        signals = store.read_signal("t", kind, rows, verify=verify)
        for arrays, (one, row) in zip(signals, chosen, strict=True):
            expected_signal = build.signal(one, row, kind)
            several = arrays if isinstance(arrays, tuple) else (arrays,)
            for array, field in zip(several, of_signal(kind), strict=True):
                assert np.array_equal(array, value(expected_signal, field.name))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_readers_of_the_loader_give_the_same(
    mixture: tuple[Store, dict[str, tuple[Sample, int]]], data: st.DataObject
) -> None:
    store, expected = mixture
    every = store.samples(["uid"])["uid"].to_pylist()
    some = data.draw(st.lists(st.integers(0, len(every) - 1), min_size=1, max_size=30))
    rows = np.unique(some)
    verify = data.draw(st.booleans())
    part = np.unique(data.draw(st.lists(st.sampled_from(rows.tolist()), min_size=1, max_size=20)))
    chosen = [expected[every[row]] for row in part.tolist()]
    order = np.array(data.draw(st.permutations(range(len(part)))))
    tokens = store.token_reader(rows).lists(part, ["tokens", "experts"], verify=verify)
    lists = tokens["tokens"].at(order)
    assert lists.lengths.tolist() == [len(chosen[position][0].tokens) for position in order]
    target = np.zeros(lists.lengths.sum(), np.int32)
    firsts = (np.cumsum(lists.lengths) - lists.lengths).tolist()
    lists.copy(slice(None), firsts, target.data)
    assert np.array_equal(target, np.concatenate([chosen[position][0].tokens for position in order]))
    assert all(tokens["experts"].array(index) is None for index in range(len(part)))
    logprobs = store.signal_reader("t", "logprob", rows).lists(part, verify=verify)["logprob"]
    for index, (one, row) in enumerate(chosen):
        assert np.array_equal(logprobs.array(index), build.signal(one, row, "logprob").logprob)
    assert store.signal_reader("t", "topk", rows).topk_forms(part) == [(4, "teacher")]
    scored = store.signal_rows("t", "hidden", part)
    sizes = scored["bytes"].to_pylist()
    states = np.zeros(sum(sizes), np.uint8)
    store.hidden_reader("t").read_whole(scored["payload_row"].to_pylist(), sizes, states.data)
    hidden = [build.signal(one, row, "hidden").hidden.reshape(-1) for one, row in chosen]
    assert np.array_equal(states, np.concatenate(hidden))


def test_linking_again_changes_nothing(tmp_path: Path) -> None:
    source, _ = filled(tmp_path / "source", 0, seed=1)
    store, _ = filled(tmp_path / "own", 0, seed=2)
    first = link_all(store, source)
    counts = {name: store.dataset(name).count_rows() for name in store.names()}
    assert link_all(store, source).equals(first)
    assert {name: store.dataset(name).count_rows() for name in store.names()} == counts
    assert counts["samples"] == 2 * EVERY


def test_signals_of_another_form_or_teacher_are_not_taken(tmp_path: Path) -> None:
    source, _ = filled(tmp_path / "source", 0)
    store = Store.create(tmp_path / "own")
    store.add_teacher(build.teacher("t", weights_digest="w", head_file=""))
    store.add_teacher(build.teacher("other", head_file=""))
    store.add_teacher(build.teacher("served", weights_digest="", head_file=""))
    uids = link_samples(store, source, np.arange(EVERY), source.snapshot())
    teachers = store.teachers()
    other_forms = [Wanted("topk", k=8, topk_source="teacher"), Wanted("topk", k=4, topk_source="student"),
                   Wanted("hidden", codec="int8")]  # fmt: skip
    assert link_signals(store, source, teachers["t"], other_forms, uids) == 0
    for name in ("other", "served"):
        assert link_signals(store, source, teachers[name], WANTED, uids) == 0
    assert link_signals(store, source, teachers["t"], WANTED, uids[:5]) == 3 * 5


def test_freed_states_are_not_taken(tmp_path: Path) -> None:
    source, _ = filled(tmp_path / "source", 0)
    source.free_hidden("t", np.arange(EVERY))
    store = Store.create(tmp_path / "own")
    store.add_teacher(build.teacher("t", weights_digest="w", head_file=""))
    uids = link_samples(store, source, np.arange(EVERY), source.snapshot())
    assert link_signals(store, source, store.teachers()["t"], WANTED, uids) == 2 * EVERY


def test_a_prompt_of_the_same_name_and_another_text_is_refused(tmp_path: Path) -> None:
    source, _ = filled(tmp_path / "source", 0)
    store = Store.create(tmp_path / "own")
    store.add_prompts([Prompt(prompt_id="p3", domain="code", text="another question")])
    with pytest.raises(MismatchError, match=r"p3.*text is 'another question' in the store"):
        link_samples(store, source, np.arange(EVERY), source.snapshot())


@pytest.mark.slow
def test_payload_survives_all_upkeep_of_the_other_store(tmp_path: Path) -> None:
    source, samples = filled(tmp_path / "source", 0)
    store = Store.create(tmp_path / "own")
    store.add_teacher(build.teacher("t", weights_digest="w", head_file=""))
    link_all(store, source)
    for number in range(40):  # commits drop earlier versions
        source.commit_samples([build.sample(1000 + number)])
    source.compact(now=True)
    again = Store.open(tmp_path / "own")
    read = again.read_tokens(np.arange(EVERY), ["tokens"], verify=True)["tokens"].to_pylist()
    assert read == [one.tokens.tolist() for one in samples]
    assert again.verify().ok


def test_a_store_on_s3_and_one_in_a_folder_are_read_together(s3: str, tmp_path: Path) -> None:
    remote, remotes = filled(s3, 0, seed=1)
    local, locals_ = filled(tmp_path / "local", 0, seed=2)
    store = Store.create(tmp_path / "own")
    store.add_teacher(build.teacher("t", weights_digest="w", head_file=""))
    link_all(store, remote)
    link_all(store, local)
    store = Store.open(store.uri)
    rows = np.arange(2 * EVERY)[::-1]
    expected = [*remotes, *locals_][::-1]
    assert store.read_tokens(rows, ["tokens"], verify=True)["tokens"].to_pylist() == [
        one.tokens.tolist() for one in expected
    ]
    states = store.read_signal("t", "hidden", rows, verify=True)
    expected_states = [
        build.signal(one, row, "hidden").hidden for part in (remotes, locals_) for row, one in enumerate(part)
    ]
    assert all(np.array_equal(*pair) for pair in zip(states, expected_states[::-1], strict=True))


@given(number=st.integers(1, 1 << 20), rows=st.lists(st.integers(0, (1 << 40) - 1), max_size=20))
def test_references_lead_back(number: int, rows: list[int]) -> None:
    references = reference(number, rows)
    assert rows_there(references).tolist() == rows
    assert set(store_numbers(references).tolist()) <= {number}
    assert all(other == number and other != OWN for other, _ in by_store(references))


def test_a_row_beyond_all_references_is_refused() -> None:
    with pytest.raises(InputError, match="is beyond 1099511627775"):
        reference(1, [1 << 40])


@given(uid=st.integers(0, (1 << 128) - 1), store=st.text(max_size=40))
def test_the_other_uid_leads_back(uid: int, store: str) -> None:
    text = f"{uid:032x}"
    assert other_uid(text, store) != text
    assert other_uid(other_uid(text, store), store) == text
