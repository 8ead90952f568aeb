"""Weights of a job file that change over the optimizer steps of a stage."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import AfterValidator, Field


def _check_points(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    steps = [step for step, _ in points]
    if not points or steps[0] < 0 or steps != sorted(set(steps)):
        raise ValueError(f"give [step, weight] points with rising steps from 0 on; found steps {steps}")
    if min(weight for _, weight in points) < 0:
        raise ValueError(f"weights must not be negative; found {[weight for _, weight in points]}")
    return points


Points = Annotated[tuple[tuple[int, float], ...], AfterValidator(_check_points)]
Weight = Annotated[float, Field(ge=0)] | Points
"""A fixed weight, or `[[step, weight], …]`: linear between the points, constant before the first and after the last.
Steps are optimizer steps of the stage."""


def weight_at(weight: Weight, step: ArrayLike) -> NDArray[np.float64]:
    """The weight at each step.

    >>> weight_at(((0, 1.0), (100, 0.5)), [0, 50, 1000]).tolist()
    [1.0, 0.75, 0.5]
    """
    points = ((0, weight),) if isinstance(weight, int | float) else weight
    at, values = zip(*points, strict=True)
    return np.asarray(np.interp(np.asarray(step), at, values))
