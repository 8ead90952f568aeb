"""A controller and a client of TransferQueue over a store, and prompts with their answers as verl puts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import TransferQueueClient
from transfer_queue.controller import TransferQueueController

from mopd_dataplane.transferqueue import backend, promote

SESSIONS = 2


class Framework:
    """A controller and a client over one store, as after a start of the framework."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        section = {"store": str(folder / "store"), "queue": "verl", "promote": "verl"}
        self.controller = TransferQueueController.__ray_metadata__.modified_class(polling_mode=True)
        backend.keep_groups_of(self.controller, backend.Backend(**section))
        self.client = TransferQueueClient("framework", self.controller.zmq_server_info)
        self.client.initialize_storage_manager("MopdStore", section)

    def tag(self, key: str, **tag: Any) -> None:
        meta = self.client.kv_retrieve_meta(keys=[key], partition_id="train", create=True)
        meta.update_custom_meta([tag])
        self.client.set_custom_meta(meta)

    def put(self, key: str, fields: dict[str, Any], **tag: Any) -> None:
        meta = self.client.kv_retrieve_meta(keys=[key], partition_id="train", create=True)
        meta.update_custom_meta([tag])
        self.client.put(TensorDict(fields, batch_size=1), meta)

    def issue(self, uid: str, step: int) -> None:
        """Register a prompt with its content."""
        fields = {"uid": NonTensorStack(uid), "raw_prompt": NonTensorStack(f"what is {uid}?")}
        self.put(uid, fields, is_prompt=True, status="pending", global_steps=step)
        self.tag(uid, status="running")

    def answer(self, uid: str, session: int, step: int = 0) -> None:
        row = torch.tensor([[*uid.encode(), session, step]])
        self.put(f"{uid}_{session}_0", {"responses": row}, status="success", global_steps=step)

    def finish(self, uid: str, step: int = 0) -> None:
        for session in range(SESSIONS):
            self.answer(uid, session, step)
        self.tag(uid, status="finished")

    def clear(self, *keys: str) -> None:
        self.client.clear_samples(self.client.kv_retrieve_meta(keys=[*keys], partition_id="train", create=False))

    def train(self, uid: str) -> None:
        """Sample and clear a group, as verl does."""
        self.clear(uid)
        self.clear(*(f"{uid}_{session}_0" for session in range(SESSIONS)))

    def save(self, name: str) -> None:
        folder = self.folder / name
        folder.mkdir()
        self.client.save_controller_checkpoint(str(folder / "controller_state.pkl"))
        self.client.save_storage_checkpoint(str(folder))

    def load(self, name: str) -> None:
        self.client.load_storage_checkpoint(str(self.folder / name))
        self.client.load_controller_checkpoint(str(self.folder / name / "controller_state.pkl"))

    def tags(self, partition: str = "train") -> dict[str, dict[str, Any]]:
        return (self.client.kv_list(partition) or {}).get(partition, {})

    def tokens(self, key: str, partition: str = "train") -> list[int]:
        """The value of a key, of the write that the controller names."""
        meta = self.client.kv_retrieve_meta(keys=[key], partition_id=partition, create=False)
        (value,) = self.client.storage_manager.storage_client.get(
            [f"{meta.global_indexes[0]}@responses"], custom_backend_meta=[meta._custom_backend_meta[0]["responses"]]
        )
        tokens: list[int] = value.reshape(-1).tolist()
        return tokens

    def stored_keys(self) -> list[tuple[int, str]]:
        """The keys of all values in the store."""
        keys: list[tuple[int, str]] = self.client.storage_manager.storage_client.queue.keys()
        return keys

    def waiting(self) -> set[str]:
        return {key for key, tag in self.tags(promote.WAITING + "train").items() if tag.get("is_prompt")}

    def close(self) -> None:
        """End without another word, as a killed process does."""
        self.client.storage_manager.storage_client.queue.close()
        self.client.close()


def expected(uid: str, session: int, step: int = 0) -> list[int]:
    return [*uid.encode(), session, step]
