"""The range of a log-prob that an engine or a server says."""

import math

from mopd_dataplane.errors import EngineError

ROUNDING = 1e-3
"""How far above 0 rounding may bring a log-prob."""
IMPOSSIBLE = -9999.0
"""Log-prob that vLLM's server gives in place of minus infinity, which JSON cannot hold."""


def check_logprob(value: float, where: str) -> None:
    """Raise EngineError for a log-prob that no model gives a token of its text.

    where: as `of token 7 at position 3`.
    """
    if math.isnan(value) or value > ROUNDING or value <= IMPOSSIBLE:
        stands = "stands for a probability of 0, or for logits that are not finite"
        why = stands if value <= IMPOSSIBLE else "no log-prob is"
        raise EngineError(
            f"the log-prob {where} is {value}, which {why}; it was not stored: look at the engine's weights and "
            "dtype, then run the same command again to continue"
        )
