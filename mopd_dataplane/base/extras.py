"""Error texts for a missing library: the extra of this package that installs it."""

import importlib.util
from collections.abc import Iterable

from mopd_dataplane.errors import InputError

EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "triton", "mopd_kernels"), "train"),
    **dict.fromkeys(("gguf", "accelerate"), "jobs"),
    "reasoning_gym": "gym",
    "peft": "lora",
    "torchao": "quantise",
    "obstore": "s3",
    "datasets": "datasets",
    "trl": "trl",
    "lm_eval": "eval",
    "aiohttp": "files",
    "vllm": "vllm",
    "httpx2": "server",
    "ray": "ray",
    **dict.fromkeys(("tensorboard", "wandb"), "track"),
    **dict.fromkeys(("transfer_queue", "tensordict"), "transferqueue"),
}
"""Top-level module -> extra."""


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return advice on what to install after a failed import, or None when no extra installs the package.

    >>> missing_package(ModuleNotFoundError("no obstore", name="obstore.store"))
    "this needs the package 'obstore', which is not installed: pip install 'mopd-dataplane[s3]'"
    """
    module = (error.name or "").partition(".")[0]
    return _to_install([module]) if module in EXTRAS else None


def require(modules: Iterable[str]) -> None:
    """Check that all of these modules are installed. Raises InputError that names those missing and one command to
    install them."""
    if missing := [module for module in modules if not is_installed(module)]:
        raise InputError(_to_install(missing))


def is_installed(module: str) -> bool:
    """Check if a module can be imported: no finder refuses it, and it is no mere folder of that name."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None


def _to_install(modules: list[str]) -> str:
    extras = ",".join(dict.fromkeys(EXTRAS[module] for module in modules))
    hint = "; on a machine without a GPU install torch's CPU build first" if "torch" in modules else ""
    names = ", ".join(map(repr, modules))
    several = len(modules) > 1
    return (
        f"this needs the package{'s' if several else ''} {names}, which {'are' if several else 'is'} not installed: "
        f"pip install 'mopd-dataplane[{extras}]'{hint}"
    )
