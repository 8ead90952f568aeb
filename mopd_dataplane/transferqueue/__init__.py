"""A store behind TransferQueue's storage interface: rollouts of verl, NeMo-RL, ROLL that survive their processes.

    import mopd_dataplane.transferqueue                      # in the process that calls transfer_queue.init
    transfer_queue.init(OmegaConf.create({"backend": {
        "storage_backend": "MopdStore", "MopdStore": {"store": "runs/demo", "queue": "train"}}}))

codec.py     values ↔ bytes, without pickle
backend.py   the classes TransferQueue asks for; importing this package registers them

Needs the extra `transferqueue`. Every other process learns of the backend from the configuration it is sent.
"""

from mopd_dataplane.errors import InputError

try:
    from mopd_dataplane.transferqueue.backend import MopdStorageClient, MopdStorageManager
except ImportError as error:
    if error.name is None or error.name.partition(".")[0] not in ("transfer_queue", "ray", "omegaconf", "msgspec"):
        raise
    raise InputError(f"{error.name} is missing: pip install 'mopd-dataplane[transferqueue]'") from None

__all__ = ["MopdStorageClient", "MopdStorageManager"]
