"""The self-check of real vLLM, here and as a server: a healthy one passes, one with other weights does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from serving import serving

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.models.self_check import texts_to_check
from mopd_dataplane.rollout.engines.engine_check import check_engine
from mopd_dataplane.rollout.engines.vllm import VllmEngine
from mopd_dataplane.rollout.engines.vllm_server import ServerEngine

TEXTS = texts_to_check([np.arange(length) % 40 + 5 for length in (6, 23, 11)], 120)


def test_vllm_in_this_process(keyed: VllmEngine, models: tuple[Path, Path]) -> None:
    passed = check_engine(keyed, models[0], TEXTS, dtype="float32")
    assert passed.gap is not None
    assert passed.gap <= passed.band == 1e-3
    assert passed.tokens == 128
    with pytest.raises(MismatchError, match="Nothing was sampled"):
        check_engine(keyed, models[1], TEXTS, dtype="float32")


def test_a_server(models: tuple[Path, Path]) -> None:
    with serving(models[0], "--max-model-len", "256") as server:
        engine = ServerEngine(models[0], url=server.url, slots=2, noise="seeded")
        passed = check_engine(engine, models[0], TEXTS, dtype="float32")
        assert passed.gap is not None
        assert passed.gap <= passed.band
        with pytest.raises(MismatchError, match="Nothing was sampled"):
            check_engine(engine, models[1], TEXTS, dtype="float32")
        engine.close()
