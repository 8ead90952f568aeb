"""One very long sample through every stage: peak memory of each, beside a bound that is computed from the sizes.

    token log, killed halfway -> recovery -> store -> scoring -> signals -> plan -> loader -> training -> show

The engine replays a scripted response. Everything else is real: the token log, a two-layer model with a sliding window
as teacher and student, the loader's ring, and two ranks that share the pack.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mopd_kernels import row_bytes

from mopd_dataplane.bench import long_sample_stages as stages
from mopd_dataplane.bench.calls import apart
from mopd_dataplane.errors import EngineError
from mopd_dataplane.query.show import MOST_TOKENS

WINDOW = 256
"""Tokens that a token of the model sees: with attention to all, 10^6 tokens are 10^12 pairs for each head and layer."""
DEADLINE_S = 2 * stages.DEADLINE_S
MIB = 1 << 20
OVERHEAD = 16 * MIB
"""Part of every bound: what an allocator keeps, and what a library allocates once it handles more than a few kB."""
ROW = 4 + 4 + 1
"""Bytes of a response token: id, log-prob, mask."""
RECORD = 56
"""Bytes of a decode step of one sample in the log, whose segment is read as a whole, with 8 for where each begins."""
REPETITION = 64
"""Bytes of a token while runs that repeat themselves are counted: two runs of four ids, a slot, and their hashes."""
LOSS_CHUNK = 96 * MIB
"""Workspace of the loss: rows of a chunk times the vocabulary, several times."""
TRAINED = 4 * (10 * stages.HIDDEN + 4 * stages.HIDDEN + 6 * stages.MODEL["intermediate_size"] + 6 * stages.HIDDEN)
"""Bytes of a rank's token in training: states and gradients of one layer, the keys and values of its blocks, each twice
because a block has those of the window before it too, its feed-forward part, and the inputs of the layers that are
recomputed, of which the model has two."""
SHOWN = 2500
"""Bytes of a token on a page of `mopd show`: an object with its text, and its place in the rendered page."""

Stage = Callable[[str, int], Any]


def bounds(tokens: int) -> dict[str, int]:
    """Return the bound of each stage in bytes, by its name."""
    state = 4 * stages.HIDDEN
    signals = tokens * (4 + row_bytes("int8", stages.HIDDEN))
    slot = stages.ring_bytes(tokens)
    own = {
        # Arrays of a growing response are copied when they grow.
        "token log, to its middle": 2 * ROW * tokens // 2,
        # The log has a record for each of the first half's tokens; the sample is handed over as arrays.
        "token log, recovered": (2 * RECORD + 8) * tokens // 2 + 4 * ROW * tokens,
        "store": (4 * ROW + REPETITION) * tokens,
        # States, and those that predict; signals. A segment and its mask are in OVERHEAD.
        "score": tokens * (3 * state + 8 * 8) + 3 * signals + 48 * MIB,
        "signals": 3 * signals,
        "plan": 0,
        "loader": 2 * slot,
        # What it reads is compared, with a boolean for each byte.
        "reader": slot + tokens * row_bytes("int8", stages.HIDDEN),
        "train, each rank": slot + tokens * 200 + tokens // stages.RANKS * TRAINED + LOSS_CHUNK,
        "show": ROW * tokens * 2 + SHOWN * min(tokens, MOST_TOKENS),
    }
    return {name: size + OVERHEAD for name, size in own.items()}


def measure(folder: Path, tokens: int, *, note: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Pass a sample of `tokens` response tokens through every stage, in an empty folder.

    Returns a row for each: stage, seconds, peak_bytes, bound_bytes, is_equal (whether the stage's tokens and values are
    those that went in). Raises EngineError when a stage fails.
    """
    home, bound = str(folder), bounds(tokens)
    rows: list[dict[str, Any]] = []

    def add(name: str, figures: dict[str, Any]) -> None:
        rows.append(
            {
                "stage": name, "seconds": figures["seconds"], "peak_bytes": figures["peak_bytes"],
                "bound_bytes": bound[name], "is_equal": figures["equal"],
            }
        )  # fmt: skip
        note(f"{name}: {figures['peak_bytes'] / MIB:,.1f} MiB in {figures['seconds']:,.1f} s")

    def run(stage: Stage) -> Any:
        return apart(stage, home, tokens, timeout_s=DEADLINE_S)

    try:
        run(stages.log_until_killed)
    except EngineError:
        if not (folder / "killed.json").exists():
            raise
    killed, recovered = json.loads((folder / "killed.json").read_text()), run(stages.recover_and_finish)
    is_equal = recovered["equal"] and recovered["resumed"]
    add("token log, to its middle", killed | {"equal": is_equal})
    add("token log, recovered", recovered | {"equal": is_equal})
    apart(stages.make_model, home, tokens + len(stages.PROMPT), WINDOW, timeout_s=DEADLINE_S)
    add("store", run(stages.store_sample))
    add("score", run(stages.score_sample))
    add("signals", run(stages.store_signals))
    add("plan", run(stages.plan_sample))
    for name, figures in zip(("loader", "reader"), run(stages.load_sample), strict=True):
        add(name, figures)
    ranks = run(stages.train_sample)
    worst = max(ranks, key=lambda figures: int(figures["peak_bytes"]))
    add("train, each rank", worst | {"equal": all(figures["equal"] for figures in ranks)})
    add("show", run(stages.show_sample))
    return rows
