"""Unfinished samples: the token logs of a store, read without changing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mopd_dataplane.errors import MopdError
from mopd_dataplane.rollout.log.recovery import recover
from mopd_dataplane.view.sample import pieces_of

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.store.decode import Decoder, Numbers

MOST_SAMPLES = 200
SHOWN_TOKENS = 64
"""Tokens of the end of each sample that a page shows."""


def live_samples(store: Store, decoder: Decoder | Numbers) -> list[dict[str, Any]]:
    """Unfinished samples of every writer, longest first. A log that changes while it is read counts as empty."""
    if store.root is None or not store.path("wal").is_dir():
        return []
    found: list[dict[str, Any]] = []
    for home in sorted(store.path("wal").glob("*/*")):
        try:
            partials = recover(home).ledger.unfinished().values()
        except (MopdError, OSError, ValueError):
            continue  # a segment was begun or dropped under the reader; the next look sees it whole
        for partial in partials:
            response = partial.response
            spec = partial.spec
            found.append({
                "uid": spec.uid, "prompt_id": spec.prompt_id, "domain": spec.domain, "stage": home.parent.name,
                "writer": home.name, "tokens": len(response), "interruptions": partial.interruptions,
                "end": "".join(pieces_of(decoder, response[-SHOWN_TOKENS:])),
            })  # fmt: skip
    return sorted(found, key=lambda sample: -sample["tokens"])[:MOST_SAMPLES]
