"""Unfinished samples: the token logs of a store, read without changing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import MopdError
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.view.sample import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from mopd_dataplane.rollout.partial_sample import PartialSample
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.read.decode import Decoder, Numbers

MOST_SAMPLES = 12
SHOWN_TOKENS = 64
"""Tokens of the end of each sample that a page shows."""


def live_samples(store: Store, decoder: Decoder | Numbers) -> tuple[list[dict[str, Any]], int]:
    """The longest unfinished samples, MOST_SAMPLES of them, and how many there are of all writers.

    A log that changes while it is read counts as empty.
    """
    if store.root is None or not store.path("wal").is_dir():
        return [], 0
    live: list[tuple[Path, PartialSample]] = []
    for home in sorted(store.path("wal").glob("*/*")):
        try:
            live += [(home, partial) for partial in recover(home).ledger.unfinished().values()]
        except (MopdError, OSError, ValueError):
            continue  # a segment was begun or dropped under the reader; the next look sees it whole
    longest = sorted(live, key=lambda at: -len(at[1].response))[:MOST_SAMPLES]
    return [_shown(home, partial, decoder) for home, partial in longest], len(live)


def _shown(home: Path, partial: PartialSample, decoder: Decoder | Numbers) -> dict[str, Any]:
    spec, response = partial.spec, partial.response
    return {
        "uid": spec.uid, "prompt_id": spec.prompt_id, "domain": spec.domain, "stage": home.parent.name,
        "writer": home.name, "tokens": len(response), "interruptions": partial.interruptions,
        "end": "".join(pieces_of(decoder, response[-SHOWN_TOKENS:])),
    }  # fmt: skip
