"""Which errors an operation may end with: those of a fault that befell it, and refusals that the model can explain."""

from __future__ import annotations

import errno

from simulator.model import Attempt, Model
from simulator.values import SAMPLES, prompt_of, sample
from simulator.world import LostReplyError

from mopd_dataplane.errors import DeadlineError, InputError, MismatchError, MopdError, ResourceError, UnknownNameError

_PROMPTS = {sample(number).uid: prompt_of(number) for number in range(SAMPLES)}


def is_expected(error: BaseException, attempt: Attempt, model: Model, struck: bool) -> bool:
    """Whether an operation may end with this error. struck: a fault befell it."""
    if struck:
        injected = isinstance(error, LostReplyError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EIO)
        return injected or isinstance(error, MopdError)
    if isinstance(error, ResourceError) and attempt.others is not None:  # the disk failed somebody who commits for all
        others = (one for one in (*model.live, *model.committers) if one.others is not None and one is not attempt)
        return any(not one.ended or one.ended > attempt.began for one in others)
    if isinstance(error, DeadlineError):  # a writer that is suspended publishes the same file
        return any(not one.ended for one in model.live)
    if isinstance(error, MismatchError | InputError) and attempt.rows:
        return _has_other_content(attempt, model) or _is_deleted(attempt, model)
    if isinstance(error, UnknownNameError):
        return not attempt.rows and attempt.deletes is None and not attempt.tag  # nothing matches
    if attempt.target:
        return _is_taken(error, attempt, model)
    return False


def _has_other_content(attempt: Attempt, model: Model) -> bool:
    for table, key, value in attempt.rows:
        others = {
            v for one in model.live for name, k, v in (*one.rows, *(one.others or ())) if (name, k) == (table, key)
        }
        if (model.allowed(table, key) | others) - {value}:
            return True
    return False


def _is_deleted(attempt: Attempt, model: Model) -> bool:
    pairs = [(uid, _PROMPTS[uid]) for uid in attempt.uids] + [("", prompt) for prompt in attempt.prompts]
    return any(model.named(uid, prompt, finished=False) for uid, prompt in pairs)


def _is_taken(error: BaseException, attempt: Attempt, model: Model) -> bool:
    """Whether another operation writes the target, or has written it, or the source of a fork lost samples."""
    if isinstance(error, ResourceError):
        is_written = any(one.target == attempt.target and not one.ended for one in model.live)
        return is_written or bool(model.deletions.keys() - attempt.deletions)
    return isinstance(error, InputError | MismatchError) and attempt.target in {*model.copies, *model.begun}
