"""The protocol of a generation engine: everything that the runner uses of it.

An engine holds up to `slots` requests. It never sees prompts, groups, the log or the store, so any server that can
decode token ids with per-token log-probs and position-keyed noise fits this protocol.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.sampling_masks import SamplingMasks
from mopd_dataplane.errors import EngineError
from mopd_dataplane.rollout.engines.sampling import SAMPLER

if TYPE_CHECKING:
    from mopd_dataplane.models.self_check import SelfCheck
    from mopd_dataplane.models.server_identity import ServerIdentity

GOING, STOP, LENGTH = 0, 1, 2
"""Values of StepOutput.finished."""
FINISH_REASON = {STOP: "stop", LENGTH: "length"}
_LAST_EXPERT = int(np.iinfo(np.int16).max)
RESCORED = 16
"""Number of the newest tokens of a resumed prefix that the engine scores again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One generation. With a prefix, decoding continues after it."""

    uid: str
    prompt_ids: NDArray[np.int32]
    """[P] token ids"""
    prefix_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[k] response tokens that exist already; they count towards the budget."""
    key: int
    """128-bit key of the sampling noise; see sampling.sample_key."""
    sampler: str = SAMPLER
    """Name of the sampler, which turns logits and noise into tokens; see sampling.SAMPLERS."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int
    """Budget of the whole response, prefix included."""
    stop: tuple[str, ...] = ()
    """Stop strings, matched over the whole response text."""
    sampling_mask: bool = False
    """The engine must report the sampling mask of each token."""
    experts: bool = False
    """The engine must report the experts of each token that it read."""

    def digest(self) -> str:
        """Return a 128-bit digest of everything that decoding depends on: token ids so far, noise key and settings."""
        drawn = (self.key, self.sampler, self.temperature, self.top_p, self.top_k)
        settings = (self.uid, *drawn, self.max_new_tokens, self.stop)
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
        for ids in (self.prompt_ids, self.prefix_ids):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Routes:
    """Expert ids of the newest `counts` tokens that were read for each of B samples."""

    counts: NDArray[np.int32]
    """[B] number of tokens; 0 if the request does not ask for experts"""
    ids: NDArray[np.int16]
    """[sum of counts, W] expert ids of all layers, sample after sample"""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One decode step over B live slots."""

    slots: NDArray[np.int64]
    """[B] slot of each token"""
    positions: NDArray[np.int32]
    """[B] response position of the new token"""
    token_ids: NDArray[np.int32]
    """[B] new token of each slot"""
    logprobs: NDArray[np.float32]
    """[B] log-prob under the distribution the token was drawn from (see sampling.py)"""
    finished: NDArray[np.uint8]
    """[B] GOING, STOP or LENGTH; a finished slot is free when step returns"""
    masks: SamplingMasks | None = None
    """Sampling masks of the B tokens, empty for tokens whose request does not ask; None when no request asks"""
    routes: Routes | None = None
    """Experts of the tokens that were read since the request was admitted or since its last step; None when no request
    asks"""


@runtime_checkable
class CanSleep(Protocol):
    """An engine that can free its device without ending."""

    def sleep(self) -> bool:
        """Free the device until `load_policy`; every slot must be free. Returns False if this build cannot do it."""


@runtime_checkable
class HasSelfCheck(Protocol):
    """An engine that compares its policy with the model's plain pass when it loads one of a new shape."""

    self_check: SelfCheck
    """The newest comparison."""

    def check(self, texts: Sequence[NDArray[np.int64]]) -> SelfCheck:
        """Compare anew, on these texts [tokens], each read as far as takes seconds. Every slot must be free.

        Raises MismatchError when the log-probs are further apart than the dtype explains.
        """


