"""The five divergences as one family of f-divergences.

``q`` is the student, ``p`` the teacher, ``u = p / q``, ``D = sum_v q_v f(u_v)``. The logit gradient of any member is
``q_v (h_v - H)`` with ``h = f(u) - u f'(u)`` and ``H = sum_v q_v h_v``. Every kind compares with a mixture
``m = mu p + (1 - mu) q``:

| kind         | D                                | mu        |
| ------------ | -------------------------------- | --------- |
| reverse      | KL(q | p)                        | 1         |
| forward      | KL(p | q)                        | 0         |
| jsd          | beta KL(p | m) + (1-beta) KL(q | m) | beta   |
| skew_forward | KL(p | m)                        | alpha     |
| skew_reverse | KL(q | m)                        | 1 - alpha |

The loss is summed from the centred generator ``f(u) - f'(1)(u - 1)``, which is non-negative term by term, so no
cancellation can make a divergence negative. Near ``u = 1`` it is a polynomial in ``w = u - 1`` whose coefficients
are given here.

Sources: Csiszar f-divergences; GKD (arXiv 2306.13649) for ``jsd``; DistiLLM (arXiv 2402.03898) for the skew kinds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

REVERSE, FORWARD, JSD, SKEW_FORWARD, SKEW_REVERSE = range(5)
Kind = Literal["reverse", "forward", "jsd", "skew_forward", "skew_reverse"]
KINDS: dict[str, int] = {
    "reverse": REVERSE,
    "forward": FORWARD,
    "jsd": JSD,
    "skew_forward": SKEW_FORWARD,
    "skew_reverse": SKEW_REVERSE,
}
SERIES_ORDERS = range(2, 7)


@dataclass(frozen=True)
class Form:
    """One divergence, as the numbers that a row kernel needs."""

    code: int
    mu: float
    """Share of the teacher in the mixture m."""
    series: tuple[float, ...]
    """Coefficients of w^2 .. w^6 of the centred generator."""

    @property
    def needs_mean(self) -> bool:
        """True if H needs a pass of its own; reverse and forward KL get it from the first pass."""
        return self.code not in (REVERSE, FORWARD)

    @property
    def log_mu(self) -> float:
        return math.log(self.mu) if self.mu > 0 else -math.inf

    @property
    def log_rest(self) -> float:
        return math.log1p(-self.mu) if self.mu < 1 else -math.inf


def _series(code: int, mu: float, order: int) -> float:
    sign = -1.0 if order % 2 else 1.0
    if code in (REVERSE, SKEW_REVERSE):
        return sign * mu**order / order
    if code in (FORWARD, SKEW_FORWARD):
        return sign * ((1 - mu ** (order - 1)) / (order - 1) - (1 - mu**order) / order)
    return sign * mu * (1 - mu ** (order - 1)) / (order * (order - 1))


def divergence_form(kind: str, *, beta: float = 0.5, alpha: float = 0.1) -> Form:
    """Return the form of ``kind``; ``beta`` is used by jsd, ``alpha`` by the skew kinds (alpha 0 is the plain KL).

    Raises ValueError for an unknown kind, beta outside (0, 1) or alpha outside [0, 1).
    """
    if kind not in KINDS:
        raise ValueError(f"unknown divergence kind {kind!r}; choose one of {', '.join(KINDS)}")
    code = KINDS[kind]
    if code == JSD and not 0.0 < beta < 1.0:
        raise ValueError(
            f"jsd needs 0 < beta < 1, got {beta}: the formula is zero at both ends; "
            "use kind='forward' for the beta -> 0 direction and kind='reverse' for beta -> 1"
        )
    if code in (SKEW_FORWARD, SKEW_REVERSE):
        if not 0.0 <= alpha < 1.0:
            raise ValueError(f"{kind} needs 0 <= alpha < 1, got {alpha}: at 1 the divergence vanishes")
        if alpha == 0.0:
            code = FORWARD if code == SKEW_FORWARD else REVERSE
    mu = {REVERSE: 1.0, FORWARD: 0.0, JSD: beta, SKEW_FORWARD: alpha, SKEW_REVERSE: 1.0 - alpha}[code]
    return Form(code=code, mu=mu, series=tuple(_series(code, mu, order) for order in SERIES_ORDERS))
