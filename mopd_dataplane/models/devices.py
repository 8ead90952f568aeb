"""Chooses the device of a model, and frees its memory."""

import gc
import sys

from mopd_dataplane.errors import InputError


def resolve_device(name: str) -> str:
    """Return the torch device for `device` of a job file: `auto` is the machine's accelerator if it has one.

    Raises InputError when this machine, or this build of torch, has no such device.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return "cpu" if accelerator is None else accelerator.type
    device = torch.device(name)
    if device.type == "cpu":
        return name
    if accelerator is None or accelerator.type != device.type:
        has = "no accelerator" if accelerator is None else accelerator.type
        raise InputError(
            f'device = "{name}": torch {torch.__version__} finds {has} on this machine; set "auto" or "cpu", or '
            "install the build of torch for that device"
        )
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise InputError(f'device = "{name}": this machine has {torch.accelerator.device_count()} of them, from 0')
    return name


def free_device_memory() -> None:
    """Free the memory of an accelerator that nothing refers to, so that other processes can use it.

    The memory of a CPU is free as soon as the last reference is gone.
    """
    if "torch" not in sys.modules:
        return
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        gc.collect()
        torch.get_device_module(accelerator).empty_cache()


def free_memory(device: str) -> int:
    """Return the free bytes of an accelerator."""
    import torch

    free, _ = torch.get_device_module(device).mem_get_info(torch.device(device))
    return int(free)
