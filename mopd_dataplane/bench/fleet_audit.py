"""Compares the store of a simulated fleet, after every kill, with what its samples must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from mopd_dataplane.bench.fleet_member import expected_samples, teacher_of
from mopd_dataplane.bench.fleet_settings import Fleet
from mopd_dataplane.bench.replay import expected_response, script_of
from mopd_dataplane.store.dataset import Store

READ_ROWS = 256
"""Samples that are compared at a time."""


def audit(store: Store, fleet: Fleet, acknowledged: Iterable[str]) -> dict[str, Any]:
    """Count every way in which the store differs from what the fleet must have left; all counts but `checked` are 0.

    acknowledged: uids of the samples that the store acknowledged to an engine.
    lost: samples, signals, or trained samples that are missing. duplicated: those that are there more than once.
    changed: samples whose tokens, log-probs, mask or finish reason are not those of the script. acknowledged and lost:
    samples. audit findings: what `mopd store verify` reports.
    """
    domains = {uid: domain for uid, _, domain in expected_samples(fleet)}
    stored = store.samples(["uid"])["uid"].to_pylist()
    signals = Counter(
        map(tuple, zip(*store.table("scores", ["uid", "teacher", "kind"]).to_pydict().values(), strict=True))
    )
    needed = {(uid, teacher_of(domain), kind) for uid, domain in domains.items() for kind in fleet.kinds}
    trained = _trained_uids(store, fleet)
    report = store.verify()
    return {
        "samples": len(domains),
        "lost": len(domains.keys() - set(stored)) + len(needed - signals.keys()) + len(domains.keys() - trained.keys()),
        "duplicated": sum(count - 1 for found in (Counter(stored), signals, trained) for count in found.values()),
        "changed": _count_changed(store, fleet),
        "foreign": len(set(stored) - domains.keys()),
        "acknowledged and lost": len(set(acknowledged) - set(stored)),
        "audit findings": len(report.findings),
        "payload rows without a sample": sum(report.orphans.values()),
    }


def _trained_uids(store: Store, fleet: Fleet) -> Counter[str]:
    """Return how often each sample is in a window whose step is recorded."""
    uids: Counter[str] = Counter()
    for trainer in range(fleet.trainers):
        stage = f"student-{trainer}"
        steps = store.table("steps", ["window", "plan_digest"], f"stage = '{stage}'").to_pylist()
        for step in steps:
            plan = store.plan(stage, step["window"])
            if plan is not None and plan.digest == step["plan_digest"]:
                uids.update(store.take_samples(plan.sample_rows, ["uid"])["uid"].to_pylist())
    return uids


def _count_changed(store: Store, fleet: Fleet) -> int:
    changed = 0
    for rows, part in store.scan_samples(["uid", "prompt_len", "finish_reason"]):
        for first in range(0, len(rows), READ_ROWS):
            here = slice(first, first + READ_ROWS)
            payload = store.read_tokens(rows[here], verify=True)
            facts = part.slice(first, READ_ROWS).to_pylist()
            for number, sample in enumerate(facts):
                tokens = np.asarray(payload["tokens"][number].values)
                logprobs = np.asarray(payload["logprobs"][number].values)
                mask = np.asarray(payload["loss_mask"][number].values)
                expected = expected_response(sample["uid"], fleet.lengths)
                response = (tokens[sample["prompt_len"] :], logprobs, mask)
                is_same = [np.array_equal(response[part], expected[part]) for part in range(3)]
                reason = script_of(sample["uid"], fleet.lengths).finish_reason
                changed += not (all(is_same) and sample["finish_reason"] == reason)
    return changed
