"""Steps whose update is not applied: loss or gradient is not finite, or the gradient is far above those before it.

The gradient's norm is compared with the median of the stage's last applied steps, read from metrics.jsonl on a resume,
so that a run that was interrupted decides as one that was not. The loss itself is not compared: that of a policy
gradient is around 0, where a ratio says nothing. OLMo 2 leaves out steps by the same figure (arXiv 2501.00656).
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

from mopd_dataplane.errors import EngineError
from mopd_dataplane.job.sections import Train
from mopd_dataplane.records import StepMetrics

SKIPPED = "skipped"
"""Name in a step's `extra` metrics: 1 where the update was left out."""
RECENT, FEWEST = 64, 8
"""Applied steps whose median counts, and how many there must be for a comparison."""
MOST_IN_A_ROW = 8
"""Steps in a row that may be left out: after as many, the weights are what is wrong."""


class SpikeError(EngineError):
    """A step's update was not applied, and the job is to stop then."""

    def __init__(self, stage: str, step: int, loss: float, grad_norm: float, reason: str) -> None:
        super().__init__(
            f"stage {stage!r} step {step}: {reason}; the update was not applied and the last checkpoint is intact: "
            "lower learning_rate, or look at the samples of this step"
        )
        self.loss = str(loss)
        self.grad_norm = str(grad_norm)
        self.reason = reason


class Spikes:
    """Tells spikes among the steps of one stage, in their order."""

    def __init__(self, settings: Train, earlier_steps: Sequence[StepMetrics] = ()) -> None:
        """earlier_steps: of the stage, before the next one."""
        self._factor = settings.spike_factor
        self.skips = settings.on_spike == "skip"
        """Whether a spike is left out instead of ending the run."""
        self._norms: deque[float] = deque(maxlen=RECENT)
        self._in_a_row = 0
        for metrics in earlier_steps:
            self.count(metrics.grad_norm, is_skipped=SKIPPED in metrics.extra)

    def reason(self, loss: float, grad_norm: float) -> str:
        """Return why a step is a spike; empty if it is none."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"loss {loss}, gradient norm {grad_norm}"
        if not self._factor or len(self._norms) < FEWEST:
            return ""
        median = statistics.median(self._norms)
        if grad_norm <= self._factor * median:
            return ""
        return (
            f"gradient norm {grad_norm:.3g}, more than train.spike_factor = {self._factor:g} times the {median:.3g} "
            f"that is the median of the last {len(self._norms)} steps"
        )

    def count(self, grad_norm: float, *, is_skipped: bool) -> None:
        """Count a step."""
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            self._norms.append(grad_norm)

    @property
    def are_too_many(self) -> bool:
        """Whether as many steps in a row were left out as may be."""
        return self._in_a_row >= MOST_IN_A_ROW
