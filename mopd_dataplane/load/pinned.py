"""Shared memory registered with CUDA, so that copies to the device run while the host continues.

CUDA copies from ordinary memory through a buffer of its own, and the host waits. Registered once for its whole life, a
slot is read by the device directly. Slots are mapped read-only here, which CUDA must be told.
"""

import warnings

READ_ONLY = 0x08
"""cudaHostRegisterReadOnly, CUDA 11.1."""


def register(address: int, nbytes: int) -> bool:
    """Register mapped memory with CUDA.

    Returns False, with a warning, when the driver refuses: copies are then slower, and still right.
    """
    import torch

    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, READ_ONLY))
    if code:
        warnings.warn(
            f"CUDA error {code}: {nbytes:,} bytes of shared memory cannot be pinned; copies to the device go through "
            "a buffer",
            stacklevel=2,
        )
    return code == 0


def unregister(address: int) -> None:
    """Undo `register`. No copy from the memory may be running."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)
