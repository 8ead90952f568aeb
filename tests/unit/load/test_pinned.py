"""Slots registered with CUDA: once each, for as long as they are mapped. The driver is a stand-in: no GPU runs here."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from mopd_dataplane.bench.load import token_store
from mopd_dataplane.bench.synthetic import STAGE
from mopd_dataplane.load.pinned import READ_ONLY
from mopd_dataplane.load.spec import LoadSpec
from mopd_dataplane.load.stream import BatchStream
from mopd_dataplane.store.dataset import Store


class Driver:
    """What is asked of the CUDA runtime."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.ever: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == READ_ONLY, "slots are mapped read-only"
        assert address not in self.registered, "registered twice"
        self.ever.append(address)
        if not self.code:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def holds(self, tensor: torch.Tensor) -> bool:
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= first and last <= start + nbytes for start, nbytes in self.registered.items())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake_driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake_driver)
    return fake_driver


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return token_store(tmp_path / "s", 80)


def stream(store: Store, *, pin: bool) -> BatchStream:
    """The ring holds three of the ten packs, so slots must be used again."""
    spec = LoadSpec(stage=STAGE, slots=2, ring_bytes=1 << 20, deadline_s=20)
    return BatchStream(store.uri, spec, windows=[0], environment={}, pin=pin)


def tokens_of(batches: BatchStream) -> list[list[int]]:
    token_lists = []
    for batch in batches:
        for pack in batch.packs:
            token_lists.append(pack.tokens.tolist())
            batch.release(pack)
    return token_lists


def test_every_slot_is_registered_once_and_until_the_trainer_leaves(store, driver):
    packs = 0
    with stream(store, pin=True) as batches:
        for batch in batches:
            for pack in batch.packs:
                assert all(driver.holds(array) for array in (pack.tokens, pack.sampler_logprobs, pack.loss_mask))
                batch.release(pack)
                packs += 1
        assert driver.registered
        assert len(driver.ever) < packs, "slots are used again, not registered again"
    assert not driver.registered


@pytest.mark.slow
def test_a_driver_that_refuses_costs_speed_only(store, driver):
    driver.code = 801
    with stream(store, pin=True) as batches, pytest.warns(UserWarning, match="CUDA error 801: .* cannot be pinned"):
        refused = tokens_of(batches)
    with stream(store, pin=False) as batches, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert refused == tokens_of(batches)
    assert not driver.registered
