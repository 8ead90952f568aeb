"""A store at any UTF-8 path: every operation works, and nothing is made outside of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import store_builders as build

from mopd_dataplane.errors import InputError
from mopd_dataplane.store.commit.token_stats import write_token_stats
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.maintain.copy_samples import copy_samples
from mopd_dataplane.store.queue.logged import LoggedQueue

ODD = [
    "é",
    "日本",
    "a%20b",
    "%",
    "#",
    "?",
    "*",
    '"',
    "\\",
    "~",
    "[",
    "{",
    "^",
    "<",
    "|",
    "`",
    " b ",
    "e\u0301",
    "\x85",
    "é/%/#",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_a_store_works_at_an_odd_path_and_nothing_is_made_beside_it(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    store = Store.create(home / name)
    samples = [build.sample(number) for number in range(3)]
    store.commit_samples(samples)
    store.add_teacher(build.teacher("t", head_file=""))
    for kind in ("logprob", "topk", "hidden"):
        store.commit_signals("t", kind, [build.signal(one, row, kind) for row, one in enumerate(samples)])
    write_token_stats(store, [build.statistics(samples[0], 0)])
    store.snapshot(tag="first")
    store.snapshot(tag="first")  # moves the tags
    store = Store.open(home / name)
    assert len(store.read_signal("t", "hidden", [0, 1], verify=True)) == 2
    assert store.sql("select count(*) as n from samples")["n"].to_pylist() == [3]
    store.compact(now=True)
    assert store.verify().findings == []
    queue = LoggedQueue(store.uri, "q", starts_folding=False)
    queue.pin("first")
    queue.pin("first")
    assert [*copy_samples(store, str(tmp_path / "copies" / name), "group_index = 0")]
    assert {path.relative_to(home).parts[0] for path in home.iterdir()} == {Path(name).parts[0]}
    assert len([*(home / name).parent.iterdir()]) == 1


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\x7f", "\udcff"])
def test_a_path_that_no_store_can_have_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="without control characters") as refused:
        Store.create(tmp_path / name)
    assert len(str(refused.value).splitlines()) == 1
    assert [*tmp_path.iterdir()] == []
