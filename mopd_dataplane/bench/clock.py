"""Wall time of a call."""

import time
from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
