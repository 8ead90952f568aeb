"""Signals of teachers reach the trajectories that they are of, in a real controller of TransferQueue, and no others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from advice import advises
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import TransferQueueClient
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.controller import TransferQueueController
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl_puts import trajectory

from mopd_dataplane import Store, open_store
from mopd_dataplane.base import fault_points
from mopd_dataplane.errors import InputError, MismatchError
from mopd_dataplane.interchange.queue_mapping import uid_of
from mopd_dataplane.job.load import load_job
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.run.pipeline import score_stage
from mopd_dataplane.store.queue.opening import open_queue
from mopd_dataplane.store.queue.values import Write
from mopd_dataplane.transferqueue import backend, teacher_fields
from mopd_dataplane.transferqueue.teacher_fields import RunningQueue, TeacherFields, read_queue_mapping

KEYS = ["a", "b", "c"]
JOB = """
name = "beside-verl"
store = "{store}"

[student]
path = "{model}"

[domains.sums]
source = "store"

[teachers.tutor]
source = "student"

[routing]
sums = "tutor"

[plan]
pack_tokens = 256
batch_samples = 4

[eval]
every = 0

[objectives.exact]
divergence = {{ kind = "reverse" }}

[objectives.likeliest]
policy_gradient = {{ baseline = "topk" }}

[[stages]]
name = "train"
data = "stored"
objective = "exact"
score = {{ topk = 3, hidden_codec = "fp32" }}
"""


class Framework:
    """A framework that puts into a store through TransferQueue's own client, and a controller in this process."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.model = folder / "model"
        tokenizer = character_tokenizer()
        tokenizer.save_pretrained(self.model)
        section = {"store": str(self.store), "queue": "verl", "mapping": "verl", "tokenizer": str(self.model)}
        self.config = OmegaConf.create({"backend": {"storage_backend": "MopdStore", "MopdStore": section}})
        backend.initialize(OmegaConf.create({"backend": {"MopdStore": section}}))
        self.controller = TransferQueueController.__ray_metadata__.modified_class(polling_mode=True)
        self.client = TransferQueueClient("framework", self.controller.zmq_server_info)
        self.client.initialize_storage_manager("MopdStore", section)

    def put(self, keys: list[str], first: int = 0, partition: str = "train") -> Any:
        """Put trajectories under keys; returns their metadata."""
        contents = [trajectory(first + number, data_source="sums") for number in range(len(keys))]
        meta = self.client.kv_retrieve_meta(keys=keys, partition_id=partition, create=True)
        meta.update_custom_meta([{"status": "success", "step": first}] * len(keys))
        return self.client.put(batch_of(contents), meta)

    def meta(self, keys: list[str], partition: str = "train") -> Any:
        return self.client.kv_retrieve_meta(keys=keys, partition_id=partition, create=False)

    def clear(self, keys: list[str]) -> None:
        self.client.clear_samples(self.meta(keys))

    def get(self, key: str, *names: str) -> dict[str, Any]:
        """The values of one key, of the writes that the controller names."""
        meta = self.meta([key])
        number, writes = meta.global_indexes[0], meta._custom_backend_meta[0]
        client = self.client.storage_manager.storage_client
        values = client.get(
            [f"{number}@{name}" for name in names], custom_backend_meta=[writes[name] for name in names]
        )
        return dict(zip(names, values, strict=True))

    @contextmanager
    def attached(self, *_: object) -> Iterator[RunningQueue]:
        """What `running_queue` gives, with the controller of this process."""
        teacher_fields.check_writes(self.controller)
        client = AsyncTransferQueueClient("scorer", self.controller.zmq_server_info)
        client.initialize_storage_manager("MopdStore", {"store": str(self.store), "queue": "verl"})
        running = RunningQueue(client, read_queue_mapping(self.store, "verl"), "verl", None)
        try:
            yield running
        finally:
            running.close()


def batch_of(contents: list[dict[str, Any]]) -> TensorDict:
    fields: dict[str, Any] = {}
    for name in contents[0]:
        values = [content[name] for content in contents]
        if isinstance(values[0], np.ndarray):
            tensors = [torch.from_numpy(value) for value in values]
            fields[name] = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
        else:
            fields[name] = NonTensorStack(*values)
    return TensorDict(fields, batch_size=len(contents))


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Framework]:
    monkeypatch.setattr(backend, "opened", lambda own: open_queue(own.store, own.queue, starts_folding=False))
    framework_run = Framework(tmp_path)
    yield framework_run
    framework_run.client.close()