class Engine(Protocol):
    """A decoder of token ids."""

    lockstep: bool
    """True if every step returns a token for every live slot; else for those whose next token has arrived."""
    samplers: tuple[str, ...]
    """Names of its samplers (sampling.py), that of new samples first. A resumed sample gets the noise that it would
    have had. Empty when the engine draws with its own noise: then a resume is statistical."""
    slots: int
    policy_version: int
    policy_digest: str
    """Digest of the weights: models/hf.py, weights_digest(folder)."""
    tokenizer_digest: str
    """Digest of the tokenizer: models/hf.py, tokenizer_digest(load_tokenizer(folder))."""
    vocab_size: int
    context_length: int
    """Largest number of tokens of prompt and response together."""

    def admit(self, requests: Sequence[tuple[int, Request]]) -> dict[int, NDArray[np.float32]]:
        """Put requests into free slots.

        Returns by slot, for a prefix of k > 0 tokens, the engine's own log-probs of the last min(k, RESCORED) of them,
        for the self-check of a resume. An engine without samplers may return none.
        """

    def step(self) -> StepOutput:
        """Decode the next token of every live slot (unless `lockstep`: of at least one), one per slot.

        Raises EngineError on non-finite logits, and then no slot advances; or when the engine has died.
        """

    def release(self, slot: int) -> None:
        """Clear a slot; a free slot stays free."""

    def load_policy(self, folder: Path, version: int) -> None:
        """Swap the weights; every slot must be free."""

    def save(self, file: Path, requests: Sequence[tuple[int, Request]], *, limit_bytes: int) -> int:
        """Write the cached state of the live slots to a file. Returns its size in bytes, 0 when nothing was written.

        requests: every live slot's request as it stands now, with its whole prefix. An engine that cannot save, or
        would need more than limit_bytes, writes nothing.
        """

    def restore(self, file: Path, requests: Sequence[Request]) -> list[tuple[str, float]]:
        """Fill the slots 0, 1, 2 … of an empty engine from such a file, to continue as if it had not stopped.

        Returns by slot the uid and the largest |logit now - logit when saved|, 0 for the same bits. The list is empty,
        and nothing changed, unless the file is whole, of the same weights, tokenizer and build, and every sample in it
        is one of `requests` at the same token.
        """

    def close(self) -> None:
        """Free everything that the engine holds."""


@runtime_checkable
class HasIdentity(Protocol):
    """An engine at a server, whose weights this process cannot read."""

    @property
    def url(self) -> str:
        """API root of the server."""

    def identity(self) -> ServerIdentity | None:
        """Return the identity of the served policy; None if the server itself names its weights. Raises EngineError."""


_COLUMNS = {"slots": "iu", "positions": "iu", "token_ids": "iu", "logprobs": "f", "finished": "iu"}
"""Columns of a step, and the kinds of dtype that each may have."""


def check_columns(output: StepOutput) -> None:
    """Check that every column of a step is a numpy array [B] of its kind of numbers. Raises EngineError.

    This check comes first: the others, and the token log, index the columns by position.
    """
    count = len(output.slots) if isinstance(output.slots, np.ndarray) and output.slots.ndim == 1 else None
    for name, kinds in _COLUMNS.items():
        column = getattr(output, name)
        if isinstance(column, np.ndarray) and column.shape == (count,) and column.dtype.kind in kinds:
            continue
        said = f"{column.dtype} {list(column.shape)}" if isinstance(column, np.ndarray) else f"{column!r:.40}"
        numbers = "floats" if kinds == "f" else "whole numbers"
        size = "one dimension" if count is None else f"shape [{count}], as slots has"
        raise EngineError(
            f"the engine returned {said} as {name}; a numpy array of {numbers} with {size} is needed; nothing of this "
            "step was written; mend the engine (mopd_dataplane.testing.check_engine), then run again to continue"
        )


