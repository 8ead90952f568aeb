"""Device functions of the f-divergence: the same formulas as ``torch_rows/fdiv.py``, in registers."""

import triton
import triton.language as tl

from mopd_kernels import forms

REVERSE = tl.constexpr(forms.REVERSE)
FORWARD = tl.constexpr(forms.FORWARD)
JSD = tl.constexpr(forms.JSD)
SKEW_FORWARD = tl.constexpr(forms.SKEW_FORWARD)
FAR = tl.constexpr(40.0)
NEAR = tl.constexpr(0.1)


@triton.jit
def log1p(t):
    """Compute log(1 + t), accurate for small t: Kahan's correction of the rounding of 1 + t."""
    total = 1.0 + t
    rounded = total - 1.0
    safe = tl.where(rounded == 0.0, 1.0, rounded)
    return tl.where(rounded == 0.0, t, tl.log(total) * (t / safe))


@triton.jit
def expm1(t):
    series = t * (1.0 + t / 2.0 * (1.0 + t / 3.0 * (1.0 + t / 4.0 * (1.0 + t / 5.0 * (1.0 + t / 6.0)))))
    return tl.where(tl.abs(t) < 0.1, series, tl.exp(t) - 1.0)


@triton.jit
def student_to_mixture(ratio, mu, log_mu):
    """Compute log(q / m) from ratio = log(q / p)."""
    exact = -log1p(mu * expm1(-tl.where(ratio < -FAR, -FAR, ratio)))
    return tl.where(ratio > -FAR, exact, ratio - log_mu)


@triton.jit
def teacher_to_mixture(ratio, mu, log_rest):
    """Compute log(p / m) from ratio = log(q / p)."""
    exact = -log1p((1.0 - mu) * expm1(tl.where(ratio > FAR, FAR, ratio)))
    return tl.where(ratio < FAR, exact, -ratio - log_rest)


@triton.jit
def weighted_h(log_q, log_p, mu, log_mu, KIND: tl.constexpr):
    q = tl.exp(log_q)
    p = tl.exp(log_p)
    ratio = log_q - log_p
    if KIND == REVERSE:
        h = q * ratio
    elif KIND == FORWARD:
        h = -p
    else:
        r = student_to_mixture(ratio, mu, log_mu)
        if KIND == JSD:
            h = (1.0 - mu) * q * r
        elif KIND == SKEW_FORWARD:
            h = -(1.0 - mu) * p * tl.exp(r)
        else:
            h = q * (r - (1.0 - mu) * tl.exp(r))
    return h


@triton.jit
def centred_loss(log_q, log_p, mu, log_mu, log_rest, c2, c3, c4, c5, c6, KIND: tl.constexpr):
    q = tl.exp(log_q)
    p = tl.exp(log_p)
    ratio = log_q - log_p
    if KIND == REVERSE:
        far = q * ratio + (p - q)
    elif KIND == FORWARD:
        far = (q - p) - p * ratio
    elif KIND == JSD:
        far = mu * p * teacher_to_mixture(ratio, mu, log_rest)
        far += (1.0 - mu) * q * student_to_mixture(ratio, mu, log_mu)
    elif KIND == SKEW_FORWARD:
        far = p * teacher_to_mixture(ratio, mu, log_rest) - (1.0 - mu) * (p - q)
    else:
        far = q * student_to_mixture(ratio, mu, log_mu) + mu * (p - q)
    close = tl.abs(ratio) < NEAR
    w = expm1(-tl.where(close, ratio, 0.0))
    return tl.where(close, q * w * w * (c2 + w * (c3 + w * (c4 + w * (c5 + w * c6)))), far)
