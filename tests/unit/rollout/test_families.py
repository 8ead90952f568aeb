"""Models with windows, chunks, sinks, softcaps and recurrent states: sampler, teacher and trainer against a plain pass.

Every sequence is longer than the windows, chunks and convolutions of its model, and more requests than slots make rows
move. The plain pass is transformers' own, with plain attention, one sequence at a time.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from advice import advises
from causal_classes import tiny_settings
from families import FAMILIES, measure
from mopd_kernels import Head
from transformers import PreTrainedModel

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models import self_check
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.models.layer_types import LayerTypes
from mopd_dataplane.models.self_check import texts_to_check
from mopd_dataplane.rollout.engines.decoder import Decoder
from mopd_dataplane.rollout.engines.hf import HfEngine

TOLERANCE = 1e-4
"""nat; what the contract of docs/models.md promises in float32."""
MECHANISMS = (
    "mistral, window", "qwen2, sliding", "gpt-oss", "gemma2, softcap", "gemma3", "llama4", "deepseek-v3", "qwen3.5",
    "lfm2", "falcon-h1",
)  # fmt: skip
"""One model of each mechanism; the others are in the slow tier."""
REFUSED = {"minimax": "cache of its own", "bloom": "cannot be decoded"}
REST = tuple(name for name in FAMILIES if name not in MECHANISMS and name not in REFUSED)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder of a random model of the family that the test names."""
    return make_student(sections.Student(config=FAMILIES[request.param]), tmp_path / "model", seed=3)


@pytest.mark.parametrize("folder", MECHANISMS, indirect=True)
def test_a_family_is_sampled_and_scored_exactly(folder: Path) -> None:
    assert measure(folder).worst < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("folder", REST, indirect=True)
def test_every_other_family_too(folder: Path) -> None:
    assert measure(folder).worst < TOLERANCE


@pytest.mark.parametrize(("folder", "reason"), REFUSED.items(), indirect=["folder"])
def test_what_cannot_be_sampled_is_refused_by_name(folder: Path, reason: str) -> None:
    with pytest.raises(MismatchError, match=reason):
        HfEngine(folder, slots=2)


class TestSelfCheckFinds:
    """Each fault moves log-probs; the self-check stops the engine before it samples."""

    @staticmethod
    def _refused(folder: Path) -> None:
        with pytest.raises(MismatchError, match="computes by itself"):
            HfEngine(folder, slots=2)

    @pytest.mark.parametrize("folder", ["mistral, window", "gemma3", "llama4"], indirect=True)
    def test_a_lost_window(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = LayerTypes.masks

        def without_window(self: LayerTypes, columns: torch.Tensor, width: int) -> object:
            masks = whole(self, columns, width)
            seen = (torch.arange(width) <= columns[:, None])[:, None, None, :]
            return dict.fromkeys(masks, seen) if isinstance(masks, dict) else seen

        monkeypatch.setattr(LayerTypes, "masks", without_window)
        self._refused(folder)

    def test_a_lost_window_of_a_thousand_tokens(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = FAMILIES["mistral, window"] | {"sliding_window": 1024, "max_position_embeddings": 2048}
        folder = make_student(sections.Student(config=config), tmp_path / "m", seed=3)
        HfEngine(folder, slots=1).close()
        self.test_a_lost_window(folder, monkeypatch)

    @pytest.mark.parametrize("folder", ["gemma2, softcap"], indirect=True)
    def test_a_dropped_softcap(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mopd_dataplane.models.hf.attention_implementation", lambda config: "sdpa")
        self._refused(folder)

    @pytest.mark.parametrize("folder", ["gpt-oss", "llama"], indirect=True)
    def test_a_mask_of_the_wrong_form(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def inverted(self: Decoder, mask: torch.Tensor | dict[str, torch.Tensor]) -> object:
            if isinstance(mask, dict):
                return {name: inverted(self, own) for name, own in mask.items()}
            return mask.logical_not() if self.model.config._attn_implementation != "eager" else mask.float()

        monkeypatch.setattr(Decoder, "_as_attention_takes_it", inverted)
        self._refused(folder)

    @pytest.mark.parametrize("folder", ["llama"], indirect=True)
    def test_a_shifted_position(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = Decoder.forward
        monkeypatch.setattr(Decoder, "forward", lambda self, last, columns: forward(self, last, columns + 1))
        self._refused(folder)

    @pytest.mark.parametrize("folder", ["llama"], indirect=True)
    def test_a_position_that_is_wrong_late_in_a_long_sample(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The made-up texts are too short for it; those of the job, up to its longest sample, are not."""
        forward = Decoder.forward
        monkeypatch.setattr(Decoder, "forward", lambda self, last, at: forward(self, last, at + (at > 100)))
        engine = HfEngine(folder, slots=2)
        prompts = [np.arange(3, 3 + length) for length in (5, 9)]
        assert engine.check(texts_to_check(prompts, 60)).tokens == 60
        with pytest.raises(MismatchError, match="The built-in sampler does not compute what"):
            engine.check(texts_to_check(prompts, 140))

    @pytest.mark.parametrize("folder", ["llama"], indirect=True)
    def test_a_teachers_states_that_are_wrong_in_a_long_sample(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        states = self_check.hidden_states

        def forgetful(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
            """States that lose the first tokens of texts above 100."""
            return torch.cat([states(model, part) for part in ids.split(100, dim=1)], dim=1)

        monkeypatch.setattr(self_check, "hidden_states", forgetful)
        model, prompts = load_model(folder), [np.arange(3, 12)]
        assert self_check.check_forward(model, "Scoring", texts_to_check(prompts, 90)).tokens == 90
        with pytest.raises(MismatchError, match=r"Scoring does not compute .* from token 100 of the compared ones on"):
            self_check.check_forward(model, "Scoring", texts_to_check(prompts, 140))

    @pytest.mark.parametrize("folder", ["llama"], indirect=True)
    def test_a_stale_head(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        take = Decoder._take_head

        def stale(self: Decoder) -> None:
            take(self)
            self._head_weight = self._head_weight.flip(0)

        monkeypatch.setattr(Decoder, "_take_head", stale)
        self._refused(folder)

    @pytest.mark.parametrize("folder", ["llama"], indirect=True)
    def test_a_teachers_head_with_another_scale(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        right = self_check.lm_head
        monkeypatch.setattr(self_check, "lm_head", lambda model: Head(right(model).weight, logit_scale=0.5))
        with pytest.raises(MismatchError, match="Scoring"):
            self_check.check_forward(load_model(folder), "Scoring")


def test_an_encoder_that_sees_later_tokens_is_no_teacher(tmp_path: Path) -> None:
    """Its states and head are right, and its log-probs would still be no language model's."""
    settings = tiny_settings("bert-generation")
    for is_decoder in (True, False):
        student = sections.Student(config=settings | {"is_decoder": is_decoder})
        model = load_model(make_student(student, tmp_path / str(is_decoder), seed=3))
        if is_decoder:
            self_check.check_forward(model, "Scoring")
            continue
        with advises("true in its config.json if it was trained as one, or use another model") as refused:
            self_check.check_forward(model, "Scoring")
        assert "tokens of BertGenerationDecoder" in str(refused.value)
        config = tmp_path / "False" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"is_decoder": True}))
        self_check.check_forward(load_model(tmp_path / "False"), "Scoring")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", ["llama", "gpt-oss", "gemma3", "qwen3.5"], indirect=True)
def test_healthy_models_pass_the_self_check(folder: Path, dtype: str) -> None:
    HfEngine(folder, slots=2, dtype=dtype)
