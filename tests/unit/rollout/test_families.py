"""Models with windows, chunks, sinks, softcaps and recurrent states: sampler, teacher and trainer against a plain pass.

Every sequence is longer than the windows, chunks and convolutions of its model, and more requests than slots make rows
move. The plain pass is transformers' own, with plain attention, one sequence at a time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import Answer, decode, make_requests
from families import FAMILIES
from mopd_kernels import Head
from mopd_kernels.reference import logits

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models import self_check
from mopd_dataplane.models.hf import load_model
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.models.layer_types import LayerTypes
from mopd_dataplane.rollout.engines.decoder import Decoder
from mopd_dataplane.rollout.engines.engine import Request
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.score.readers import HfReader

TOLERANCE = 1e-4
"""nat; what the contract of docs/models.md promises in float32."""
MECHANISMS = (
    "mistral, window", "qwen2, sliding", "gpt-oss", "gemma2, softcap", "gemma3", "llama4", "deepseek-v3", "qwen3.5",
    "lfm2", "falcon-h1",
)  # fmt: skip
"""One model of each mechanism; the others are in the slow tier."""
REFUSED = {"minimax": "cache of its own", "bloom": "cannot be decoded", "nemotron-h": "by itself"}
REST = tuple(name for name in FAMILIES if name not in MECHANISMS and name not in REFUSED)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder of a random model of the family that the test names."""
    return make_student(sections.Student(config=FAMILIES[request.param]), tmp_path / "model", seed=3)


def plain(folder: Path, ids: list[int]) -> torch.Tensor:
    """[T, V] log-probs by the model alone."""
    model = load_model(folder)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


def check_family(folder: Path) -> None:
    """Sampler, teacher and trainer give the numbers of the plain pass."""
    engine = HfEngine(folder, slots=3)
    work = make_requests(7, longest=30)
    answers = decode(engine, work)
    sequences = [[*request.prompt_ids.tolist(), *answers[request.uid][0]] for request in work]
    expected = [plain(folder, ids) for ids in sequences]
    for request, ids, logprobs in zip(work, sequences, expected, strict=True):
        answer, sampled, _ = answers[request.uid]
        start = len(ids) - len(answer)
        own = logprobs[range(start - 1, len(ids) - 1), ids[start:]]
        np.testing.assert_allclose(sampled, own.numpy(), rtol=0, atol=TOLERANCE)
    check_resumed(engine, work, answers)
    check_teacher(folder, sequences, expected)


def check_resumed(engine: HfEngine, work: list[Request], answers: dict[str, Answer]) -> None:
    """A released sample that comes back with a prefix goes on with the same tokens."""
    resumed = [
        Request(uid=r.uid, prompt_ids=r.prompt_ids, prefix_ids=np.array(answers[r.uid][0][:11], np.int32), key=r.key,
                max_new_tokens=30)
        for r in work if len(answers[r.uid][0]) > 11
    ]  # fmt: skip
    for request in resumed:
        rescored = engine.admit([(0, request)])[0]
        tokens, logprobs, _ = answers[request.uid]
        np.testing.assert_allclose(rescored, logprobs[:11], rtol=0, atol=TOLERANCE)
        assert engine.step().token_ids.tolist() == tokens[11:12]
        engine.release(0)


def check_teacher(folder: Path, sequences: list[list[int]], expected: list[torch.Tensor]) -> None:
    """A teacher reads all sequences in one padded batch."""
    reader = HfReader(load_model(folder))
    positions = [np.arange(1, len(ids)) for ids in sequences]
    states = reader.predicting_states([np.array(ids) for ids in sequences], positions)
    logprobs = logits(states, reader.head).float().log_softmax(-1)
    wanted = torch.cat([own[:-1] for own in expected])
    likeliest = wanted.topk(16).indices
    gap = (logprobs.gather(1, likeliest) - wanted.gather(1, likeliest)).abs().max().detach()
    assert float(gap) < TOLERANCE


@pytest.mark.parametrize("folder", MECHANISMS, indirect=True)
def test_a_family_is_sampled_and_scored_exactly(folder: Path) -> None:
    check_family(folder)


@pytest.mark.slow
@pytest.mark.parametrize("folder", REST, indirect=True)
def test_every_other_family_too(folder: Path) -> None:
    check_family(folder)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", ["llama", "gpt-oss", "gemma3", "qwen3.5"], indirect=True)
def test_healthy_models_pass_the_self_check(folder: Path, dtype: str) -> None:
    HfEngine(folder, slots=2, dtype=dtype)
