"""The history of a sample in order: sampled, interrupted, resumed, scored, planned, packed, trained, freed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.sql_text import literal
from mopd_dataplane.query.lineage import uses_of
from mopd_dataplane.view.sample import finite
from mopd_dataplane.view.topk import freed

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.index import Index

MOST_COMPANIONS = 200
Event = dict[str, Any]


def life(store: Store, index: Index, uid: str) -> list[Event]:
    """Events of a sample: `kind`, `title`, `facts`, `at` (ISO time or empty), `uids` it shared a pack with."""
    return lives(store, index.snapshot, [index.row(uid)])[uid]


def lives(store: Store, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> dict[str, list[Event]]:
    """The life of each of some samples by uid. rows: of the table of rollouts. Every table is read once."""
    keys = f"sample_row IN ({', '.join(str(int(row['sample_row'])) for row in rows)})" if rows else "false"
    scores = store.table("scores", filter=keys, snapshot=snapshot)
    scored = _by_row(scores.sort_by([("teacher", "ascending"), ("kind", "ascending")]).to_pylist())
    rewarded = _by_row(store.table("rewards", filter=keys, snapshot=snapshot).sort_by("verifier").to_pylist())
    unscorable = _unscorable(store, snapshot, {row["uid"] for row in rows})
    used = _used(store, snapshot, rows)
    gone = _gone(store, scored)
    events_by_row: dict[str, list[Event]] = {}
    for row in rows:
        at = row["sample_row"]
        judged = [*map(_scored, scored[at]), *map(_rewarded, rewarded[at]), *unscorable[row["uid"]]]
        events_by_row[row["uid"]] = [
            _sampled(row), *_resumed(row), *sorted(judged, key=lambda event: event["at"]), *used[at],
            *(_event("freed", f"hidden states of {teacher} freed", {}) for teacher in gone[at]),
        ]  # fmt: skip
    return events_by_row


def _by_row(rows: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    events_by_row: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        events_by_row[row["sample_row"]].append(row)
    return events_by_row


def _resumed(row: dict[str, Any]) -> list[Event]:
    if not (times := row["interruptions"]):
        return []
    title = f"interrupted {'once' if times == 1 else f'{times} times'}, resumed {row['resume']}"
    versions = f"{row['policy_version_first']} to {row['policy_version_last']}"
    return [_event("resumed", title, {"policy versions": versions})]


def _sampled(row: dict[str, Any]) -> Event:
    is_reference = row["policy"] == "reference"
    title = "reference answer" if is_reference else f"sampled by {row['policy']} v{row['policy_version_first']}"
    facts = {
        "stage": row["stage"], "iteration": row["iteration"], "writer": row["writer"],
        "tokens": row["response_len"], "finished": row["finish_reason"],
        "temperature": row["temperature"], "top-p": row["top_p"], "top-k": row["top_k"],
    }  # fmt: skip
    return _event("sampled", title, facts, row["created_at"])


def _scored(score: dict[str, Any]) -> Event:
    facts = {"signal": score["kind"], "positions": score["rows"], "bytes": score["bytes"], "codec": score["codec"],
             "mean reverse KL": finite(score["mean_reverse_kl"])}  # fmt: skip
    return _event("scored", f"scored by {score['teacher']}", facts, score["created_at"])


def _rewarded(reward: dict[str, Any]) -> Event:
    facts = {"version": reward["verifier_version"], "detail": reward["detail"] or ""}
    return _event("rewarded", f"reward {reward['reward']:g} by {reward['verifier']}", facts, reward["created_at"])


def _unscorable(store: Store, snapshot: Snapshot, uids: set[str]) -> dict[str, list[Event]]:
    """Records of answers that could not be scored, by uid."""
    events: dict[str, list[Event]] = defaultdict(list)
    for row in store.table("events", filter="kind = 'unscorable'", snapshot=snapshot).to_pylist():
        detail = json.loads(row["detail"])
        if detail["uid"] in uids:
            facts = {"reason": detail["reason"], "version": detail["verifier_version"]}
            title = f"could not be scored by {detail['verifier']}"
            events[detail["uid"]].append(_event("unscorable", title, facts, row["created_at"]))
    return events


def _used(store: Store, snapshot: Snapshot, rows: Sequence[dict[str, Any]]) -> dict[int, list[Event]]:
    """By row of `samples`: planned into a pack, and trained at a step when that step was taken."""
    uses = {at: table.to_pylist() for at, table in uses_of(store, [r["sample_row"] for r in rows], snapshot).items()}
    digests = {use["plan_digest"] for some in uses.values() for use in some}
    if not digests:
        return {at: [] for at in uses}
    keys = f"digest IN ({', '.join(map(literal, sorted(digests)))})"
    plans = {(p["stage"], p["digest"]): p for p in store.table("plans", filter=keys, snapshot=snapshot).to_pylist()}
    steps = {(s["stage"], s["step"]): s for s in store.table("steps", snapshot=snapshot).to_pylist()}
    packs = {(use["stage"], use["plan_digest"], use["pack"]) for some in uses.values() for use in some}
    members = {key: _members(plans[key[:2]], key[2]) for key in packs}
    gone = set(store.deletions.rows().tolist())
    near = sorted({row for some in members.values() for row in some[:MOST_COMPANIONS]} - gone)
    names = dict(zip(near, store.take_samples(near, ["uid"], snapshot)["uid"].to_pylist(), strict=True))
    events_by_row: dict[int, list[Event]] = {}
    for row in rows:
        events = events_by_row[row["sample_row"]] = []
        for use in uses[row["sample_row"]]:
            key = use["stage"], use["plan_digest"], use["pack"]
            others = [names[at] for at in members[key][:MOST_COMPANIONS] if at in names and at != row["sample_row"]]
            events.append(_planned(plans[key[:2]], use, others, len(members[key])))
            step = steps.get((use["stage"], use["step"]))
            if step is not None:
                events.append(_trained(row, step))
    return events_by_row


def _members(plan: dict[str, Any], pack: int) -> list[int]:
    rows: list[int] = plan["sample_rows"][plan["pack_starts"][pack] : plan["pack_starts"][pack + 1]]
    return rows


def _planned(plan: dict[str, Any], use: dict[str, Any], others: list[str], count: int) -> Event:
    teacher = plan["pack_teachers"][use["pack"]]
    name = plan["teachers"][teacher] if 0 <= teacher < len(plan["teachers"]) else "none"
    title = f"planned for {use['stage']}, window {use['window']}, pack {use['pack']}"
    facts = {"packed with": count - 1, "teacher of the pack": name}
    return _event("planned", title, facts, plan["created_at"], others)


def _trained(row: dict[str, Any], step: dict[str, Any]) -> Event:
    share = row["loss_tokens"] / step["loss_tokens"] if step["loss_tokens"] else None
    facts = {"policy version": step["policy_version"], "share of the step's trained tokens": share,
             "staleness": step["policy_version"] - row["policy_version_first"], "loss of the step": step["loss"],
             "learning rate": step["learning_rate"]}  # fmt: skip
    event = _event("trained", f"trained at step {step['step']} of {step['stage']}", facts, step["created_at"])
    return event | {"step": step["step"], "stage": step["stage"]}


def _gone(store: Store, scored: dict[int, list[dict[str, Any]]]) -> dict[int, list[str]]:
    """By row of `samples`: teachers whose hidden states of it were scored and can be read no more, as of now."""
    rows_by_teacher: dict[str, dict[str, int]] = defaultdict(dict)
    for at, scores in scored.items():
        for score in scores:
            if score["kind"] == "hidden":
                rows_by_teacher[score["teacher"]][score["uid"]] = at
    gone: dict[int, list[str]] = defaultdict(list)
    for teacher, uids in rows_by_teacher.items():
        for uid in freed(store, teacher, uids):
            gone[uids[uid]].append(teacher)
    return gone


def _event(kind: str, title: str, facts: dict[str, Any], at: Any = None, uids: Sequence[str] = ()) -> Event:
    time = "" if at is None else at.isoformat()
    return {"kind": kind, "at": time, "title": title, "facts": facts, "uids": list(uids)}
