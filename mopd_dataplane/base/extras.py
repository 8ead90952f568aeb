"""Which extra of this package brings a library that is missing."""

from __future__ import annotations

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
    """What to install for an import that failed; None when it is no package that an extra brings.

    >>> missing_package(ModuleNotFoundError("no obstore", name="obstore.store"))
    "this needs the package 'obstore', which is not installed: pip install 'mopd-dataplane[s3]'"
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return None
    hint = "; on a machine without a GPU install torch's CPU build first" if module == "torch" else ""
    install = f"pip install 'mopd-dataplane[{EXTRAS[module]}]'{hint}"
    return f"this needs the package {module!r}, which is not installed: {install}"
