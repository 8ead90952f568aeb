"""The self-check of real vLLM, here and as a server: a healthy one passes, one with other weights does not."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from serving import serving

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import load_tokenizer
from mopd_dataplane.models.self_check import texts_to_check
from mopd_dataplane.rollout.engines.engine_check import check_engine
from mopd_dataplane.rollout.engines.vllm import VllmEngine
from mopd_dataplane.rollout.engines.vllm_server import ServerEngine
from mopd_dataplane.score.scorer_check import check_scorer
from mopd_dataplane.score.teacher_pool import TeacherPool, TeacherSpec

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


@pytest.mark.parametrize("reads", ["states", "prompt_logprobs"])
def test_a_teacher(reads: Literal["states", "prompt_logprobs"], models: tuple[Path, Path]) -> None:
    spec = TeacherSpec(models[0], sections.Teacher(source=str(models[0])))
    tokenizer, settings = load_tokenizer(models[0]), sections.Score(engine="vllm", reads=reads)
    with closing(TeacherPool({"t": spec}, student_tokenizer=tokenizer, engine="vllm", reads=reads)) as pool:
        passed = check_scorer(pool, "t", models[0], TEXTS, settings, dtype="float32")
        assert passed.gap is not None
        assert passed.gap <= passed.band
        with pytest.raises(MismatchError, match=r"first at position 1, .*Nothing was sampled"):
            check_scorer(pool, "t", models[1], TEXTS, settings, dtype="float32")
