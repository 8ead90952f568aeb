"""Adapter folders: LoRA weights as peft stores them, and the base model that they belong to. Needs no torch, no peft.

    <folder>/adapter_config.json            peft's: rank, targets, and the base by name or path
    <folder>/adapter_model.safetensors      peft's: the two factors of every target
    <folder>/base.json                      this package's, beside adapters that it trained: digest of the base, and its
                                            path relative to the folder, so that a store can move

A folder written by another tool has no base.json: its base is then the one named in adapter_config.json.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd_dataplane.errors import InputError, MismatchError, UnknownNameError
from mopd_dataplane.models.hub import is_hub_name, model_folder

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"
_SETTINGS = (
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "fan_in_fan_out", "use_rslora", "use_dora",
)  # fmt: skip
"""Keys of adapter_config.json on which the computed function depends."""
_FOREIGN = (
    "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication", "lora_bias", "use_bdlora",
    "use_qalora", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "velora_config",
)  # fmt: skip
"""Keys that make an adapter more than two factors a target; all must be unset."""
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Names of `init_lora_weights` that leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it."""


@dataclass(frozen=True)
class Base:
    """The model that an adapter belongs to."""

    location: str
    """Folder, or a name on the hub."""
    revision: str = ""
    digest: str = ""
    """Digest of its weights; empty if it was not recorded."""

    def written(self) -> dict[str, str]:
        """Return the content of base.json."""
        return {"place": self.location, "revision": self.revision, "digest": self.digest}


def is_adapter(folder: str | Path) -> bool:
    """Check if a folder holds an adapter rather than a whole model."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """Read adapter_config.json of a folder. The adapter must be plain LoRA, rank-stabilised LoRA or DoRA.

    Raises InputError when the file is not readable, MismatchError naming the key that is not supported,
    UnknownNameError when there are no weights in safetensors.
    """
    file = Path(folder) / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_text())
        kind = config.get("peft_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{file} cannot be read ({type(error).__name__}: {error!s:.200}); copy it again") from None
    if kind != "LORA":
        raise MismatchError(f"{file}: peft_type = {kind!r}; only LORA can be read: merge it into its base with peft")
    for key in (*_FOREIGN, "bias"):
        if config.get(key) not in (None, False, [], {}, "none"):
            raise MismatchError(
                f"{file}: {key} = {config[key]!r:.80} changes more than the targets' weights, which is not supported; "
                "merge the adapter into its base (peft: merge_and_unload) and give the merged folder"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise MismatchError(
            f"{file}: init_lora_weights = {start!r} takes the factors' start out of the base's weights, so they do not "
            "fit the base as it is; save the adapter as plain LoRA (peft: save_pretrained with "
            "path_initial_model_for_weight_conversion), or merge it into its base and give the merged folder"
        )
    if not (Path(folder) / ADAPTER_WEIGHTS).is_file():
        raise UnknownNameError(f"no {ADAPTER_WEIGHTS} in {folder}; pickled ones are refused: save it with peft")
    return dict(config)


def named_base(folder: str | Path) -> Base:
    """Return the base that an adapter folder names, without checking that it exists."""
    recorded = Path(folder) / BASE
    if recorded.is_file():
        said = json.loads(recorded.read_text())
        return Base(str(said["place"]), str(said.get("revision", "")), str(said["digest"]))
    config = read_adapter_config(folder)
    return Base(str(config.get("base_model_name_or_path") or ""), str(config.get("revision") or ""))


def base_folder(folder: str | Path) -> Path:
    """Return the folder of the whole model that an adapter belongs to, downloading it from the hub if it is not cached.

    A relative path is resolved from the adapter's folder first, then from the working directory; then the hub is tried.
    Raises UnknownNameError when the base is not found, MismatchError when the base is an adapter itself.
    """
    base = named_base(folder)
    base_path = Path(folder) / base.location
    if not base.location or not base_path.is_dir():
        if not base.location or not (is_hub_name(base.location) or Path(base.location).is_dir()):
            raise UnknownNameError(
                f"adapter {folder}: its base {base.location!r} is no folder here and no name on the hub; write the "
                f"base's path as base_model_name_or_path into {ADAPTER_CONFIG}"
            )
        base_path = model_folder(base.location, base.revision if is_hub_name(base.location) else "")
    if is_adapter(base_path):
        raise MismatchError(
            f"adapter {folder}: its base {base_path} is an adapter too; merge that one into its base first"
        )
    return base_path.resolve()


def weights_folder(folder: str | Path) -> Path:
    """Return the folder with the config (and perhaps the tokenizer) of a policy: an adapter's base, any other folder
    itself."""
    return base_folder(folder) if is_adapter(folder) else Path(folder)


def adapter_rank(folder: str | Path) -> int:
    """Return the rank of an adapter's factors."""
    return int(read_adapter_config(folder)["r"])


def highest_rank(folder: str | Path) -> int:
    """Return the rank of an adapter's largest factors, which a rank pattern may make larger than `r`."""
    config = read_adapter_config(folder)
    return max(int(rank) for rank in (config["r"], *(config.get("rank_pattern") or {}).values()))


def factor_modules(folder: str | Path) -> set[str]:
    """Return the modules that an adapter has factors for, by their names in the base."""
    from safetensors import safe_open

    with safe_open(Path(folder) / ADAPTER_WEIGHTS, framework="numpy") as stored:
        parts = (re.match(r"(?:base_model\.model\.)?(.+?)\.lora_", name) for name in stored.keys())  # noqa: SIM118
        return {part[1] for part in parts if part}


def touches_head(folder: str | Path) -> bool:
    """Check if an adapter may change the LM head: it has factors outside the numbered layers, where the head is."""
    return bool(outside_layers(folder))


def outside_layers(folder: str | Path) -> list[str]:
    """Return the modules outside the numbered layers that an adapter has factors for, sorted."""
    return sorted(name for name in factor_modules(folder) if not re.search(r"\.\d+\.", name))


def settings_digest(folder: str | Path) -> str:
    """Return the sha256 of the settings that an adapter's function depends on; the path of its base is not one of
    them."""
    config = read_adapter_config(folder)
    targets = config.get("target_modules")
    config["target_modules"] = sorted(targets) if isinstance(targets, list) else targets
    text = json.dumps({key: config.get(key) or None for key in _SETTINGS}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_base(folder: str | Path, digest: str) -> None:
    """Check that an adapter was trained on the base with this digest. Raises MismatchError if it was not."""
    expected_digest = named_base(folder).digest
    if expected_digest and expected_digest != digest:
        raise MismatchError(
            f"adapter {folder} was trained on a base with digest {expected_digest[:16]}, {base_folder(folder)} has "
            f"{digest[:16]}; restore that base, or train the adapter again"
        )
