"""The viewer's server on a large store: seconds of the requests that the page makes over HTTP, and the server's
memory."""

import http.client
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np

from mopd_dataplane.bench.calls import seconds
from mopd_dataplane.bench.crowd import tree_pss_bytes
from mopd_dataplane.bench.synthetic import lengths_of, make_store
from mopd_dataplane.store.dataset import Store

REPEATS = 5
LONGEST = 32_768
"""Tokens of the one long sample of a generated store."""
BATCH = 8192
"""Samples of one commit of a generated store."""
PAGE = 50
DEADLINE_S = 600.0
"""Longest that one answer may take."""
FILTERS = ("domain = 'domain-0'", "reward > 0.5 and response_len > 100", "kl > 0", "surprising", "uid like '%ff%'")
SORTS = ("-kl", "reward", "-response_len", "prompt_id", "uid")
HEADS = (
    "domain", "stage", "iteration", "response_len", "reward", "kl", "mean_logprob", "finish_reason",
    "policy_version_first",
)  # fmt: skip
GREEDY = "select uid, unnest(tokens) as token from tokens order by token, uid"
"""A statement that takes what it may."""
SEARCH = "31998 31997 31996"
"""Token ids that a generated store hardly ever has in a row, so that all of it is read."""


def measure(
    samples: int, *, mean_tokens: int, folder: str, store: str = "", note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Figures on a store of that many samples of about that many tokens, made first; or on the given one.

    Interrupted, the next call goes on with the store that the last one began; it is removed once it was measured.
    note: is told what is being done.
    """
    if store:
        return _measured(store, note)
    folder_path = Path(folder) / f"mopd-view-{samples}-{mean_tokens}"
    lengths = lengths_of(samples, mean_log=float(np.log(mean_tokens) - 0.5), longest=LONGEST)
    lengths[samples // 2] = LONGEST
    make_store(
        folder_path, lengths, signals=("logprob",), group_size=8, rewards=True, batch=BATCH,
        note=lambda done: note(f"making the store: {done:,} of {samples:,} samples"),
    )  # fmt: skip
    figures = _measured(str(folder_path), note)
    shutil.rmtree(folder_path)
    return figures


class PageClient:
    """The page's side of one server."""

    def __init__(self, address: str, pid: int) -> None:
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "", parts.port
        self._headers = {"authorization": f"Bearer {parse_qs(parts.query)['token'][0]}"}
        self.pid = pid

    def open(self, name: str, **query: Any) -> http.client.HTTPResponse:
        """The answer as it comes. Raises RuntimeError for a refusal."""
        line = http.client.HTTPConnection(self._host, self._port, timeout=DEADLINE_S)
        line.request("GET", f"/api/{name}?{urlencode(query)}", headers=self._headers)
        answer = line.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{name}: {answer.status} {answer.read(500)!r}")
        return answer

    def ask(self, name: str, **query: Any) -> Any:
        """The whole answer."""
        return json.loads(self.open(name, **query).read())

    def peak_mb(self) -> int:
        """Largest resident memory of the server so far (Linux)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return round(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024)


@contextmanager
def serving(store: str) -> Iterator[tuple[PageClient, float]]:
    """`mopd view` of a store in a process of its own, and the seconds until it printed its address."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "mopd_dataplane", "view", store, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            if not address:
                raise RuntimeError("`mopd view` ended before it printed an address")
            yield PageClient(address, server.pid), time.perf_counter() - began
        finally:
            server.terminate()


def _measured(store: str, note: Callable[[str], None]) -> dict[str, Any]:
    opened = Store.open(store)
    total, longest = _longest(opened)
    figures: dict[str, Any] = {"samples": total, "longest_sample_tokens": longest[1]}
    figures["scan_one_column_s"] = _seconds(lambda: opened.samples(["response_len"]))
    note("pages that are opened as soon as there is an address")
    figures["opened_filter_worst_s"] = round(max(_opened(store, {"where": where}) for where in FILTERS), 3)
    figures["opened_sort_worst_s"] = round(max(_opened(store, {"order": order}) for order in SORTS), 3)
    with serving(store) as (server, _):
        server.ask("stores")
        figures["open_longest_first_s"] = _seconds(lambda: server.ask("sample", uid=longest[0]), 1)
    with serving(store) as (server, started):
        figures["address_s"], began = round(started, 3), time.perf_counter()
        figures["first_page_s"] = _seconds(lambda: server.ask("stores"), 1)
        figures["first_rows_s"] = _seconds(lambda: server.ask("samples", limit=PAGE), 1)
        heads = partial(server.ask, "histograms", columns=",".join(HEADS))
        figures["first_heads_s"] = _seconds(heads, 1)
        figures["first_heads_after_address_s"] = round(time.perf_counter() - began, 3)
        uids = ",".join(row[0] for row in server.ask("samples", limit=PAGE)["rows"])
        figures["excerpts_s"] = _seconds(lambda: server.ask("excerpts", uids=uids), 1)
        figures["memory_index_mb"] = server.peak_mb()
        note("pages, filters, sorts, histograms")
        figures["next_page_s"] = _seconds(partial(server.ask, "samples", limit=PAGE, offset=PAGE))
        figures["filter_worst_s"] = max(_seconds(partial(server.ask, "samples", limit=PAGE, where=w)) for w in FILTERS)
        figures["sort_worst_s"] = max(_seconds(partial(server.ask, "samples", limit=PAGE, order=o)) for o in SORTS)
        figures["heads_worst_s"] = max(_seconds(partial(heads, where=where)) for where in FILTERS)
        figures["open_longest_s"] = _seconds(lambda: server.ask("sample", uid=longest[0]))
        note("a run of token ids in every sample")
        figures |= _searched(server)
        figures["memory_peak_mb"] = server.peak_mb()
        note("a statement that takes what it may, by itself and beside a search")
        figures["memory_typed_mb"] = _memory_of_all(server, partial(_refused, server))
        figures["memory_typed_beside_search_mb"] = _memory_of_all(server, partial(_both, server))
    return figures | {"cores": os.cpu_count(), "load": [round(load, 1) for load in os.getloadavg()]}


def _opened(store: str, query: dict[str, str]) -> float:
    """Seconds from the printed address to the rows of a page whose address has a filter or a sort."""
    with serving(store) as (server, _):
        began = time.perf_counter()
        server.ask("stores")
        server.ask("samples", limit=PAGE, **query)
        return time.perf_counter() - began


def _both(server: PageClient) -> None:
    """Ask GREEDY while a search goes over all tokens."""
    searching = threading.Thread(target=_searched, args=(server,))
    searching.start()
    _refused(server)
    searching.join(DEADLINE_S)


def _refused(server: PageClient) -> None:
    """Ask GREEDY, which a large store refuses."""
    with suppress(RuntimeError):
        server.ask("sql", q=GREEDY)


def _memory_of_all(server: PageClient, work: Callable[[], object]) -> int:
    """Most memory of the server and its processes together while something is done, each shared page once."""
    done, most = threading.Event(), 0

    def look() -> None:
        nonlocal most
        while not done.wait(0.05):
            with suppress(OSError, StopIteration):  # one of them has just ended
                most = max(most, tree_pss_bytes([server.pid]))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        work()
    finally:
        done.set()
        looking.join(DEADLINE_S)
    return round(most / 1e6)


def _longest(store: Store) -> tuple[int, tuple[str, int]]:
    """Samples of a store, and uid and tokens of the longest."""
    table = store.samples(["uid", "total_len"])
    lengths = table["total_len"].to_numpy()
    at = int(lengths.argmax())
    return len(lengths), (table["uid"][at].as_py(), int(lengths[at]))


def _searched(server: PageClient) -> dict[str, float]:
    """Seconds until the first word of how far a search is, and until its end."""
    began = time.perf_counter()
    answer = server.open("search", kind="tokens", q=SEARCH)
    answer.readline()
    first = time.perf_counter() - began
    for _ in iter(answer.readline, b""):
        pass
    return {"search_first_word_s": round(first, 3), "token_search_s": round(time.perf_counter() - began, 3)}


def _seconds(work: Callable[[], object], times: int = REPEATS) -> float:
    """Median of some calls."""
    return round(float(np.median([seconds(work) for _ in range(times)])), 4)