def check_step(output: StepOutput, vocab_size: int) -> None:
    """Refuse values that no sampler can return: a NaN, a positive log-prob, a token outside the vocabulary.

    Such a row means garbage logits, so the whole step is refused and the engine is not trusted further.
    Raises EngineError.
    """
    good = np.isfinite(output.logprobs) & (output.logprobs <= 0)
    good &= (output.token_ids >= 0) & (output.token_ids < vocab_size)
    if not good.all():
        bad = int(np.flatnonzero(~good)[0])
        raise EngineError(
            f"the engine returned token {output.token_ids[bad]} with log-prob {output.logprobs[bad]} at response "
            f"position {output.positions[bad]} (allowed: 0 <= token < {vocab_size}, finite log-prob <= 0); "
            "nothing of this step was written; check the policy's weights, then run again to continue"
        )


def check_kept(output: StepOutput, needs_record: NDArray[np.bool_]) -> SamplingMasks:
    """Return the step's masks. Refuses a step without a mask for each token that needs one [B], or with a mask that
    lacks its token."""
    if output.masks is None or not output.masks.fits(needs_record):
        raise EngineError(
            "the engine gives no sampling masks, which rollout.record asks for; nothing of this step was written; "
            'set engine.kind = "hf", or take "sampling_mask" out of rollout.record'
        )
    if not (good := output.masks.holds(output.token_ids)).all():
        bad = int(np.flatnonzero(~good)[0])
        raise EngineError(
            f"the engine drew token {output.token_ids[bad]} at response position {output.positions[bad]}, "
            "which its sampling mask does not hold; nothing of this step was written; run again to continue with a new "
            "engine"
        )
    return output.masks


def check_routes(output: StepOutput, needs_record: NDArray[np.bool_], lacking: NDArray[np.int64]) -> Routes:
    """Return the step's experts. Refuses a step without those of all tokens read for the samples that need them [B].

    lacking: [B] number of tokens whose experts are still missing.
    """
    routes = output.routes
    if routes is None or routes.counts.shape != needs_record.shape or (routes.counts < lacking)[needs_record].any():
        raise EngineError(
            "the engine gives no expert ids, which rollout.record asks for; nothing of this step was "
            'written; take "experts" out of rollout.record, or sample with a mixture of experts'
        )
    ids, read = routes.ids, int(routes.counts.sum())
    if ids.ndim != 2 or len(ids) != read or ids.dtype.kind not in "iu" or (ids < 0).any() or (ids > _LAST_EXPERT).any():
        raise EngineError(
            f"the engine returned expert ids {ids.dtype} {list(ids.shape)}; whole numbers from 0 to {_LAST_EXPERT} of "
            f"shape [{read}, W], a row for each token that was read, are needed; nothing of this step was written; "
            "mend the engine, then run again to continue"
        )
    return routes


def check_answered(output: StepOutput, due: NDArray[np.int32], *, lockstep: bool) -> None:
    """Refuse a step without a token, with a slot twice, at another position; in lockstep, without one of the slots.

    due: [slots] next response position of every live slot, -1 of a free one.
    """
    slots = output.slots
    is_valid = len(slots) > 0 and slots.min() >= 0 and slots.max() < len(due)
    if is_valid and np.array_equal(due[slots], output.positions) and due[slots].min() >= 0:
        times = np.bincount(slots, minlength=len(due))
        if times.max() == 1 and (not lockstep or np.array_equal(times > 0, due >= 0)):
            return
    _refuse(output, {slot: int(due[slot]) for slot in np.flatnonzero(due >= 0).tolist()}, lockstep=lockstep)


def _refuse(output: StepOutput, due: Mapping[int, int], *, lockstep: bool) -> NoReturn:
    slots = output.slots.tolist()
    said = dict(zip(slots, output.positions.tolist(), strict=True))
    expected = due if lockstep else {slot: due[slot] for slot in said if slot in due}
    wrong = [slot for slot in {*said, *expected} if said.get(slot) != expected.get(slot)]
    odd = min(wrong or slots or due)
    raise EngineError(
        f"the engine returned {len(slots)} tokens for {len(due)} samples; slot {odd} is at position "
        f"{said.get(odd, 'none')}, expected {due.get(odd, 'none')}; nothing of this step was written; "
        "run again to continue with a new engine"
    )
