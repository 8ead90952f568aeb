"""NeMo-RL's data plane over a store: its own client, started on this backend.

    from mopd_dataplane.integrations.nemo_rl import use_store

    use_store("runs/demo", mapping="nemo-rl", tokenizer="models/base")  # before the trainer starts

NeMo-RL's adapter of TransferQueue knows two backends by name. This replaces the function by which its driver starts
TransferQueue; workers connect to what the driver started, and need nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files
from typing import Any

import transfer_queue as tq
from omegaconf import OmegaConf

from mopd_dataplane.errors import MismatchError
from mopd_dataplane.transferqueue.backend import NAME, read_section

ADAPTER = "nemo_rl.data_plane.adapters.transfer_queue"
"""Module of NeMo-RL whose `_init_tq(cfg)` starts TransferQueue; as at 7ea279a."""


def use_store(store: str, **settings: Any) -> None:
    """Have NeMo-RL keep what its data plane carries in a store.

    settings: further keys of the backend's section: queue, mapping, tokenizer, domain, policy.
    Raises InputError for an unknown key, MismatchError when the installed NeMo-RL starts TransferQueue otherwise.
    """
    section = {"store": store, **settings}
    read_section(section)
    adapter = import_module(ADAPTER)
    if not callable(getattr(adapter, "_init_tq", None)):
        raise MismatchError(
            f"{ADAPTER} has no _init_tq; start TransferQueue by yourself, as docs/transferqueue.md shows"
        )

    def start(cfg: Any) -> None:
        overlay = {
            "controller": {"polling_mode": True},  # claim_meta polls
            "backend": {"storage_backend": NAME, NAME: section},
        }
        base = OmegaConf.load(str(files("transfer_queue") / "config.yaml"))
        tq.init(conf=OmegaConf.merge(base, overlay))

    adapter._init_tq = start  # type: ignore[attr-defined]
