"""A sample that is being written: its specification, and its response so far."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.sampling_masks import SamplingMasks
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.engines.engine import GOING, Request
from mopd_dataplane.rollout.engines.sampling import FIRST_SAMPLER, sample_key
from mopd_dataplane.rollout.tools.sandbox import Call


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpec:
    """The specification of a sample before its first token; a resume needs nothing else."""

    uid: str
    prompt_id: str
    group_id: str
    group_index: int
    iteration: int
    domain: str
    effort: str
    stage: str
    writer: str
    writer_seq: int
    policy: str
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop: tuple[str, ...]
    tokenizer: str
    prompt_ids: tuple[int, ...]
    sampling_mask: bool = False
    """The sampling masks of its tokens are recorded."""
    experts: bool = False
    """The experts of its tokens are recorded."""
    sampler: str = FIRST_SAMPLER
    """Name of its sampler, see sampling.SAMPLERS; OWN_NOISE if the engine draws with noise of its own."""


@dataclass(slots=True)
class PartialMasks:
    """Sampling masks of one sample's own tokens, in order.

    A mask is logged before the step that draws from it, so the newest may belong to a token that was never logged. When
    the token is drawn again, its mask is logged again and replaces it.
    """

    sizes: array[int] = field(default_factory=lambda: array("i"))
    ids: array[int] = field(default_factory=lambda: array("i"))
    drawn: int = 0
    """Number of masks whose token was drawn."""

    def put(self, ordinal: int, ids: NDArray[np.integer]) -> None:
        """Add the mask of the sample's own token of that ordinal. Raises ValueError unless it is one of the next."""
        if not self.drawn <= ordinal <= len(self.sizes):
            raise ValueError(f"sampling mask of token {ordinal}, {self.drawn} tokens and {len(self.sizes)} sets so far")
        if dropped := sum(self.sizes[ordinal:]):
            del self.ids[-dropped:]
        del self.sizes[ordinal:]
        self.sizes.append(len(ids))
        self.ids.frombytes(ids.astype(np.int32).tobytes())

    def take(self, tokens: int) -> None:
        """Record that the next tokens were drawn. Raises ValueError when the mask of one is missing."""
        if self.drawn + tokens > len(self.sizes):
            raise ValueError(f"token {self.drawn + tokens - 1} has no sampling mask, {len(self.sizes)} sets so far")
        self.drawn += tokens

    def __len__(self) -> int:
        """Number of masks, including those whose token was not drawn yet."""
        return len(self.sizes)

    def first(self, count: int) -> SamplingMasks:
        """Return the first `count` masks (a copy)."""
        sizes = np.array(self.sizes[:count], np.int32)
        return SamplingMasks(sizes, np.array(self.ids[: int(sizes.sum())], np.int32))


@dataclass(kw_only=True, slots=True)
class PartialSample:
    """The response so far: token, log-prob and mask of every position, and the policy version that wrote it."""

    spec: SampleSpec
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    loss_mask: bytearray = field(default_factory=bytearray)
    masks: PartialMasks = field(default_factory=PartialMasks)
    """Sampling masks of the tokens that the policy wrote; empty unless the spec asks for them."""
    routes: bytearray = field(default_factory=bytearray)
    """int16 expert ids of prompt and response, token after token; empty unless the spec asks for them"""
    routes_width: int = 0
    """Number of expert ids of one token over all layers; 0 until the first are recorded."""
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """(first position, policy version, digest of its weights) of each stretch by one policy"""
    ended: int = GOING
    """State after the last token, from the engine: GOING, STOP or LENGTH."""
    finish_reason: str = ""
    """Reason in the FINISH record; empty before it."""
    calls: list[Call] = field(default_factory=list)
    """Commands that its environment ran, in order."""
    abandoned: str = ""
    """Reason for which it was abandoned; empty when it was not."""
    interruptions: int = 0
    resume: str = "none"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def response(self) -> NDArray[np.int32]:
        """[R] tokens so far (a copy)."""
        return np.array(self.tokens, np.int32)

    @property
    def turns(self) -> int:
        """Assistant turns: runs of tokens that the policy wrote."""
        mask = np.frombuffer(self.loss_mask, np.uint8)
        return max(1, int((np.diff(mask, prepend=0) == 1).sum()))

    def is_by(self, policy_digest: str) -> bool:
        """Check if the newest span is of the policy with these weights."""
        return bool(self.spans) and self.spans[-1][2] == policy_digest

    @property
    def routed(self) -> int:
        """Number of tokens, prompt included, whose experts are recorded."""
        return len(self.routes) // (2 * self.routes_width) if self.routes_width else 0

    @property
    def experts(self) -> NDArray[np.int16]:
        """[L - 1, W] expert ids of every token but the last, which no pass has read (a copy)."""
        read = max(len(self.spec.prompt_ids) + len(self) - 1, 0)
        return np.frombuffer(self.routes, np.int16).reshape(-1, max(self.routes_width, 1))[:read].copy()

    def digest(self) -> int:
        """Compute the crc32c over tokens, log-prob bits, mask, and sampling masks if they are recorded."""
        columns = [self.tokens.tobytes(), self.logprobs.tobytes(), bytes(self.loss_mask)]
        if self.spec.sampling_mask:
            masks = self.masks.first(self.masks.drawn)
            columns += [masks.sizes.tobytes(), masks.ids.tobytes()]
        if self.spec.experts:
            columns.append(self.experts.tobytes())
        return crc32c(*columns)

    def request(self) -> Request:
        """Build the request with which an engine continues the sample."""
        prompt_ids = np.array(self.spec.prompt_ids, np.int32)
        return _made(
            Request, self.spec, prompt_ids=prompt_ids, prefix_ids=self.response, key=sample_key(self.spec.uid)
        )  # fmt: skip

    def sample(self) -> Sample:
        masks = self.masks.first(self.masks.drawn) if self.spec.sampling_mask else None
        return _made(
            Sample,
            self.spec,
            prompt_len=len(self.spec.prompt_ids),
            tokens=np.concatenate([np.array(self.spec.prompt_ids, np.int32), self.response]),
            logprobs=np.array(self.logprobs, np.float32),
            loss_mask=np.array(self.loss_mask, np.uint8),
            version_starts=np.array([start for start, _, _ in self.spans], np.int32),
            versions=np.array([version for _, version, _ in self.spans], np.int32),
            sampling_mask_sizes=None if masks is None else masks.sizes,
            sampling_mask_ids=None if masks is None else masks.ids,
            experts=self.experts if self.spec.experts else None,
            turns=self.turns,
            finish_reason=self.finish_reason,
            interruptions=self.interruptions,
            resume=self.resume,
            abandoned=self.abandoned,
        )


Made = TypeVar("Made", Request, Sample)


def _made(record: type[Made], spec: SampleSpec, **own: object) -> Made:
    """Build a record from the specification's fields of the same names, and from fields of its own."""
    shared = {name: getattr(spec, name) for name in SampleSpec.__slots__ if name in record.__slots__}
    return record(**shared | own)
