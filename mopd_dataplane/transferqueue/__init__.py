"""A store behind TransferQueue's storage interface: rollouts of verl, NeMo-RL, ROLL that survive their processes.

codec.py            values ↔ bytes, without pickle
backend.py          the classes TransferQueue asks for; importing this package registers them
promote.py          groups that were finished after a checkpoint come back when it is loaded
verl_manager.py     verl's agent-loop manager, which takes such a group for a prompt that the dataset yields again
teacher_fields.py   teachers' signals as fields of the trajectories in a running TransferQueue

Needs the extra `transferqueue`; docs/transferqueue.md shows how it is used.
"""

from mopd_dataplane.errors import InputError

try:
    from mopd_dataplane.transferqueue.backend import MopdStorageClient, MopdStorageManager
except ImportError as error:
    if error.name is None or error.name.partition(".")[0] not in ("transfer_queue", "ray", "omegaconf", "msgspec"):
        raise
    raise InputError(f"{error.name} is missing: pip install 'mopd-dataplane[transferqueue]'") from None

__all__ = ["MopdStorageClient", "MopdStorageManager"]
