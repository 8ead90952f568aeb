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

from mopd_dataplane.errors import EngineError
from mopd_dataplane.job.job import Job
from mopd_dataplane.job.sections import Student
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
        assert level == 2
        self.on_device, self.weights = set(), None

    def wake_up(self, tags: list[str]) -> None:
        self.on_device |= set(tags)

    def collective_rpc(self, name: str, kwargs: dict[str, str]) -> None:
        assert name == "reload_weights"
        assert "weights" in self.on_device, "there is no room for them"
        self.weights = weights_digest(kwargs["weights_path"])

    def reset_prefix_cache(self) -> bool:
        return "kv_cache" in self.on_device


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    found: list[Core] = []

    def start(folder: Path, arguments: dict[str, Any], *, threads: int) -> Core:
        found.append(Core(folder, arguments))
        return found[-1]

    monkeypatch.setattr(vllm, "start", start)
    monkeypatch.setattr(vllm, "require_vllm", lambda: None)
    return found


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
