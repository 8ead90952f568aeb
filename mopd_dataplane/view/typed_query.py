"""A statement that a reader typed, answered by a process of its own: whatever it takes, the server stands.

DuckDB's own bound is for its buffers; a value of a gigabyte, an answer that is copied, and what Lance reads are outside
of it. So the server looks at the memory of the process all the time, and ends it when it takes too much.

    python -m mopd_dataplane.view.typed_query       reads a request on stdin, leaves the answer in the file it names
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.processes import end_with_parent, parent_named, scratch_folder
from mopd_dataplane.errors import DeadlineError, MopdError, QueryError

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

ROWS = 1000
"""Rows of an answer; of more it says so."""
SECONDS = 60.0
BUFFERS = "200MB"
"""What DuckDB may hold; it spills what exceeds it to a scratch folder of at most SPILLED."""
SPILLED = "4GB"
MEMORY_MB = 340
"""What the process may hold in all, files that it shares with the server not counted."""
ANSWER_MB = 32
LOOK_S = 0.01
"""Time between two looks at the memory of the process."""
LATE_S = 10.0
"""How long after its deadline a process is ended that has not ended by itself."""
_ONE = threading.Lock()


def ask(store: Store, snapshot: Snapshot, query: str) -> bytes:
    """The answer as JSON: `columns`, `rows`, and `more`, whether there are more rows than these. One at a time.

    Raises QueryError for what is no readable statement or takes too much, DeadlineError for one that takes too long.
    """
    with _ONE, scratch_folder() as folder:
        answer = folder / "answer.json"
        request = {"uri": str(store.uri), "versions": snapshot.versions, "query": query, "answer": str(answer)}
        command = [sys.executable, "-m", "mopd_dataplane.view.typed_query"]
        environment = parent_named() | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
                _watch(process)
            finally:
                process.kill()
        if not answer.exists():  # the kernel, or a library that had no memory left, ended it
            raise QueryError(
                f"the query ended without an answer (exit code {process.returncode}): narrow it, or run it with `mopd "
                "query`, which has no such limit"
            )
        content = answer.read_bytes()
    if process.returncode:
        said = json.loads(content)
        raise (DeadlineError if said["kind"] == "DeadlineError" else QueryError)(said["error"])
    return content


def _watch(process: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    while process.poll() is None:
        if _private_mb(process.pid) > MEMORY_MB:
            raise QueryError(
                f"the query takes more than {MEMORY_MB} MB of memory: narrow it, or run it with `mopd query`, which "
                "has no such limit"
            )
        if time.monotonic() - began > SECONDS + LATE_S:
            raise DeadlineError(
                f"the query was stopped after {SECONDS:g} s: narrow it, or run it with `mopd query`, which has no such "
                "limit"
            )
        time.sleep(LOOK_S)


def _private_mb(pid: int) -> float:
    """Resident memory of a process without files that it maps; 0 where the kernel does not say, or it has ended."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0.0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _answer(request: dict[str, Any]) -> str:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.sql.query import Limits, run_sql, values_of
    from mopd_dataplane.view.plain import to_json

    store = Store.open(request["uri"])
    limits = Limits(rows=ROWS + 1, seconds=SECONDS, memory=BUFFERS, spilled=SPILLED)
    table = run_sql(store, request["query"], Snapshot(uri=request["uri"], versions=request["versions"]), limits)
    rows = list(zip(*values_of(table.slice(0, ROWS)), strict=True))
    text = to_json({"columns": table.column_names, "rows": rows, "more": table.num_rows > ROWS})
    if len(text) > ANSWER_MB * 1e6:
        raise QueryError(
            f"the answer has {len(text) / 1e6:,.0f} MB, and at most {ANSWER_MB} MB are shown: select fewer columns or "
            "rows"
        )
    return text


def main() -> int:
    """Answer one request."""
    end_with_parent()
    request = json.loads(sys.stdin.buffer.read())
    code = 0
    try:
        text = _answer(request)
    except MopdError as error:
        text, code = json.dumps({"error": str(error), "kind": type(error).__name__}), error.exit_code
    publish_file(Path(request["answer"]), text.encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
