"""What a model behind a url is known by: its name at the server, and the log-probs of fixed texts.

They are stored when the model is first used and compared at every start, so that samples and signals of two models
never share a name. A server may be started anew with other weights under the same name, so its word is not enough.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.models.server_identity import ServerIdentity
from mopd_dataplane.rollout.engines.engine import Engine, HasIdentity
from mopd_dataplane.run.context import Run
from mopd_dataplane.score.teacher_pool import TeacherPool

KIND = "server_identity"
"""Kind of the events that hold identities."""
TOLERANCE = 0.03
"""Largest mean difference of log-probs, in nats a token, of one model on two servers. bfloat16 on another device, or in
another batch, moves it by about 0.01."""


def check_teacher_server(run: Run, stage: Stage, pool: TeacherPool, teacher: str) -> str:
    """Compare a teacher's server with the identity in the store, or store it at the first use.

    Returns the digest of the stored identity. Raises MismatchError when the server has another model, EngineError.
    """
    now, settings = pool.server_reader(teacher).identity(run.tokenizer), run.job.teachers[teacher]
    detail = _remembered(run, stage, f"server/{teacher}", now)
    before = _identity(detail)
    difference = now.difference(before)
    if difference > TOLERANCE or (settings.is_remote and now.name != before.name):
        raise MismatchError(
            f"{_differs(settings.url, now, before, difference)}. The store has signals of the latter as teacher "
            f"{teacher!r}. Allowed are the same name and {TOLERANCE:g} nat: serve that model again, or give the new "
            "teacher another name"
        )
    return hashlib.sha256(json.dumps(detail, sort_keys=True).encode()).hexdigest()


def check_policy_server(run: Run, stage: Stage, engine: Engine) -> None:
    """Compare a sampling server that does not name its weights with what the store knows of the policy's digest.

    Raises MismatchError when the server has other weights, EngineError.
    """
    now = engine.identity() if isinstance(engine, HasIdentity) else None
    if now is None or not isinstance(engine, HasIdentity):
        return
    before = _identity(_remembered(run, stage, f"server/policy/{engine.policy_digest}", now))
    if (difference := now.difference(before)) > TOLERANCE:
        raise MismatchError(
            f"{_differs(engine.url, now, before, difference)}. The store has samples of the latter as the policy with "
            f"digest {engine.policy_digest}. Allowed are {TOLERANCE:g} nat: start the server with that policy's folder"
        )


def _differs(url: str, now: ServerIdentity, before: ServerIdentity, difference: float) -> str:
    return (
        f"{url} serves {now.name!r} (from {now.root!r}), whose log-probs of fixed texts differ by {difference:.3g} nat "
        f"a token from those of {before.name!r} (from {before.root!r})"
    )


def _remembered(run: Run, stage: Stage, name: str, now: ServerIdentity) -> dict[str, Any]:
    """The identity that the store has under an event's name; `now`, which is stored, where it has none."""
    if (detail := _stored(run, name)) is None:
        detail = now._asdict()
        run.store.add_event(name, stage.name, KIND, -1, None, detail)
    return detail


def _identity(detail: dict[str, Any]) -> ServerIdentity:
    return ServerIdentity(detail["name"], detail["root"], tuple(detail["logprobs"]))


def _stored(run: Run, name: str) -> dict[str, Any] | None:
    """The identity that the store has under an event's name."""
    rows = run.store.table("events", ["event_id", "detail"], filter=f"kind = '{KIND}'").to_pylist()
    return next((json.loads(row["detail"]) for row in rows if row["event_id"] == name), None)
