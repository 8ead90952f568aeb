"""Row 18 of the fault list: bad command lines, job files, stores and imports, each run in this process."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from badinput import cases
from deaths import folder
from inject import Row, Tally

LONGEST_S = 10.0
"""Of computing: other work on the machine must not decide a case."""
HUNG_S = 60.0


def become_of(words: list[str]) -> str:
    """How a command line ended: empty when it was refused properly, else what is wrong."""
    from mopd_dataplane.cli.app import app

    said, began, computed = io.StringIO(), time.monotonic(), time.process_time()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            app(words)
            code: object = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            return "traceback: " + traceback.format_exc()[-800:]
    if code in (0, None):
        return f"ended with {code}: {said.getvalue()[-200:]}"
    if "internal error" in said.getvalue():
        return f"not foreseen: {said.getvalue()[-400:]}"
    if not said.getvalue().strip():
        return f"ended with {code} without a word"
    took, computed = time.monotonic() - began, time.process_time() - computed
    return f"took {took:.0f} s, {computed:.0f} of computing" if computed > LONGEST_S or took > HUNG_S else ""


def run(chosen: Iterable[tuple[str, list[str]]], empty: Path) -> Tally:
    """Run cases in the folder `empty`, which must stay so."""
    tally, before = Tally(), Path.cwd()
    counts = tally.counts = dict.fromkeys(("refused", "tracebacks", "files left", "time-outs"), 0)
    os.chdir(empty)
    try:
        for what, words in chosen:
            wrong = become_of(words)
            left = sorted(path.name for path in empty.iterdir())
            counts["refused"] += not wrong
            counts["tracebacks"] += wrong.startswith(("traceback", "not foreseen"))
            counts["files left"] += len(left)
            counts["time-outs"] += wrong.startswith("took")
            tally.case(not wrong and not left, f"{what}: {wrong}{' left ' + str(left) if left else ''}")
            for name in left:
                shutil.rmtree(empty / name) if (empty / name).is_dir() else (empty / name).unlink()
    finally:
        os.chdir(before)
    return tally


def refused(count: int, seed: int) -> Tally:
    """About `count` of the cases, spread over their kinds."""
    from mopd_dataplane.models.hf import load_tokenizer
    from mopd_dataplane.store.dataset import Store

    with folder() as root:
        (root / "files").mkdir(parents=True)
        (root / "empty").mkdir()
        Store.create(root / "store")
        every = list(cases(root / "files", root / "store"))
        load_tokenizer(root / "files" / "tokenizer")  # what is imported once is not a case's time
        step = max(1, len(every) // count)
        return run(every[seed % step :: step], root / "empty")


ROWS = [
    Row(
        18, "bad command lines, job files, stores and imports", "its own line, non-zero exit, nothing written, 10 s",
        refused, (45, 1_400, 1_400),
    ),
]  # fmt: skip
