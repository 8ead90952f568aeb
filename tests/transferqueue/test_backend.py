"""A real TransferQueue over a store: what was put outlives every process of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from advice import advises
from omegaconf import OmegaConf

from mopd_dataplane.errors import InputError, MismatchError, UnknownNameError
from mopd_dataplane.models.initial_weights import character_tokenizer
from mopd_dataplane.transferqueue import MopdStorageClient
from mopd_dataplane.transferqueue.backend import initialize

START = """
import os, signal, sys
import ray, torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
import mopd_dataplane.transferqueue
import transfer_queue as tq

ray.init(address="local", num_cpus=2, include_dashboard=False)
tq.init(OmegaConf.create({
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": "MopdStore", "MopdStore": {"store": sys.argv[1], "queue": "train"}},
}))
"""
PUT = """
rows = [torch.arange(3), torch.arange(5), torch.arange(1)]
data = TensorDict({
    "tokens": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
    "logprobs": torch.tensor([[0.5], [0.25], [1.0]]),
    "text": NonTensorStack("a", "b", "c"),
}, batch_size=3)

@ray.remote
def put():
    # A process that has imported nothing of ours: the configuration brings the backend.
    tq.init()
    tq.kv_batch_put(keys=["x", "y", "z"], partition_id="train", fields=data)
    return sorted(name for name in sys.modules if name.startswith("mopd_dataplane.transferqueue"))

assert ray.get(put.remote(), timeout=120)
tq.save_checkpoint(sys.argv[2])
tq.kv_clear(keys=["y"], partition_id="train")
print("saved", flush=True)
signal.pause()
"""
GET = """
tq.load_checkpoint(sys.argv[2])
found = tq.kv_batch_get(keys=["x", "y", "z"], partition_id="train", select_fields=["tokens", "logprobs", "text"])
tokens, logprobs = ([row.tolist() for row in found[name].unbind()] for name in ("tokens", "logprobs"))
print(tokens, sum(logprobs, []), list(found["text"]))
tq.close()
"""


def start(code: str, *arguments: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(START + code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_values_and_checkpoint_outlive_every_process(tmp_path: Path) -> None:
    writer = start(PUT, tmp_path / "store", tmp_path / "checkpoint")
    assert writer.stdout is not None
    lines = iter(writer.stdout.readline, "")
    assert any("saved" in line for line in lines), "the writer ended early"
    os.killpg(writer.pid, signal.SIGKILL)
    writer.wait(30)
    reader = start(GET, tmp_path / "store", tmp_path / "checkpoint")
    out, _ = reader.communicate(timeout=300)
    assert reader.returncode == 0
    assert "[[0, 1, 2], [0, 1, 2, 3, 4], [0]] [0.5, 0.25, 1.0] ['a', 'b', 'c']" in out


def test_the_client_keeps_transferqueues_contract(tmp_path: Path) -> None:
    client = MopdStorageClient({"store": str(tmp_path), "queue": "train"})
    client.put(["1@x", "2@x", "1@y@z"], [torch.ones(2), None, {"a": (1, 2)}])
    client.put(["2@x"], ["again"])
    assert client.get(["2@x", "1@y@z"]) == ["again", {"a": (1, 2)}]
    assert torch.equal(MopdStorageClient({"store": str(tmp_path), "queue": "train"}).get(["1@x"])[0], torch.ones(2))
    client.clear(["1@x", "7@x"])
    with pytest.raises(UnknownNameError, match=r"sample 1 has no field 'x'"):
        client.get(["1@x"])
    with advises(" values; give one value a key"):
        client.put(["1@x", "2@x"], [1])
    client.put(["1@x", "2@x"], [1, 1])
    with pytest.raises(InputError, match=r"keys must be a list, found str"):
        client.get("1@x")  # type: ignore[arg-type]


def test_metadata_of_a_number_that_was_used_again_gets_and_clears_nothing(tmp_path: Path) -> None:
    client = MopdStorageClient({"store": str(tmp_path), "queue": "train"})
    old = client.put(["1@x"], ["old"])
    assert client.get(["1@x"], custom_backend_meta=old) == ["old"]
    client.clear(["1@x"], custom_backend_meta=old)
    new = client.put(["1@x"], ["new"])
    with pytest.raises(MismatchError, match=r"the framework used the number again"):
        client.get(["1@x"], custom_backend_meta=old)
    client.clear(["1@x"], custom_backend_meta=old)
    assert client.get(["1@x"], custom_backend_meta=new) == client.get(["1@x"], custom_backend_meta=[None]) == ["new"]


def test_a_mapping_needs_a_folder_and_a_tokenizer(tmp_path: Path) -> None:
    def begin(**section: Any) -> None:
        initialize(OmegaConf.create({"backend": {"MopdStore": section}}))

    with advises("; give a folder as store, or leave mapping out"):
        begin(store="s3://bucket/store", mapping="verl")
    with advises("mapping: give tokenizer, the folder or name of the model that samples"):
        begin(store=str(tmp_path / "store"), mapping="verl")
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    begin(store=str(tmp_path / "store"), mapping="verl", tokenizer=str(tmp_path / "tokenizer"))
    assert (tmp_path / "store" / "queue-logs" / "queue" / "rollouts.json").is_file()


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    with advises("; give `store`, the folder of the store"):
        MopdStorageClient({"stroe": str(tmp_path)})
    MopdStorageClient({"store": str(tmp_path)})
    MopdStorageClient({"store": str(tmp_path), "queue": "mine"})
