"""Answers as JSON text that every browser reads."""

import datetime
import json
import math
from typing import Any

import numpy as np


def to_json(value: Any) -> str:
    """JSON text; NaN and infinities become null, times ISO, numpy numbers plain."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":"))
    except ValueError:  # a NaN somewhere
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.datetime | datetime.date):
        return value.isoformat()
    if isinstance(value, np.generic):
        return _finite(value.item())
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
