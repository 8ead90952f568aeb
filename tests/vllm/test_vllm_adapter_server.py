"""A team's own server and adapters: loaded beside its base by name, refused with what to change at the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from decoding import assert_same, decode, make_requests
from peft_adapters import write_adapter
from serving import Server, serving

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.job.sections import Lora
from mopd_dataplane.models.vllm_server import VllmServer
from mopd_dataplane.rollout.engines.hf import HfEngine
from mopd_dataplane.rollout.engines.vllm import SAMPLER
from mopd_dataplane.rollout.engines.vllm_server import ServerEngine

KEYED = ("--logits-processors", SAMPLER, "--logprobs-mode", "processed_logits")


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path]) -> Iterator[Server]:
    """A server that takes adapters of rank 8 while it runs."""
    flags = ("--enable-lora", "--max-lora-rank", "8")
    with serving(models[0], *KEYED, *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True") as running:
        yield running


def test_each_version_is_loaded_beside_the_base_and_the_one_before_forgotten(
    server: Server, models: tuple[Path, Path], adapters: tuple[Path, Path]
) -> None:
    requests = make_requests(8)
    with closing(VllmServer(server.url)) as client:
        with closing(ServerEngine(models[0], url=server.url, slots=6, adapter=Lora(r=8))) as engine:
            for version, folder in enumerate((models[0], *adapters, models[0], adapters[0])):
                engine.load_policy(folder, version)
                reference = HfEngine(folder, slots=6)
                assert engine.policy_digest == reference.policy_digest
                assert_same(decode(engine, requests), decode(reference, requests))
                served = [one["id"] for one in client.get("models")["data"]]
                assert len(served) == (1 if folder == models[0] else 2)
        with closing(ServerEngine(adapters[0], url=server.url, slots=6)) as engine:  # a run that goes on finds it there
            assert_same(decode(engine, requests), decode(HfEngine(adapters[0], slots=6), requests))


def test_what_the_server_does_not_take_is_refused_with_what_to_change(
    server: Server, models: tuple[Path, Path], adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    wide = write_adapter(models[0], tmp_path / "wide", r=16)
    with pytest.raises(MismatchError, match=r"larger --max-lora-rank"):
        ServerEngine(wide, url=server.url, slots=4)
    other = write_adapter(models[1], tmp_path / "other")
    with pytest.raises(MismatchError, match="this run needs"):
        ServerEngine(other, url=server.url, slots=4)
    with pytest.raises(MismatchError, match=r"started with --enable-lora, and reload_weights"):
        ServerEngine(models[1], url=server.url, slots=4, reload=True)
    with closing(ServerEngine(models[0], url=server.url, slots=4)):
        pass  # it still serves what it did


def test_a_server_without_the_switches_is_found_out_before_work_starts(
    models: tuple[Path, Path], adapters: tuple[Path, Path]
) -> None:
    with serving(models[0], *KEYED) as plain:
        for settings in ({"folder": models[0], "adapter": Lora(r=4)}, {"folder": adapters[0]}):
            with pytest.raises(MismatchError, match="--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
                ServerEngine(url=plain.url, slots=4, **settings)
