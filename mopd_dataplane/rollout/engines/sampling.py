"""A token as a pure function of (logits, sample key, position).

q is the sampling distribution: softmax(logits / temperature), cut to the top k, then to the nucleus of mass top_p,
renormalised. The noise comes from a counter-based generator at counter (position, number), so it has no state: a
resumed sample gets the same noise, and a sample does not depend on the rest of its batch.

A sampler turns noise and distribution into a token, and has a name and a version. Each sample records its sampler (in
the token log, and in `samples.sampler`) and uses it to its end: new samples get SAMPLER, and a log is continued with
the sampler that began it.

The reported log-prob is log q(token), which an importance ratio needs. At temperature 0 the token is argmax(logits) and
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
"""Name recorded instead of a sampler when an engine draws with noise of its own (Engine.samplers is empty)."""


class Distribution(Protocol):
    """Distributions of B tokens, and how one sampler draws from them."""

    @classmethod
    def of(cls, logits: Any, temperature: Floats, top_k: NDArray[np.int64], top_p: Floats) -> Self:
        """softmax(logits / temperature), cut to the top k, then to the nucleus of mass top_p.

        logits: [B, V] float32, an array, or a tensor where the class draws on a device; the settings are [B].
        Temperature 0 counts as 1.
        """

    def mixed(self, other: Any, *, share: float) -> Self:
        """Mix this with another distribution of the same class: (1 - share) of this and `share` of the other."""

    def log_q(self) -> Floats:
        """Return log-probs [B, V]; -inf outside the cut."""

    def logprobs(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return log q of one token per row, [B]; the bits are the same in any batch."""

    def kept(self) -> NDArray[np.bool_]:
        """Return the tokens inside the cut: [B, V] bool."""

    def draw(self, keys: Words, positions: NDArray[np.integer], temperature: Floats) -> NDArray[np.int32]:
        """Draw a token per row, [B]; ties go to the lower id. At temperature 0 the noise is left out.

        keys: [B, 4], see philox.key_words. positions, temperature: [B].
        """


SAMPLERS: dict[str, type[Distribution]] = {
    grouped_gumbel.NAME: grouped_gumbel.Distribution,
    gumbel.NAME: gumbel.Distribution,
}
"""Samplers by name, the newest first."""


def sample_key(uid: str) -> int:
    """Return the 128-bit noise key of a sample."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=16, person=b"mopd-noise").digest(), "little")


def sampler(name: str) -> type[Distribution]:
    """Return the sampler of this name; for a name of another build, that of new samples: the resume is then
    statistical."""
    return SAMPLERS.get(name, SAMPLERS[SAMPLER])


def by_sampler(names: Sequence[str]) -> Iterator[tuple[type[Distribution], slice | NDArray[np.bool_]]]:
    """Yield each sampler in a batch, with its rows.

    The rows are one slice, which copies nothing, unless a log of an older sampler is continued beside new samples.
    """
    used = dict.fromkeys(names)
    for name in used:
        yield sampler(name), slice(len(names)) if len(used) == 1 else np.array([own == name for own in names])
