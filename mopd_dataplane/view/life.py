"""The life of a sample in order: sampled, interrupted, resumed, scored, planned, packed, trained, freed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mopd_dataplane.query.lineage import literal, sample_lineage
from mopd_dataplane.store.dataset_format import FREED
from mopd_dataplane.tables import signal_table
from mopd_dataplane.view.sample import finite

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store
    from mopd_dataplane.view.index import Index

MOST_COMPANIONS = 200


def life(store: Store, index: Index, uid: str) -> list[dict[str, Any]]:
    """What happened to a sample; `kind`, `title`, `facts`, `at` (ISO time or empty), `uids` it shared a pack with."""
    row = index.row(uid)
    line = sample_lineage(store, uid)
    happened = [_sampled(row)]
    if row["interruptions"]:
        happened.append({
            "kind": "resumed", "title": f"interrupted {row['interruptions']} times, resumed {row['resume']}", "at": "",
            "facts": {"policy versions": f"{row['policy_version_first']} to {row['policy_version_last']}"}, "uids": [],
        })  # fmt: skip
    happened += [_scored(score) for score in line.scores.to_pylist()]
    happened += [_rewarded(reward) for reward in line.rewards.to_pylist()]
    for use in line.uses.to_pylist():
        happened += _used(store, row, use)
    happened += _freed(store, row, [s["teacher"] for s in line.scores.to_pylist() if s["kind"] == "hidden"])
    return happened


def _sampled(row: dict[str, Any]) -> dict[str, Any]:
    given = row["policy"] == "reference"
    return {
        "kind": "sampled", "at": _iso(row["created_at"]), "uids": [],
        "title": "reference answer" if given else f"sampled by {row['policy']} v{row['policy_version_first']}",
        "facts": {
            "stage": row["stage"], "iteration": row["iteration"], "writer": row["writer"],
            "tokens": row["response_len"], "finished": row["finish_reason"],
            "temperature": row["temperature"], "top-p": row["top_p"], "top-k": row["top_k"],
        },
    }  # fmt: skip


def _scored(score: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "scored", "at": _iso(score["created_at"]), "uids": [], "title": f"scored by {score['teacher']}",
        "facts": {"signal": score["kind"], "positions": score["rows"], "bytes": score["bytes"], "codec": score["codec"],
                  "mean reverse KL": finite(score["mean_reverse_kl"]), "coverage": score["coverage"]},
    }  # fmt: skip


def _rewarded(reward: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "rewarded", "at": _iso(reward["created_at"]), "uids": [],
        "title": f"reward {reward['reward']:g} by {reward['verifier']}",
        "facts": {"version": reward["verifier_version"], "detail": reward["detail"] or ""},
    }  # fmt: skip


def _used(store: Store, row: dict[str, Any], use: dict[str, Any]) -> list[dict[str, Any]]:
    """Planned into a pack, and trained at a step when that step was taken."""
    stage, window = use["stage"], use["window"]
    keys = f"stage = {literal(stage)} and window = {int(window)}"
    plans = store.table("plans", filter=keys).to_pylist()
    plan = next((p for p in plans if p["digest"] == use["plan_digest"]), None)
    if plan is None:
        return []
    pack = use["pack"]
    members = plan["sample_rows"][plan["pack_starts"][pack] : plan["pack_starts"][pack + 1]]
    teacher = plan["pack_teachers"][pack]
    uids = store.take_samples(members[:MOST_COMPANIONS], ["uid"])["uid"].to_pylist()
    planned = {
        "kind": "planned", "at": _iso(plan["created_at"]), "uids": [other for other in uids if other != row["uid"]],
        "title": f"planned for {stage}, window {window}, pack {pack}",
        "facts": {"packed with": len(members) - 1,
                  "teacher of the pack": plan["teachers"][teacher] if 0 <= teacher < len(plan["teachers"]) else "none"},
    }  # fmt: skip
    if use["step"] is None:
        return [planned]
    step = store.table("steps", filter=f"stage = {literal(stage)} and step = {int(use['step'])}").to_pylist()[0]
    share = row["loss_tokens"] / step["loss_tokens"] if step["loss_tokens"] else None
    trained = {
        "kind": "trained", "at": _iso(step["created_at"]), "uids": [], "step": step["step"], "stage": stage,
        "title": f"trained at step {step['step']} of {stage}",
        "facts": {"policy version": step["policy_version"], "share of the batch's loss tokens": share,
                  "staleness": step["policy_version"] - row["policy_version_first"], "loss of the step": step["loss"],
                  "learning rate": step["learning_rate"]},
    }  # fmt: skip
    return [planned, trained]


def _freed(store: Store, row: dict[str, Any], teachers: list[str]) -> list[dict[str, Any]]:
    """Hidden states that were scored and can be read no more."""
    gone = []
    for teacher in teachers:
        name = signal_table(teacher, "hidden")
        codecs = store.table(name, ["codec"], filter=f"uid = {literal(row['uid'])}")["codec"].to_pylist()
        if not codecs or FREED in codecs:
            gone.append(
                {"kind": "freed", "at": "", "title": f"hidden states of {teacher} freed", "facts": {}, "uids": []}
            )
    return gone


def _iso(time: Any) -> str:
    return time.isoformat() if time is not None else ""
