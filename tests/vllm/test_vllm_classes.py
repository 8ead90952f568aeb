"""The classes that vLLM lists are those in the file that docs/models.md is made from."""

from __future__ import annotations

from pathlib import Path

import vllm
from vllm.model_executor.models.registry import ModelRegistry

FILE = Path(__file__).parents[1] / "data" / "vllm_classes.txt"


def test_the_listed_classes_are_vllms() -> None:
    version, *classes = FILE.read_text().split()
    assert version == vllm.__version__.partition("+")[0]
    assert classes == sorted(ModelRegistry.get_supported_archs())
