"""A newer policy in the middle of a rollout: pinned samples finish on theirs, spans say where the new one took over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mopd_dataplane.base import fault_points
from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.records import Sample
from mopd_dataplane.rollout.engines.engine import Request, StepOutput
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.sampling import sample_key
from mopd_dataplane.rollout.runner import RolloutReport
from mopd_dataplane.testing.toy_engine import ToyEngine

Roll = Callable[..., RolloutReport]
SPAN = sections.Rollout(max_new_tokens=60, weight_change="span")
PIN = sections.Rollout(max_new_tokens=60)


class Died(BaseException):
    """Stands for SIGKILL inside one process."""


class Counting(ToyEngine):
    """A toy engine that notes which version sampled each step; it may die after so many steps of version 3."""

    def __init__(self, *, slots: int = 8, dies_after: int = -1) -> None:
        super().__init__(slots=slots)
        self.by_version: list[int] = []
        self._dies_after = dies_after

    def step(self) -> StepOutput:
        if self.policy_version == 3 and self.by_version.count(3) == self._dies_after:
            raise Died
        self.by_version.append(self.policy_version)
        return super().step()


def after(engine: Counting, steps: int, version: int = 3) -> Callable[[], tuple[int, Path]]:
    """A trainer that publishes `version` when the engine has made that many steps."""
    return lambda: (version if len(engine.by_version) >= steps else 0, Path())


def tokens_of(samples: dict[str, Sample]) -> dict[str, tuple[list[int], bytes]]:
    return {uid: (s.tokens.tolist(), s.logprobs.tobytes()) for uid, s in samples.items() if s.logprobs is not None}


def continued(sample: Sample, version: int, start: int) -> list[int]:
    """What the toy of a version writes behind the first `start` response tokens."""
    engine = ToyEngine(slots=1)
    engine.load_policy(Path(), version)
    response = sample.tokens[sample.prompt_len :].tolist()[:start]
    prompt, prefix = sample.tokens[: sample.prompt_len], np.array(response, np.int32)
    key = sample_key(sample.uid)
    engine.admit([(0, Request(uid="", prompt_ids=prompt, prefix_ids=prefix, key=key, max_new_tokens=60))])
    while True:
        output = engine.step()
        response.append(int(output.token_ids[0]))
        if output.finished[0]:
            return response


@pytest.fixture
def reference(roll: Roll, shelf: Any, tmp_path: Path) -> dict[str, Sample]:
    """The same samples under the first policy only."""
    whole = type(shelf)()
    roll(whole, home=tmp_path / "reference")
    return dict(whole.samples)


def test_span_goes_on_with_the_new_policy_from_the_next_token(
    roll: Roll, shelf: Any, reference: dict[str, Sample]
) -> None:
    engine = Counting()
    report = roll(shelf, engine=engine, rollout=SPAN, published=after(engine, 12))
    assert report.weight_changes == 1
    assert set(engine.by_version) == {0, 3}
    mixed = [sample for sample in shelf.samples.values() if len(sample.versions) > 1]
    assert len(mixed) > 4
    for sample in mixed:
        assert sample.versions.tolist() == [0, 3]
        start = int(sample.version_starts[1])
        whole = reference[sample.uid]
        assert sample.tokens[: sample.prompt_len + start].tolist() == whole.tokens[: whole.prompt_len + start].tolist()
        assert sample.tokens[sample.prompt_len :].tolist() == continued(sample, 3, start)
        assert (sample.interruptions, sample.resume) == (0, "none")


def test_pin_finishes_what_is_in_flight_before_the_new_policy_begins(
    roll: Roll, shelf: Any, reference: dict[str, Sample]
) -> None:
    engine = Counting()
    report = roll(shelf, engine=engine, rollout=PIN, published=after(engine, 12))
    assert report.weight_changes == 1
    assert engine.by_version == sorted(engine.by_version), "one policy after the other"
    assert all(len(sample.versions) == 1 for sample in shelf.samples.values())
    old = {uid: sample for uid, sample in shelf.samples.items() if sample.versions[0] == 0}
    assert 8 <= len(old) < 20
    assert tokens_of(old) == {uid: tokens_of(reference)[uid] for uid in old}
    for sample in shelf.samples.values():
        assert sample.tokens[sample.prompt_len :].tolist() == continued(sample, int(sample.versions[0]), 0)
    last_old = max(sample.writer_seq for sample in old.values())
    assert all(sample.writer_seq > last_old for uid, sample in shelf.samples.items() if uid not in old)


def test_pin_lets_a_conversation_end_on_its_policy(roll: Roll, shelf: Any) -> None:
    """Between two turns a sample has no slot, and is in flight all the same."""
    engine = Counting(slots=1)
    roll(
        shelf, engine=engine, rollout=PIN, published=after(engine, 12),
        environment=lambda turn: [9] if turn.response.count(0) < 3 else None,
    )  # fmt: skip
    assert {tuple(sample.versions.tolist()) for sample in shelf.samples.values()} == {(0,), (3,)}
    assert max(sample.turns for sample in shelf.samples.values()) > 1


@pytest.mark.parametrize("nth", [1, 3])
def test_dying_in_the_middle_of_a_change_keeps_the_spans(roll: Roll, shelf: Any, nth: int) -> None:
    """Some samples have their new span in the log, others not yet; none has a token of it."""
    left = nth

    def die(name: str) -> None:
        nonlocal left
        left -= name == "rollout.span"
        if left == 0 and name == "rollout.span":
            raise Died

    engine = Counting()
    fault_points.observe(die)
    try:
        with pytest.raises(Died):
            roll(shelf, engine=engine, rollout=SPAN, published=after(engine, 12))
    finally:
        fault_points.observe(None)
    again = Counting()
    again.load_policy(Path(), 3)
    report = roll(shelf, engine=again, rollout=SPAN, published=after(again, 0))
    assert report.weight_changes == 0
    mixed = [sample for sample in shelf.samples.values() if len(sample.versions) > 1]
    assert mixed
    for sample in mixed:
        assert (np.diff(sample.version_starts) > 0).all()
        assert sample.tokens[sample.prompt_len :].tolist() == continued(sample, 3, int(sample.version_starts[1]))


def test_a_policy_replaced_before_it_wrote_anything_leaves_no_span(roll: Roll, shelf: Any) -> None:
    """Killed after a change, resumed on a still newer version at the same token."""
    engine = Counting(dies_after=0)
    with pytest.raises(Died):
        roll(shelf, engine=engine, rollout=SPAN, published=after(engine, 12))
    newer = Counting()
    newer.load_policy(Path(), 5)
    roll(shelf, engine=newer, rollout=SPAN)
    for sample in shelf.samples.values():
        assert (np.diff(sample.version_starts) > 0).all()
        assert sample.version_starts[0] == 0
    assert {tuple(sample.versions.tolist()) for sample in shelf.samples.values()} == {(0,), (0, 5), (5,)}


def test_a_pinned_policy_that_is_gone_after_a_live_change_is_named(roll: Roll, shelf: Any, tmp_path: Path) -> None:
    engine = Counting(dies_after=5)
    with pytest.raises(Died):
        roll(shelf, engine=engine, rollout=PIN, published=after(engine, 4))
    assert engine.policy_version == 3
    newest = Counting()
    newest.load_policy(Path(), 6)
    with pytest.raises(MismatchError, match="begun by policy version 3, the engine has 6"):
        roll(shelf, engine=newest, policies=lambda version: tmp_path / "gone")


@pytest.fixture(scope="module")
def second_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "second"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(5)
    changed = {name: value + 0.02 * torch.randn(value.shape, generator=draw) for name, value in weights.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    write_checksums(folder, identities=True)
    return folder


def test_the_new_weights_never_read_keys_of_the_old(
    roll: Roll, shelf: Any, tiny_model: Path, second_model: Path
) -> None:
    """Log-probs behind a span are those of the new model alone, over the whole text; before it, of the old one."""
    engine = HfEngine(tiny_model, slots=8)
    steps = 0
    stepped = engine.step

    def step() -> StepOutput:
        nonlocal steps
        steps += 1
        return stepped()

    engine.step = step  # type: ignore[method-assign]
    roll(
        shelf, engine=engine, rollout=SPAN, render=lambda prompt: engine.tokenizer.encode(prompt.text),
        published=lambda: (1, second_model) if steps >= 12 else (0, tiny_model),
    )  # fmt: skip
    models = {
        0: HfEngine(tiny_model, slots=1)._decoders[0].model,
        1: HfEngine(second_model, slots=1)._decoders[0].model,
    }
    mixed = [sample for sample in shelf.samples.values() if len(sample.versions) > 1]
    assert mixed
    for sample in mixed:
        cut = int(sample.version_starts[1])
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        for version, part in ((0, slice(0, cut)), (1, slice(cut, None))):
            with torch.no_grad():
                logits = models[version](ids).logits[0, sample.prompt_len - 1 : -1]
            picked = logits.log_softmax(-1).gather(1, ids[0, sample.prompt_len :, None])[:, 0]
            np.testing.assert_allclose(sample.logprobs[part], picked.numpy()[part], atol=2e-5)
