"""Mode-seeking against mean-seeking: one Gaussian fitted to a mixture of two, under every divergence of the library.

    python jobs/minillm-gkd/seeking.py [--out docs/images/mode-seeking.png]

The student is a Gaussian over a grid of 240 points, written as a head: logits = a x + b x², so its state is (a, b). The
teacher is a mixture that no single Gaussian can match. Minimising `divergence` over (a, b) from three starts and
keeping the lowest shows what a student of too little capacity does: reverse KL picks one mode, forward KL covers both.
Prints a Markdown table: mean and width of each fit, and the teacher's mass within two widths of its main mode.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mopd_kernels import Head, divergence
from torch import Tensor

GRID = torch.linspace(-6.0, 6.0, 240, dtype=torch.float64)
TEACHER = ((0.65, -1.8, 0.6), (0.35, 1.9, 0.7))
"""Weight, mean and width of each mode."""
STARTS = ((-1.8, 0.8), (0.0, 2.2), (1.9, 0.8))
"""Mean and width."""
KINDS: dict[str, dict[str, object]] = {
    "forward KL": {"kind": "forward"},
    "skewed forward, α = 0.1": {"kind": "skew_forward", "alpha": 0.1},
    "JSD, β = 0.1": {"kind": "jsd", "beta": 0.1},
    "JSD, β = 0.5": {"kind": "jsd", "beta": 0.5},
    "JSD, β = 0.9": {"kind": "jsd", "beta": 0.9},
    "skewed reverse, α = 0.1": {"kind": "skew_reverse", "alpha": 0.1},
    "reverse KL": {"kind": "reverse"},
}


def fit(settings: dict[str, Any]) -> tuple[float, Tensor]:
    """Lowest divergence over the starts, and the student's distribution [240] there."""
    head, one = Head(torch.stack([GRID, GRID**2], 1)), torch.ones(1, 1, dtype=torch.float64)
    teacher = Head(teacher_distribution().log()[:, None])
    fits = []
    for start in STARTS:
        state = state_of(*start).requires_grad_()
        value = minimise(lambda at: divergence(at, head, one, teacher, reduction="sum", **settings), state)
        fits.append((value, (state.detach() @ head.weight.T).softmax(1)[0]))
    return min(fits, key=lambda pair: pair[0])


def state_of(mean: float, width: float) -> Tensor:
    """[1, 2] natural parameters of a Gaussian."""
    return torch.tensor([[mean / width**2, -0.5 / width**2]], dtype=torch.float64)


def minimise(loss: Callable[[Tensor], Tensor], state: Tensor) -> float:
    """Move the state to a local minimum; returns the loss there."""
    optimizer = torch.optim.LBFGS([state], max_iter=200, line_search_fn="strong_wolfe")

    def step() -> float:
        optimizer.zero_grad()
        value = loss(state)
        value.backward()
        return float(value.detach())

    optimizer.step(step)
    return step()


def teacher_distribution() -> Tensor:
    """[240] the mixture on the grid."""
    parts = [weight * torch.distributions.Normal(mean, width).log_prob(GRID).exp() for weight, mean, width in TEACHER]
    total = torch.stack(parts).sum(0)
    return total / total.sum()


def moments(p: Tensor) -> tuple[float, float]:
    """Mean and width of a distribution on the grid."""
    mean = (p * GRID).sum()
    return float(mean), float((p * (GRID - mean) ** 2).sum().sqrt())


def draw(fits: dict[str, Tensor], file: Path) -> None:
    """Teacher and fits, from mean-seeking to mode-seeking."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    teacher, step = teacher_distribution(), float(GRID[1] - GRID[0])
    shown = [("forward KL", "reverse KL"), [name for name in fits if "KL" not in name]]
    for axis, names in zip(axes, shown, strict=True):
        axis.fill_between(GRID, teacher / step, color="0.85", label="teacher: two modes")
        for index, name in enumerate(names):
            axis.plot(GRID, fits[name] / step, linestyle=("-", "--", "-.", ":")[index % 4], label=name)
        axis.set(xlabel="x", xlim=(-6, 6), ylim=(0, None))
        axis.legend(fontsize=8, frameon=False)
    axes[0].set(ylabel="density", title="the two ends")
    axes[1].set(title="between them")
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main() -> None:
    """Fit every kind, print the table, write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/mode-seeking.png"))
    options = parser.parse_args()
    print("| divergence | its value | mean | width | mass on the larger mode |\n|---|---|---|---|---|")
    fits = {}
    for name, settings in KINDS.items():
        value, fits[name] = fit(settings)
        mean, width = moments(fits[name])
        inside = float(fits[name][(GRID - TEACHER[0][1]).abs() <= 2 * TEACHER[0][2]].sum())
        print(f"| {name} | {value:.3f} | {mean:+.2f} | {width:.2f} | {100 * inside:.0f} % |", flush=True)
    draw(fits, options.out)


if __name__ == "__main__":
    main()
