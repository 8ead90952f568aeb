"""Policies that are adapters, as LoRA requests of a vLLM whose base is read once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from decoding import TOLERANCE, Shelf, assert_same, decode, make_requests
from peft_adapters import write_adapter

from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.job import sections
from mopd_dataplane.models.hf import load_merged, save_policy
from mopd_dataplane.models.vllm_adapters import RANKS
from mopd_dataplane.records import Prompt, Sample
from mopd_dataplane.rollout.engines.engine import Engine, Request, StepOutput
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.sampling import sample_key
from mopd_dataplane.rollout.engines.vllm import VllmEngine
from mopd_dataplane.rollout.runner import RolloutReport, RolloutTask, run_rollout


class Counted(VllmEngine):
    """It counts its steps."""

    steps = 0

    def step(self) -> StepOutput:
        self.steps += 1
        return super().step()


@pytest.fixture(scope="module")
def lora(models: tuple[Path, Path]) -> Iterator[Counted]:
    """vLLM on the first version, as a stage starts that trains an adapter of rank 8."""
    with closing(Counted(models[0], slots=6, threads=1, adapter=sections.Lora(r=8))) as engine:
        yield engine


@pytest.fixture(scope="module")
def merged(adapters: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The adapters as whole models."""
    home = tmp_path_factory.mktemp("merged")
    for number, folder in enumerate(adapters):
        save_policy(load_merged(folder), folder, home / str(number))
    return home / "0", home / "1"


def test_the_ranks_are_those_of_vllm() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == RANKS


