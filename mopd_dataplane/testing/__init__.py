"""For authors of plug-ins: contract suites for an engine, a term of an objective, a kind of signal and an importer,
and doubles.

Every check raises an AssertionError with what was expected and what was found. The built-in kinds pass them.

engine_contract.py     check_engine: decoding, refilling, budgets, resuming, noise
objective_contract.py  check_objective: losses, gradients, metrics, independence of micro-batching
signal_contract.py     check_signal: shapes, finite numbers, independence of neighbours
importer_contract.py   check_importer: rows, ids, malformed input
toy_engine.py          a deterministic engine without a model
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mopd_dataplane.testing.engine_contract import check_engine
    from mopd_dataplane.testing.importer_contract import check_importer
    from mopd_dataplane.testing.objective_contract import check_objective
    from mopd_dataplane.testing.signal_contract import check_signal

__all__ = ["check_engine", "check_importer", "check_objective", "check_signal"]


def __getattr__(name: str) -> Any:
    """Loaded at first use: only the contracts of an objective and of a signal need torch."""
    if name in __all__:
        module = import_module(f"mopd_dataplane.testing.{name.removeprefix('check_')}_contract")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
