"""A token as a pure function of (logits, sample key, position).

q is the sampling distribution: softmax(logits / temperature), cut to the top k, then to the nucleus of mass top_p,
renormalised. The noise comes from a counter-based generator at counter (position, number), so it has no state: a
resumed sample gets the same noise, and a sample does not depend on the rest of its batch.

A sampler turns noise and distribution into a token, and has a name and a version. Each sample records its sampler (in
the token log, and in `samples.sampler`) and keeps it to its end: new samples get SAMPLER, a log is continued with the
sampler that it was begun with.

The log-prob reported is log q(token): what an importance ratio needs. At temperature 0 the token is argmax(logits) and
the log-prob is that of the model at temperature 1 (under the point mass itself it would always be 0).
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.rollout.engines import grouped_gumbel, gumbel
from mopd_dataplane.rollout.engines.philox import Words

Floats = NDArray[np.float64]

SAMPLER = grouped_gumbel.NAME
"""Sampler of new samples."""
FIRST_SAMPLER = gumbel.NAME
"""Sampler of logs that name none."""

OWN_NOISE = "engine"
"""Stands for the sampler where an engine draws with noise of its own (Engine.samplers is empty)."""


class Distribution(Protocol):
    """Distributions of B tokens, and how one sampler draws from them."""

    @classmethod
    def of(cls, logits: Any, temperature: Floats, top_k: NDArray[np.int64], top_p: Floats) -> Self:
        """softmax(logits / temperature), cut to the top k, then to the nucleus of mass top_p.

        logits: [B, V] float32, an array, or a tensor where the class draws on a device; the settings are [B].
        Temperature 0 counts as 1.
        """

    def mixed(self, other: Any, *, share: float) -> Self:
        """(1 - share) of this and `share` of another of the same kind."""

    def log_q(self) -> Floats:
        """[B, V] log-probs; -inf outside the cut."""

    def logprobs(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """[B] log q of one token a row, the same bits in any batch."""

    def kept(self) -> NDArray[np.bool_]:
        """[B, V] what the cut left."""

    def draw(self, keys: Words, positions: NDArray[np.integer], temperature: Floats) -> NDArray[np.int32]:
        """[B] tokens, for keys [B, 4] (philox.key_words), positions and temperatures [B]; ties go to the lower id.

        At temperature 0 the noise is left out.
        """


SAMPLERS: dict[str, type[Distribution]] = {
    grouped_gumbel.NAME: grouped_gumbel.Distribution,
    gumbel.NAME: gumbel.Distribution,
}
"""Samplers by name, the newest first."""


def sample_key(uid: str) -> int:
    """128-bit noise key of a sample."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=16, person=b"mopd-noise").digest(), "little")


def sampler(name: str) -> type[Distribution]:
    """The sampler of that name; for a name of another build, the sampler of new samples, so that the resume is
    statistical."""
    return SAMPLERS.get(name, SAMPLERS[SAMPLER])


def by_sampler(names: Sequence[str]) -> Iterator[tuple[type[Distribution], slice | NDArray[np.bool_]]]:
    """Each sampler that rows of a batch name, with its rows: all as a slice, which copies nothing, unless a log of an
    older sampler is continued beside new samples.
    """
    used = dict.fromkeys(names)
    for name in used:
        yield sampler(name), slice(len(names)) if len(used) == 1 else np.array([own == name for own in names])
