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
REWOUND = "rewound"
"""Name in a step's `extra` metrics: 1 at the spike that took its window back to the window's beginning."""
RECENT, FEWEST = 64, 8
"""Applied steps whose median counts, and how many there must be for a comparison."""
MOST_IN_A_ROW = 8
"""Steps in a row that may be left out: after as many, the weights are what is wrong."""
MOST_WINDOWS_IN_A_ROW = 3
"""Windows in a row that may be taken back."""


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
        self._on_spike = settings.on_spike
        self._norms: deque[float] = deque(maxlen=RECENT)
        self._in_a_row = 0
        self._rewound = -1
        """Newest window that was taken back."""
        self._windows_in_a_row = 0
        for metrics in earlier_steps:
            marks = metrics.extra
            self.count(metrics.grad_norm, metrics.window, is_skipped=SKIPPED in marks, is_rewound=REWOUND in marks)

    @property
    def rewinds(self) -> bool:
        """True if a spike takes its window back to the window's beginning."""
        return self._on_spike == "rewind"

    def is_over(self, window: int) -> bool:
        """Check if a window was taken back, so that the rest of its updates is left out."""
        return window == self._rewound

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

    def count(self, grad_norm: float, window: int, *, is_skipped: bool, is_rewound: bool = False) -> None:
        """Count a step of a window. is_rewound: it is the spike that takes the window back."""
        if is_rewound:
            self._windows_in_a_row = self._windows_in_a_row + 1 if window == self._rewound + 1 else 1
            self._rewound = window
        if self.is_over(window):
            return
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            self._norms.append(grad_norm)

    def why_to_stop(self, window: int) -> str | None:
        """Decide if a spike in a window ends the run: None if not, else the beginning of the reason, which may be
        empty."""
        if self._on_spike == "stop":
            return ""
        if self.rewinds:
            too_many = window == self._rewound + 1 and self._windows_in_a_row >= MOST_WINDOWS_IN_A_ROW
            return f"after {MOST_WINDOWS_IN_A_ROW} windows in a row that were taken back: " if too_many else None
        too_many = self._in_a_row >= MOST_IN_A_ROW
        return f"after {MOST_IN_A_ROW} steps in a row that were left out: " if too_many else None
