"""Wall time of a call, and a call in a process of its own, whose memory and time are those of that work alone."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mopd_dataplane.errors import EngineError


def seconds(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def apart(function: Callable[..., Any], *arguments: str | int | bool, timeout_s: float) -> Any:
    """What a function of a module returns in a fresh process, as JSON has it. Raises EngineError when it fails."""
    work = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", __name__, work, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=timeout_s, check=False)
    if done.returncode:
        raise EngineError(f"{work} ended with exit code {done.returncode}; its messages are above")
    return json.loads(done.stdout)


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(import_module(module), name)(*json.loads(sys.argv[2]))))
