"""The vLLM engine beside the Hugging Face engine: the same tokens, and what interrupts it leaves no mark."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from decoding import TOLERANCE, Shelf, assert_same, decode, make_requests
from safetensors.torch import load_file, save_file

from mopd_dataplane.base.file_checksums import CHECKSUMS
from mopd_dataplane.errors import EngineError, InputError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.records import Prompt
from mopd_dataplane.rollout.engines.engine import STOP, Request, StepOutput
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.vllm import VllmEngine
from mopd_dataplane.rollout.runner import RolloutReport, RolloutTask, run_rollout

CUT: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}


@pytest.mark.parametrize("settings", [{}, CUT, {"temperature": 0.0}], ids=["plain", "cut", "greedy"])
def test_tokens_and_logprobs_are_those_of_the_hugging_face_engine(
    keyed: VllmEngine, models: tuple[Path, Path], settings: dict[str, Any]
) -> None:
    requests = make_requests(24, **settings)
    assert_same(decode(keyed, requests), decode(HfEngine(models[0], slots=3), requests))


@pytest.mark.parametrize("settings", [{}, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize("prefix_len", [1, 7, 29])
def test_a_prefix_continues_as_if_never_interrupted(
    keyed: VllmEngine, prefix_len: int, settings: dict[str, Any]
) -> None:
    requests = make_requests(12, **settings)
    whole = decode(keyed, requests)
    tried = 0
    for request in requests:
        tokens, logprobs, _ = whole[request.uid]
        if len(tokens) <= prefix_len:
            continue
        tried += 1
        prefix = np.array(tokens[:prefix_len], np.int32)
        resumed = Request(
            uid=request.uid, prompt_ids=request.prompt_ids, prefix_ids=prefix, key=request.key, max_new_tokens=30,
            **settings,
        )  # fmt: skip
        rescored = keyed.admit([(3, resumed)])[3]
        np.testing.assert_allclose(rescored, logprobs[max(0, prefix_len - 16) : prefix_len], atol=TOLERANCE)
        output = keyed.step()
        assert (output.slots.tolist(), output.positions.tolist()) == ([3], [prefix_len])
        assert output.token_ids.tolist() == [tokens[prefix_len]]
        keyed.release(3)
    assert tried > 3


def test_a_prefix_may_hold_what_ends_a_turn(keyed: VllmEngine) -> None:
    """After a tool's answer the prefix holds an end-of-sequence token and text that nobody sampled."""
    request = make_requests(1)[0]
    prefix = np.array([40, 41, keyed.tokenizer.eos_token_id, 50, 51], np.int32)
    resumed = Request(uid="turn", prompt_ids=request.prompt_ids, prefix_ids=prefix, key=request.key, max_new_tokens=12)
    assert len(keyed.admit([(0, resumed)])[0]) == 5
    positions = []
    while len(positions) < 7:
        output = keyed.step()
        positions += output.positions.tolist()
        if output.finished.any():
            break
    assert positions == list(range(5, 5 + len(positions)))
    keyed.release(0)


def test_stop_strings_end_a_sample_wherever_they_fall(keyed: VllmEngine) -> None:
    plain = decode(keyed, make_requests(16))
    text = {uid: keyed.tokenizer.decode(tokens) for uid, (tokens, _, _) in plain.items()}
    uid = next(uid for uid, answer in text.items() if len(answer) > 12)
    stop = text[uid][7:9]
    answers = decode(keyed, make_requests(16, stop=(stop, "never")))
    cut = text[uid].index(stop) + len(stop)
    assert keyed.tokenizer.decode(answers[uid][0]) == text[uid][:cut]
    assert answers[uid][2] == STOP
    untouched = [other for other, answer in text.items() if stop not in answer]
    assert all(answers[other][0] == plain[other][0] for other in untouched)


def test_new_weights_never_read_a_prefix_that_the_old_ones_cached(keyed: VllmEngine, models: tuple[Path, Path]) -> None:
    """Prompts fill several cache blocks, and each has been read twice by the first version."""
    requests = [
        request for request in make_requests(24, longest=400, max_new_tokens=8) if len(request.prompt_ids) > 280
    ]
    assert len(requests) > 3
    first = decode(keyed, requests)
    assert_same(decode(keyed, requests), first)
    keyed.load_policy(models[1], 1)
    try:
        assert (keyed.policy_version, keyed.policy_digest) == (1, HfEngine(models[1], slots=1).policy_digest)
        assert_same(decode(keyed, requests), decode(HfEngine(models[1], slots=4), requests))
    finally:
        keyed.load_policy(models[0], 0)
    assert_same(decode(keyed, requests), first)