def test_every_version_says_what_its_merged_model_says_and_the_base_stays(
    lora: Counted, models: tuple[Path, Path], adapters: tuple[Path, Path], merged: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Prompts fill several cache blocks, and each is read by every version."""
    longer = make_requests(24, longest=400, max_new_tokens=8, top_k=20)
    long = [replace(request, uid=f"long{request.uid}") for request in longer if len(request.prompt_ids) > 280]
    assert len(long) > 3
    requests = [*make_requests(8), *long]
    methods: list[str] = []
    remote = lora._engine.collective_rpc
    monkeypatch.setattr(
        lora._engine, "collective_rpc", lambda method, **kwargs: [methods.append(method), remote(method, **kwargs)][1]
    )
    process = psutil.Process(lora._engine.engine_core.resources.engine_manager.processes[0].pid)
    wholes = (models[0], *merged)
    expected = [decode(HfEngine(folder, slots=6), requests) for folder in wholes]
    assert len({str(answers) for answers in expected}) == 3, "the adapters change what the base says"
    for version in (0, 1, 2, 0, 1):
        folder = (models[0], *adapters)[version]
        lora.load_policy(folder, version)
        assert lora.policy_digest == HfEngine(folder, slots=1).policy_digest
        assert_same(decode(lora, requests), expected[version])
        assert list(lora._engine.list_loras()) == ([lora._request.lora_int_id] if version else [])
    assert set(methods) == {"unreached"}, "no weights were read but the adapters'"
    assert process.is_running()


def test_a_prefix_continues_with_the_adapter_as_if_never_interrupted(
    lora: Counted, adapters: tuple[Path, Path]
) -> None:
    lora.load_policy(adapters[1], 1)
    requests = make_requests(12)
    whole = decode(lora, requests)
    request = next(request for request in requests if len(whole[request.uid][0]) > 24)
    tokens, logprobs, _ = whole[request.uid]
    prefix = np.array(tokens[:20], np.int32)
    resumed = Request(uid="again", prompt_ids=request.prompt_ids, prefix_ids=prefix, key=request.key, max_new_tokens=30)
    np.testing.assert_allclose(lora.admit([(2, resumed)])[2], logprobs[4:20], atol=TOLERANCE)
    assert lora.step().token_ids.tolist() == [tokens[20]]
    lora.release(2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora = true"),
        ({"r": 16}, r"rank 16.*room for 8"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
    ],
    ids=["dora", "rank", "target"],
)
def test_what_vllm_cannot_apply_is_refused_and_the_policy_stays(
    lora: Counted, models: tuple[Path, Path], adapters: tuple[Path, Path], tmp_path: Path, settings: dict[str, Any],
    said: str,
) -> None:  # fmt: skip
    lora.load_policy(adapters[0], 1)
    before = decode(lora, make_requests(4))
    odd = write_adapter(models[0], tmp_path / "odd", **settings)
    with pytest.raises(MismatchError, match=said):
        lora.load_policy(odd, 2)
    assert lora.policy_version == 1
    assert_same(decode(lora, make_requests(4)), before)


def test_another_base_and_an_engine_without_room_are_refused(
    lora: Counted, keyed: VllmEngine, models: tuple[Path, Path], adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(MismatchError, match="needs the base"):
        lora.load_policy(models[1], 3)
    with pytest.raises(MismatchError, match="needs the base"):
        lora.load_policy(write_adapter(models[1], tmp_path / "other"), 3)
    with pytest.raises(MismatchError, match="started for none"):
        keyed.load_policy(adapters[0], 1)


def test_an_adapter_that_vllm_would_leave_out_in_part_is_refused(adapters: tuple[Path, Path]) -> None:
    """The options win over what the adapter needs; vLLM itself says nothing."""
    with pytest.raises(MismatchError, match=r"vLLM adapts none of .*lora_target_modules"):
        VllmEngine(adapters[0], slots=1, threads=1, options={"lora_target_modules": ["q_proj", "v_proj"]})


PROMPTS = [Prompt(prompt_id=f"p{i}", domain="sums", text=f"{i} + {7 * i} =") for i in range(16)]


def roll(engine: Engine, shelf: Shelf, home: Path, *, change: str = "pin", **options: Any) -> RolloutReport:
    """16 samples of up to 40 tokens."""
    encode = engine.tokenizer.encode  # type: ignore[attr-defined]
    task = RolloutTask(
        stage="student", iteration=0, seed=0, wal=sections.Wal(), wal_dir=home,
        rollout=sections.Rollout(max_new_tokens=40, weight_change=change), render=lambda prompt: encode(prompt.text),
    )  # fmt: skip
    return run_rollout(engine, PROMPTS, task, commit=shelf.commit, skip_uids=set(shelf.samples), **options)


def continued(sample: Sample, reference: HfEngine, start: int) -> list[int]:
    """What a policy writes behind the first `start` response tokens."""
    response = sample.tokens[sample.prompt_len :][:start]
    request = Request(
        uid="c", prompt_ids=sample.tokens[: sample.prompt_len], prefix_ids=np.array(response, np.int32),
        key=sample_key(sample.uid), max_new_tokens=40,
    )  # fmt: skip
    reference.admit([(0, request)])
    said = response.tolist()
    while True:
        output = reference.step()
        said.append(int(output.token_ids[0]))
        if output.finished[0]:
            return said


@pytest.mark.parametrize("change", ["pin", "span"])
def test_an_adapter_that_is_published_during_a_rollout_is_taken_up(
    lora: Counted, models: tuple[Path, Path], adapters: tuple[Path, Path], tmp_path: Path, change: str
) -> None:
    """The first policy is the base itself, as in every stage that trains an adapter."""
    lora.load_policy(models[0], 0)
    lora.steps = 0
    shelf = Shelf()
    folders = {0: models[0], 1: adapters[0]}
    newest = lambda: (1, adapters[0]) if lora.steps >= 16 else (0, models[0])  # noqa: E731
    report = roll(lora, shelf, tmp_path, change=change, published=newest, policies=folders.get)
    assert report.weight_changes == 1
    references = {version: HfEngine(folder, slots=1) for version, folder in folders.items()}
    assert len(shelf.samples) == len(PROMPTS)
    assert {int(sample.versions[-1]) for sample in shelf.samples.values()} == {0, 1}
    spans = [len(sample.versions) for sample in shelf.samples.values()]
    assert max(spans) == (1 if change == "pin" else 2)
    for sample in shelf.samples.values():
        response = sample.tokens[sample.prompt_len :].tolist()
        first, last = int(sample.versions[0]), int(sample.versions[-1])
        start = int(sample.version_starts[-1])
        assert continued(sample, references[first], 0)[:start] == response[:start]
        assert continued(sample, references[last], start) == response


class Doomed(Counted):
    """Its vLLM process is killed before its twelfth step."""

    def step(self) -> StepOutput:
        if self.steps == 11:
            psutil.Process(self._engine.engine_core.resources.engine_manager.processes[0].pid).kill()
        return super().step()


def test_a_killed_vllm_costs_no_token_of_an_adapter(lora: Counted, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    """The second engine holds another adapter when the log is found; pinned samples bring theirs back."""
    whole, shelf = Shelf(), Shelf()
    lora.load_policy(adapters[0], 1)
    roll(lora, whole, tmp_path / "whole")
    doomed = Doomed(adapters[0], slots=6, policy_version=1, threads=1)
    with closing(doomed), pytest.raises(EngineError, match="run again to continue with a new engine"):
        roll(doomed, shelf, tmp_path / "log")
    begun = len(shelf.samples)
    lora.load_policy(adapters[1], 2)
    report = roll(lora, shelf, tmp_path / "log", policies=dict(enumerate((Path(), *adapters))).get)
    assert report.resumed == 6
    assert report.max_drift < TOLERANCE
    by_first = [sample for sample in shelf.samples.values() if sample.versions.tolist() == [1]]
    assert len(by_first) == begun + 6
    for sample in by_first:
        np.testing.assert_array_equal(sample.tokens, whole.samples[sample.uid].tokens)
        np.testing.assert_allclose(sample.logprobs, whole.samples[sample.uid].logprobs, atol=TOLERANCE)
    reference = HfEngine(adapters[1], slots=1)
    for sample in shelf.samples.values():
        if sample.versions.tolist() == [2]:
            assert continued(sample, reference, 0) == sample.tokens[sample.prompt_len :].tolist()
