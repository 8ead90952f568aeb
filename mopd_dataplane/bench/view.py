"""The viewer's server at work on a large store: seconds of what a page asks, beside a plain scan of the same table."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mopd_dataplane.bench.synthetic import lengths_of, make_store
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.view.sample import describe
from mopd_dataplane.view.search import Search
from mopd_dataplane.view.stores import Shown

REPEATS = 5
LONGEST = 32_768
"""Tokens of the one long sample of a generated store."""
FILTERS = ("domain = 'domain-0'", "reward > 0.5 and response_len > 100", "kl > 0", "surprising", "uid like '%ff%'")
SORTS = ("-kl", "reward", "-response_len", "prompt_id", "uid")
HEADS = ["domain", "response_len", "reward", "kl", "mean_logprob", "finish_reason", "policy_version_first"]


def measure(samples: int, *, mean_tokens: int, folder: str, store: str = "") -> dict[str, Any]:
    """Figures on a store of that many samples of about that many tokens, made first; or on the given one."""
    if store:
        return _measured(Store.open(store))
    with tempfile.TemporaryDirectory(dir=folder, prefix="mopd-view-") as place:
        lengths = lengths_of(samples, mean_log=float(np.log(mean_tokens) - 0.5), longest=LONGEST)
        lengths[samples // 2] = LONGEST
        return _measured(make_store(Path(place) / "store", lengths, signals=("logprob",), group_size=8, rewards=True))


def _measured(store: Store) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shown = Shown(store)
    figures: dict[str, Any] = {
        "first_page_s": _seconds(lambda: (shown.describe(), shown.look().page("", "", 0, 50)), 1)
    }
    figures["index_s"] = _seconds(shown.index, 1)
    index = shown.index()
    figures["samples"], figures["tokens"] = index.ask(
        "select count(*), sum(total_len)::bigint from rollouts"
    ).fetchone() or (0, 0)
    figures["scan_one_column_s"] = _seconds(lambda: store.samples(["response_len"]))
    figures["next_page_s"] = _seconds(lambda: index.page("", "", 50, 50))
    figures["filter_worst_s"] = max(_seconds(partial(index.page, where, "", 0, 50)) for where in FILTERS)
    figures["sort_worst_s"] = max(_seconds(partial(index.page, "", order, 0, 50)) for order in SORTS)
    figures["histogram_worst_s"] = max(_seconds(partial(index.histograms, "reward > 0.5", [name])) for name in HEADS)
    figures["heads_together_s"] = _seconds(lambda: index.histograms("reward > 0.5", HEADS))
    longest = index.rows("select * from rollouts order by total_len desc limit 1")[0]
    figures["longest_sample_tokens"] = longest["total_len"]
    figures["open_longest_s"] = _seconds(lambda: describe(store, longest, index.snapshot, shown.decoder, {}))
    search = Search(store, index, shown.decoder, kind="tokens", wanted="31998 31997 31996", where="")
    figures["token_search_s"] = _seconds(lambda: list(search.hits()), 1)
    figures["memory_before_mb"] = round(before / 1024)
    figures["memory_peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return figures


def _seconds(work: Callable[[], object], times: int = REPEATS) -> float:
    """Median of some calls."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return round(float(np.median(spent)), 4)