def test_a_policy_is_swapped_only_when_every_slot_is_free(keyed: VllmEngine, models: tuple[Path, Path]) -> None:
    keyed.admit([(0, make_requests(1)[0])])
    with pytest.raises(EngineError, match="still live"):
        keyed.load_policy(models[1], 1)
    keyed.release(0)


def test_a_model_of_another_shape_is_refused_and_changes_nothing(
    keyed: VllmEngine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(models[1], other)
    (other / CHECKSUMS).unlink()
    shape = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 3}))
    with pytest.raises(MismatchError, match="num_hidden_layers"):
        keyed.load_policy(other, 1)
    assert keyed.policy_version == 0


def test_garbage_weights_are_an_error(keyed: VllmEngine, models: tuple[Path, Path], tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    shutil.copytree(models[0], sick)
    (sick / CHECKSUMS).unlink()
    weights = load_file(sick / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_file(weights, sick / "model.safetensors", metadata={"format": "pt"})
    keyed.load_policy(sick, 9)
    try:
        keyed.admit([(0, make_requests(1)[0])])
        with pytest.raises(EngineError, match="policy version 9 gives non-finite logits"):
            keyed.step()
    finally:
        keyed.release(0)
        keyed.load_policy(models[0], 0)


def test_an_option_that_vllm_does_not_know_is_named(models: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="tensor_paralel_size"):
        VllmEngine(models[0], slots=1, options={"tensor_paralel_size": 2})


class Doomed(VllmEngine):
    """Its vLLM process is killed before the n-th step."""

    left = 12

    def step(self) -> StepOutput:
        self.left -= 1
        if self.left == 0:
            os.kill(self.process.pid, signal.SIGKILL)
        return super().step()

    @property
    def process(self) -> psutil.Process:
        """vLLM's core."""
        return psutil.Process(self._engine.engine_core.resources.engine_manager.processes[0].pid)


def roll(engine: VllmEngine, shelf: Shelf, home: Path) -> RolloutReport:
    """16 prompts with a group of two, of up to 40 tokens."""
    prompts = [Prompt(prompt_id=f"p{i}", domain="sums", text=f"{i} + {7 * i} =") for i in range(16)]
    return run_rollout(
        engine,
        prompts,
        RolloutTask(
            stage="student",
            iteration=0,
            seed=0,
            rollout=sections.Rollout(max_new_tokens=40, group_size=2),
            wal=sections.Wal(),
            wal_dir=home,
            render=lambda prompt: engine.tokenizer.encode(prompt.text),
        ),
        commit=shelf.commit,
        skip_uids=set(shelf.samples),
    )


def test_a_killed_vllm_process_costs_no_token(keyed: VllmEngine, models: tuple[Path, Path], tmp_path: Path) -> None:
    whole, shelf = Shelf(), Shelf()
    assert roll(keyed, whole, tmp_path / "whole").resumed == 0
    doomed = Doomed(models[0], slots=8, threads=1)
    family = [doomed.process, *doomed.process.children(recursive=True)]
    with pytest.raises(EngineError, match="run again to continue with a new engine"):
        roll(doomed, shelf, tmp_path / "log")
    doomed.close()
    assert len(shelf.samples) < len(whole.samples)
    report = roll(keyed, shelf, tmp_path / "log")
    assert report.resumed == 8
    assert report.max_drift < TOLERANCE
    samples = shelf.samples
    assert samples.keys() == whole.samples.keys()
    for uid, sample in samples.items():
        np.testing.assert_array_equal(sample.tokens, whole.samples[uid].tokens)
        np.testing.assert_allclose(sample.logprobs, whole.samples[uid].logprobs, atol=TOLERANCE)
        assert sample.resume == ("none" if not sample.interruptions else sample.resume)
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, f"left behind: {alive}"
    assert len(gone) == len(family)