def signal_of(own: teacher_fields.Trajectory, number: int, teacher: str = "tutor") -> TeacherFields:
    """A signal whose values say which trajectory it is of."""
    length = len(trajectory(number)["prompts"]) + len(trajectory(number)["responses"])
    logprobs = np.full((length, 1), -1.0 - number, np.float32)
    return TeacherFields(own, teacher, logprobs, np.full((length, 1), number, np.int32))


def value_of(framework: Framework, key: str) -> float:
    return float(framework.get(key, "teacher_logprobs")["teacher_logprobs"][0, 0])


def has_fields(framework: Framework, key: str) -> bool:
    return "teacher_logprobs" in framework.meta([key]).field_names


def test_a_signal_becomes_fields_of_its_trajectory_and_of_no_other(framework: Framework) -> None:
    framework.put(KEYS)
    framework.put(["elsewhere"], 7, "val")
    with framework.attached() as running:
        waiting = running.unscored("train")
        assert len(waiting) == len({one.uid for one in waiting}) == 3
        assert running.put([signal_of(one, number) for number, one in enumerate(waiting[:2])]) == 2
        assert [one.uid for one in running.unscored("train")] == [waiting[2].uid]
        assert len(running.unscored("val")) == 1
    assert [value_of(framework, key) for key in KEYS[:2]] == [-1.0, -2.0]
    got = framework.get("b", "teacher_logprobs", "teacher_ids", "teacher_name", "responses")
    assert got["teacher_logprobs"].shape == got["teacher_ids"].shape == (4 + len(got["responses"]), 1)
    assert (got["teacher_name"], got["teacher_logprobs"].dtype, got["teacher_ids"].dtype) == (
        "tutor", torch.float32, torch.int32,
    )  # fmt: skip
    assert not has_fields(framework, "c")
    assert framework.meta(KEYS).get_all_custom_meta() == [{"status": "success", "step": 0}] * 3


def test_the_uid_is_that_of_the_stored_sample(framework: Framework) -> None:
    framework.put(KEYS)
    with framework.attached() as running:
        running.fold()
        waiting = {one.uid for one in running.unscored("train")}
    assert set(open_store(str(framework.store)).samples(["uid"])["uid"].to_pylist()) == waiting


def test_a_cleared_trajectory_gets_nothing_and_is_not_made_anew(framework: Framework) -> None:
    framework.put(KEYS)
    with framework.attached() as running:
        waiting = running.unscored("train")
        framework.clear(["a"])
        assert running.put([signal_of(one, number) for number, one in enumerate(waiting)]) == 2
        present = framework.client.storage_manager.storage_client.queue.keys()
        assert not [name for number, name in present if number == waiting[0].number]
    assert framework.meta(["a"]).size == 0
    assert sorted(framework.client.kv_list("train")["train"]) == ["b", "c"]


def test_a_number_that_was_used_again_does_not_get_the_signal_of_another(framework: Framework) -> None:
    framework.put(KEYS)
    with framework.attached() as running:
        waiting = running.unscored("train")
        framework.clear(KEYS)
        framework.put(["x", "y", "z"], 10)
        new = running.unscored("train")
        assert sorted(one.number for one in new) == sorted(one.number for one in waiting)
        assert running.put([signal_of(one, number) for number, one in enumerate(waiting)]) == 0
        assert not any(has_fields(framework, key) for key in "xyz")
        assert running.put([signal_of(one, 10 + number) for number, one in enumerate(new)]) == 3
    assert [value_of(framework, key) for key in "xyz"] == [-11.0, -12.0, -13.0]


