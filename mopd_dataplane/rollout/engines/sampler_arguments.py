"""The arguments of a vLLM request for the keyed sampler: the noise key, the first position, the distribution.

They travel in `SamplingParams.extra_args`, which a server fills from a completion request's `vllm_xargs`, so they are
one flat dictionary of JSON numbers, strings and lists. vLLM itself is asked for the greedy choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mopd_dataplane.rollout.engines.engine import Request
from mopd_dataplane.rollout.engines.sampling import SAMPLERS

_PREFIX = "mopd_"
"""Prefix of the names of the arguments; the name of a field of SamplerArguments follows."""
_READ: dict[str, Callable[[Any], Any]] = {
    "sample_key": lambda digits: int(str(digits), 16), "first": int, "again": lambda ids: tuple(map(int, ids)),
    "sampler": str, "temperature": float, "top_p": float, "top_k": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplerArguments:
    """The sampler's arguments for one request."""

    sample_key: int
    first: int
    """Response position of the first token that the engine draws."""
    again: tuple[int, ...]
    """Tokens that must come first, whatever the noise; their log-probs are those of the distribution."""
    sampler: str
    """Name of the sampler, see sampling.SAMPLERS."""
    temperature: float
    top_p: float
    top_k: int

    @classmethod
    def of(cls, request: Request, again: Sequence[int]) -> SamplerArguments:
        """Build the arguments that continue a request after its prefix, drawing its newest tokens `again` once more."""
        first = len(request.prefix_ids) - len(again)
        settings = (request.sampler, request.temperature, request.top_p, request.top_k)
        return cls(request.key, first, tuple(again), *settings)

    def as_arguments(self) -> dict[str, Any]:
        """Return the arguments as `extra_args` or `vllm_xargs`."""
        plain = asdict(self) | {"sample_key": f"{self.sample_key:032x}", "again": list(self.again)}
        return {f"{_PREFIX}{name}": value for name, value in plain.items()}

    @classmethod
    def read(cls, arguments: Mapping[str, Any] | None) -> SamplerArguments | None:
        """Read the arguments of a request. Returns None when it has none. Raises ValueError when they are
        incomplete."""
        if not arguments or f"{_PREFIX}sample_key" not in arguments:
            return None
        try:
            arguments_read = cls(**{name: read(arguments[f"{_PREFIX}{name}"]) for name, read in _READ.items()})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"incomplete arguments of the keyed sampler: {error!r}") from None
        if not (
            0 <= arguments_read.sample_key < 1 << 128
            and arguments_read.first >= 0
            and 0 < arguments_read.top_p <= 1
            and arguments_read.temperature >= 0
        ):
            raise ValueError(f"impossible arguments of the keyed sampler: {arguments_read}")
        if arguments_read.sampler not in SAMPLERS:
            raise ValueError(f"sampler {arguments_read.sampler!r}; this build draws with {', '.join(SAMPLERS)}")
        return arguments_read
