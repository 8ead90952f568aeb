"""Without a uid, the sample that is shown is one worth seeing, and it is said why."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from unit.store.store_builders import sample

from mopd_dataplane import Signal, Store, open_store
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.query.pick import pick_sample
from mopd_dataplane.query.show import read_sample


def test_disagreement_is_the_largest_kl(demo_store: Store) -> None:
    picked = pick_sample(demo_store, "disagreement")
    (most,) = demo_store.sql(
        "select uid, mean_reverse_kl as kl from scores where kind = 'logprob' order by kl desc limit 1"
    ).to_pylist()
    assert picked.uid == most["uid"]
    assert f"{most['kl']:.3f}" in picked.why


def test_the_default_is_of_the_iteration_that_was_sampled_last(demo_store: Store) -> None:
    (last,) = demo_store.sql("select stage, iteration from samples order by created_at desc limit 1").to_pylist()
    own = f"stage = '{last['stage']}' and iteration = {last['iteration']}"
    rows = demo_store.sql(f"select uid, mean_reverse_kl as kl from scores join samples using (uid) where {own} "
                          "and kind = 'logprob' order by kl desc").to_pylist()  # fmt: skip
    picked = pick_sample(demo_store)
    assert rows
    assert picked.uid == rows[0]["uid"]
    assert f"of {len(rows):,} samples of the newest iteration" in picked.why


def test_teachers_that_contradict_one_another_come_first(demo_store: Store, tmp_path: Path) -> None:
    assert demo_store.root is not None
    store = open_store(str(shutil.copytree(demo_store.root, tmp_path / "copy")))
    scored = store.sql("select uid, domain from scores join samples using (uid) where kind = 'logprob'")
    lowest = scored.slice(0, 1).to_pylist()[0]
    view = read_sample(store, lowest["uid"])
    other = next(name for name in store.teachers() if not name.startswith(lowest["domain"]))
    scored = np.full(len(view.tokens), -9.0, np.float32)
    signal = Signal(uid=view.uid, sample_row=view.sample_row, kind="logprob", logprob=scored, mean_reverse_kl=8.5)
    store.commit_signals(other, "logprob", [signal])
    picked = pick_sample(store, "disagreement")
    assert picked.uid == view.uid
    assert "its teachers differ most" in picked.why


def test_worst_has_the_lowest_reward_of_its_domain(demo_store: Store) -> None:
    picked = pick_sample(demo_store, "worst", domain="chain_sum")
    (row,) = demo_store.sql(f"select domain, reward from responses where uid = '{picked.uid}'").to_pylist()
    (least,) = demo_store.sql("select min(reward) as r from responses where domain = 'chain_sum'").to_pylist()
    assert (row["domain"], row["reward"]) == ("chain_sum", least["r"])


def test_random_is_some_sample_of_the_domain(demo_store: Store) -> None:
    seen = {pick_sample(demo_store, "random", domain="number_sorting").uid for _ in range(6)}
    assert len(seen) > 1
    domains = demo_store.sql(f"select distinct domain from samples where uid in {tuple(seen)}")["domain"].to_pylist()
    assert domains == ["number_sorting"]


def test_unknown_domains_and_empty_stores_are_named(demo_store: Store, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'chain_sum'"):
        pick_sample(demo_store, "worst", domain="chain-sum")
    empty = Store.create(tmp_path / "empty")
    for way, lacks in (("worst", "rewards"), ("disagreement", "log-probs"), ("random", "samples"), (None, "samples")):
        with pytest.raises(UnknownNameError, match=lacks):
            pick_sample(empty, way)  # type: ignore[arg-type]


def test_a_domain_of_which_nothing_was_sampled_shows_its_reference_answers(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    store.commit_samples([sample(0, domain="date", policy="reference", sampler=None), sample(1, domain="larger")])
    picked = pick_sample(store, domain="date")
    assert store.sql(f"select domain from samples where uid = '{picked.uid}'")["domain"].to_pylist() == ["date"]
    assert pick_sample(store).uid == store.sql("select uid from samples where domain = 'larger'")["uid"][0].as_py()
    with pytest.raises(UnknownNameError, match="no rewards of domain 'date'"):
        pick_sample(store, "worst", domain="date")