def test_a_clearing_during_the_put_wins(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the store and the controller a trajectory is cleared, and its number is used again."""
    framework.put(KEYS)
    with framework.attached() as running:
        waiting = running.unscored("train")
        put = running._queue.put

        def put_then_clear(*arguments: Any) -> Any:
            writes = put(*arguments)
            framework.clear(["a"])
            framework.put(["x"], 10)
            return writes

        monkeypatch.setattr(running._queue, "put", put_then_clear)
        assert running.put([signal_of(one, number) for number, one in enumerate(waiting)]) == 2
        monkeypatch.undo()
        assert not has_fields(framework, "x")
        (new,) = running.unscored("train")
        assert new.number == waiting[0].number
        assert running.put([signal_of(new, 10)]) == 1
    assert [value_of(framework, key) for key in "xbc"] == [-11.0, -2.0, -3.0]


def test_a_trajectory_that_is_being_cleared_is_refused(framework: Framework) -> None:
    meta = framework.put(KEYS)
    with framework.attached() as running:
        waiting = running.unscored("train")
        framework.controller.mark_clearing(meta.global_indexes[:1], meta.partition_ids[:1])
        assert running.put([signal_of(one, number) for number, one in enumerate(waiting)]) == 2


def test_fields_that_the_framework_put_are_left_alone(framework: Framework) -> None:
    meta = framework.put(["a"])
    own = TensorDict({"teacher_logprobs": torch.full((1, 7, 1), -9.0)}, batch_size=1)
    framework.client.put(own, meta)
    with framework.attached() as running:
        assert running.unscored("train") == []
    assert value_of(framework, "a") == -9.0


@pytest.fixture
def job(framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose teacher is a random model, which scores the framework's trajectories."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(character_tokenizer()), num_hidden_layers=1, hidden_size=32, intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=128, eos_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(framework.model)
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(store=framework.store, model=framework.model))
    monkeypatch.setattr(teacher_fields, "running_queue", framework.attached)
    return file


def score(job: Path, framework: Framework, **changes: str) -> dict[str, Any]:
    """One round of `mopd score --queue`: the rollouts have ended."""
    loaded = load_job(str(job), overrides=[f"{key}={value}" for key, value in changes.items()])
    store = Store.create(str(framework.store))
    store.add_event("rollout_end/train", "train", "rollout_end", -1, None, {})
    return score_stage(loaded, loaded.stage("train"), queue="verl")


def test_teachers_score_what_runs_and_the_trainer_reads_it(framework: Framework, job: Path) -> None:
    framework.put(KEYS)
    told = score(job, framework)
    assert (told["signals"], told["put"]) == (6, 3)  # log-probs and hidden states of each
    store = open_store(str(framework.store))
    names = ("teacher_logprobs", "teacher_ids", "teacher_hidden", "prompts", "responses", "response_mask")
    for key in KEYS:
        got, row = framework.get(key, *names), row_of(framework, store, key)
        (stored,) = store.read_signal("tutor", "logprob", [row])
        begin = len(got["prompts"]) - 1
        np.testing.assert_array_equal(got["teacher_logprobs"][begin:-1, 0], stored)
        assert not got["teacher_logprobs"][:begin].any()
        tokens = torch.cat([got["prompts"], got["responses"]])
        np.testing.assert_array_equal(got["teacher_ids"][:-1, 0], tokens[1:])
        (encoded,) = store.read_signal("tutor", "hidden", [row])
        mask = got["response_mask"].bool()
        np.testing.assert_array_equal(got["teacher_hidden"][mask], encoded.view(np.float32))
        assert not got["teacher_hidden"][~mask].any()


def row_of(framework: Framework, store: Store, key: str) -> int:
    """The row of the sample of a key."""
    meta = framework.meta([key])
    uid = uid_of("verl", meta.global_indexes[0], Write.parse(meta._custom_backend_meta[0]["responses"]))
    return int(store.samples(["uid"])["uid"].to_pylist().index(uid))


def test_the_likeliest_tokens_are_fields_too(framework: Framework, job: Path) -> None:
    framework.put(["a"])
    told = score(job, framework, **{"stages.train.objective": '"likeliest"'})
    assert told["put"] == 1
    got = framework.get("a", "teacher_logprobs", "teacher_ids", "response_mask")
    ((ids, logprobs),) = open_store(str(framework.store)).read_signal("tutor", "topk", [0])
    trained = torch.nonzero(got["response_mask"])[:, 0] + 3
    assert got["teacher_ids"].shape[1] == 3
    np.testing.assert_array_equal(got["teacher_ids"][trained], ids)
    np.testing.assert_array_equal(got["teacher_logprobs"][trained], logprobs)


def test_what_the_store_put_is_not_recorded_again(
    framework: Framework, job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    framework.put(KEYS)
    score(job, framework)
    before = open_store(str(framework.store)).sql("select * from scores order by all").to_pylist()
    framework.client.storage_manager.storage_client.queue.fold()
    store = open_store(str(framework.store))
    assert store.sql("select * from scores order by all").to_pylist() == before
    assert [*store.teachers()] == ["tutor"]
    assert store.sql("select detail from events where kind = 'unrecorded'").to_pylist() == []
    assert "was not recorded" not in capfd.readouterr().err


class Killed(BaseException):
    """Ends the process in a test."""


def test_a_kill_between_score_and_put_scores_and_puts_nothing_twice(framework: Framework, job: Path) -> None:
    framework.put(KEYS)

    def kill(name: str) -> None:
        if name == "queue.signals.scored":
            raise Killed

    fault_points.observe(kill)
    try:
        with pytest.raises(Killed):
            score(job, framework)
    finally:
        fault_points.observe(None)
    assert not any(has_fields(framework, key) for key in KEYS)
    again = score(job, framework)
    assert (again["signals"], again["put"]) == (0, 3)
    written = [framework.meta([key])._custom_backend_meta[0]["teacher_logprobs"] for key in KEYS]
    third = score(job, framework)
    assert (third["signals"], third["put"]) == (0, 0)
    assert [framework.meta([key])._custom_backend_meta[0]["teacher_logprobs"] for key in KEYS] == written


def test_stale_metadata_does_not_read_the_fields_of_another(framework: Framework) -> None:
    framework.put(["a"])
    with framework.attached() as running:
        running.put([signal_of(one, 0) for one in running.unscored("train")])
        old = framework.meta(["a"])
        framework.clear(["a"])
        framework.put(["x"], 1)
        running.put([signal_of(one, 1) for one in running.unscored("train")])
    client, write = framework.client.storage_manager.storage_client, old._custom_backend_meta[0]["teacher_logprobs"]
    with pytest.raises(MismatchError, match="used the number again"):
        client.get([f"{old.global_indexes[0]}@teacher_logprobs"], custom_backend_meta=[write])


def test_its_module_loads_no_lance() -> None:
    code = "import sys, mopd_dataplane.transferqueue.teacher_fields; assert 'lance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_queue_that_cannot_be_scored_is_named(framework: Framework, job: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no queue 'verll'; known: verl; did you mean 'verl'"):
        read_queue_mapping(framework.store, "verll")
    open_queue(str(framework.store), "plain", starts_folding=False)
    with advises(" has no mapping, so none of its values is a sample; set backend."):
        read_queue_mapping(framework.store, "plain")
    section = {"store": str(framework.store), "queue": "plain", "tokenizer": str(framework.model)}
    own = {"prompt": "p", "response": "r"}
    backend.initialize(OmegaConf.create({"backend": {"MopdStore": section | {"mapping": own}}}))
    with advises(" as the mapping 'verl' has them, and start the framework again"):
        read_queue_mapping(framework.store, "plain")
    own |= {"teacher_logprobs": "t", "teacher_ids": "i", "teacher": "n"}
    backend.initialize(OmegaConf.create({"backend": {"MopdStore": section | {"mapping": own}}}))
    assert read_queue_mapping(framework.store, "plain").teacher == "n"
    check = teacher_fields._check_backend
    check(framework.config, framework.store, "verl")
    with pytest.raises(InputError, match=r"keeps its values in queue 'verl' of .*, not in queue 'plain'"):
        check(framework.config, framework.store, "plain")
    with pytest.raises(InputError, match="not in queue 'verl' of /elsewhere"):
        check(framework.config, Path("/elsewhere"), "verl")
    framework.config.backend.MopdStore.store = "../x/store"
    check(framework.config, Path("/y/x/store"), "verl")
    framework.config.backend.storage_backend = "SimpleStorage"
    with pytest.raises(InputError, match="keeps its values in SimpleStorage, not in a store"):
        check(framework.config, framework.store, "verl")
