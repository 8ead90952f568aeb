"""vLLM between rollouts with `engine.keep = false`: it sleeps where its build can, and ends where it cannot.

vLLM's core is a stand-in that holds what a core holds; sleep mode itself exists on CUDA and ROCm only and never ran.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decoding import TINY
from peft_adapters import write_adapter

from mopd_dataplane.errors import EngineError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.sections import Lora, Student
from mopd_dataplane.models.hf import weights_digest
from mopd_dataplane.models.initial_weights import make_student
from mopd_dataplane.rollout.engines import vllm
from mopd_dataplane.rollout.engines.vllm import VllmEngine
from mopd_dataplane.run.open_engine import Engines


class Core:
    """What LLMEngine is asked for here; weights and cache are either on the device or not."""

    def __init__(self, folder: Path, arguments: dict[str, Any]) -> None:
        self.sleeps = bool(arguments.get("enable_sleep_mode"))
        self.weights: str | None = weights_digest(folder)
        self.on_device = {"weights", "kv_cache"}
        self.ended = False
        self.engine_core = SimpleNamespace(shutdown=lambda: setattr(self, "ended", True))

    def sleep(self, level: int) -> None:
        assert self.sleeps, "vLLM refuses unless it was started with enable_sleep_mode"
        self.on_device, self.weights = set(), None if level == 2 else self.weights

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.on_device |= set(tags or ("weights", "kv_cache"))

    def collective_rpc(self, name: str, kwargs: dict[str, str]) -> None:
        assert name == "reload_weights"
        assert "weights" in self.on_device, "there is no room for them"
        self.weights = weights_digest(kwargs["weights_path"])

    def reset_prefix_cache(self) -> bool:
        return "kv_cache" in self.on_device


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    cores: list[Core] = []

    def start(folder: Path, arguments: dict[str, Any], *, threads: int) -> Core:
        cores.append(Core(folder, arguments))
        return cores[-1]

    monkeypatch.setattr(vllm, "start", start)
    monkeypatch.setattr(vllm, "require_vllm", lambda: None)
    return cores


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("policies")
    return [make_student(Student(config=TINY), root / str(seed), seed=seed) for seed in range(2)]


def engines(keep: bool) -> Engines:
    job = {
        "name": "j", "store": "unused", "student": {"path": "unused"},
        "stages": [{"name": "s", "plan": {"batch_samples": 1}}],
        "domains": {"d": {"source": "store"}}, "engine": {"kind": "vllm", "slots": 2, "keep": keep},
    }  # fmt: skip
    return Engines(Job.model_validate_json(json.dumps(job)))


def test_it_sleeps_between_rollouts_and_wakes_with_the_next_policy(
    started: list[Core], policies: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "can_sleep", lambda: True)
    own = engines(keep=False)
    for version, folder in enumerate([*policies, policies[1]]):  # the last one again: sleeping has dropped it
        with own.use(folder, version) as engine:
            (core,) = started
            assert core.on_device == {"weights", "kv_cache"}
            assert core.weights == weights_digest(folder) == engine.policy_digest
        assert not core.on_device, "the device is free for scoring and training"
        assert not core.ended
    own.close()
    assert core.ended


def test_it_ends_where_its_build_cannot_sleep_and_stays_when_kept(
    started: list[Core], policies: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "can_sleep", lambda: False)
    own = engines(keep=False)
    for folder in policies:
        with own.use(folder, 0):
            assert not started[-1].ended
        assert started[-1].ended
    assert len(started) == 2
    with engines(keep=True).use(policies[0], 0):
        pass
    assert not started[-1].ended
    assert started[-1].on_device


def test_a_live_slot_keeps_it_awake(started: list[Core], policies: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "can_sleep", lambda: True)
    engine = VllmEngine(policies[0], slots=2, sleeps=True)
    monkeypatch.setattr(engine, "_require_free", lambda: (_ for _ in ()).throw(EngineError("1 slots are still live")))
    with pytest.raises(EngineError, match="still live"):
        engine.sleep()
    assert started[0].on_device


def test_a_base_of_adapters_is_kept_on_the_host_while_it_sleeps(
    started: list[Core], policies: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would bring it back: reload_weights leaves a base that is ready for adapters as it is."""
    digests: list[str] = []
    stand_in = SimpleNamespace(request=lambda folder, digest: digests.append(digest), keep_only=lambda digest: None)
    monkeypatch.setattr(vllm, "can_sleep", lambda: True)
    monkeypatch.setattr(vllm, "room_for", lambda *arguments, **more: {"enable_lora": True})
    monkeypatch.setattr(vllm, "VllmAdapters", lambda engine: stand_in)
    adapter = write_adapter(policies[0], tmp_path / "adapter")
    own, trained = engines(keep=False), Lora(r=4)
    for version, folder in enumerate((policies[0], adapter)):
        with own.use(folder, version, adapter=trained) as engine:
            (core,) = started
            assert core.on_device == {"weights", "kv_cache"}
            assert core.weights == weights_digest(policies[0])
            assert engine.policy_digest == weights_digest(folder)
        assert not core.on_device
    assert digests == [weights_digest(adapter)]
    with own.use(policies[1], 2):
        assert core.ended, "whole weights want a vLLM of their own"
        assert len(started) == 2
    with own.use(policies[1], 0, adapter=trained):
        assert len(started) == 3, "and the next stage one with room for its adapters"
    own.close()
