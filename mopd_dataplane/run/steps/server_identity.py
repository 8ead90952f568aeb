"""What a teacher behind a url is known by: its name at the server, and the log-probs of fixed texts.

They are stored when the teacher is first used and compared at every start, so that signals of two models never share a
name. A server's own word is not enough: it may be started anew with other weights under the same name.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.job import Stage
from mopd_dataplane.run.context import Run
from mopd_dataplane.score.teacher_pool import TeacherPool
from mopd_dataplane.score.vllm_logprobs import ServerIdentity

KIND = "server_identity"
"""Kind of the events that hold identities."""
TOLERANCE = 0.03
"""Largest mean difference of log-probs, in nats a token, of one model on two servers. bfloat16 on another device, or in
another batch, moves it by about 0.01."""


def check_identity(run: Run, stage: Stage, pool: TeacherPool, teacher: str) -> str:
    """Compare a teacher's server with the identity in the store, or store it at the first use.

    Returns the digest of the stored identity. Raises MismatchError when the server has another model, EngineError.
    """
    now = pool.server_reader(teacher).identity(run.tokenizer)
    name = f"server/{teacher}"
    if (detail := _stored(run, name)) is None:
        detail = {"teacher": teacher, **now._asdict()}
        run.store.add_event(name, stage.name, KIND, -1, None, detail)
        detail = json.loads(json.dumps(detail))
    before = ServerIdentity(detail["name"], detail["root"], tuple(detail["logprobs"]))
    difference = now.difference(before)
    if now.name != before.name or difference > TOLERANCE:
        raise MismatchError(
            f"{run.job.teachers[teacher].url} serves {now.name!r} (from {now.root!r}), whose log-probs of fixed texts "
            f"differ by {difference:.3g} nat a token from those of {before.name!r} (from {before.root!r}), which the "
            f"store has signals of as teacher {teacher!r}; allowed are the same name and {TOLERANCE:g} nat: serve that "
            "model again, or give the new teacher another name"
        )
    return hashlib.sha256(json.dumps(detail, sort_keys=True).encode()).hexdigest()


def _stored(run: Run, name: str) -> dict[str, Any] | None:
    """The identity that the store has under an event's name."""
    rows = run.store.table("events", ["event_id", "detail"], filter=f"kind = '{KIND}'").to_pylist()
    return next((json.loads(row["detail"]) for row in rows if row["event_id"] == name), None)
