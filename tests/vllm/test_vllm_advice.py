"""A next step that a message about adapters in vLLM names, which only vLLM's own package brings up."""

from __future__ import annotations

import pytest
from advice import advises

from mopd_dataplane.models.vllm_adapters import _check_dtype


def test_adapters_on_a_device_are_applied_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is stood in for: vLLM is asked whether it is on a CPU."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
    with advises('teachers.NAME.dtype) = "bfloat16"'):
        _check_dtype("float32")
    _check_dtype("bfloat16")
