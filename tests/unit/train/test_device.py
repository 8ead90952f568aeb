"""A slot is given back only when the device has read it. CUDA is a stand-in: no GPU runs here."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from mopd_dataplane.train.microbatch import DeviceCopies, MicroBatch, build


class Event:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        self._log.append("copied")


class Stream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def record_event(self) -> Event:
        self._log.append(f"event on {self._name}")
        return Event(self._log)

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self._name} waits")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of CUDA, in order."""
    said: list[str] = []
    computing = Stream(said, "computing")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(said, "side"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(said.append(f"on {stream._name}")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: recorded_streams.append((tensor, stream._name))
    )
    monkeypatch.setattr(MicroBatch, "to", lambda micro, device: said.append("copy") or micro)
    recorded_streams: list[tuple[torch.Tensor, str]] = []
    monkeypatch.setattr(Stream, "kept", recorded_streams, raising=False)
    return said


def test_computation_waits_for_the_copy_and_the_host_only_when_asked(log, pack):
    copies = DeviceCopies(torch.device("cuda", 0))
    copies.finish()
    micro = build([pack([12, 7], seed=1)])
    micro.extra["of_a_plugin"] = torch.zeros(3)
    assert copies.to_device(micro) is micro
    assert log == ["on side", "copy", "event on side", "computing waits"]
    tensors = [value for value in vars(micro).values() if torch.is_tensor(value)] + [*micro.extra.values()]
    assert [id(tensor) for tensor, name in Stream.kept if name == "computing"] == [id(t) for t in tensors]
    copies.finish()
    assert log[-1] == "copied"


def test_a_cpu_copies_nothing_and_waits_for_nothing(pack):
    copies = DeviceCopies(torch.device("cpu"))
    micro = build([pack([12, 7], seed=1)])
    moved = copies.to_device(micro)
    copies.finish()
    tensors = [name for name, value in vars(micro).items() if torch.is_tensor(value)]
    assert tensors
    assert all(getattr(moved, name).data_ptr() == getattr(micro, name).data_ptr() for name in tensors)
