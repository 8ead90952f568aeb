"""LoRA adapters in a transformers model, through peft: added, switched, saved as a folder, merged.

A linear map W of the base becomes W + s B A with A [r, in], B [out, r] and s = alpha / r (LoRA, arXiv 2106.09685).
Rank-stabilised adapters (arXiv 2312.03732) have s = alpha / sqrt(r); DoRA (arXiv 2402.09353) scales rows of the sum. A
model may hold any number of adapters, of which at most one is active.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.base.files import make_folder
from mopd_dataplane.errors import MismatchError, nearest
from mopd_dataplane.models.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE,
    Base,
    is_adapter,
    named_base,
    read_adapter_config,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from mopd_dataplane.job.sections import Lora

TRAINED = "default"
"""Name of the adapter that is trained, inside its model."""
_IN_TURN = ("policy", "policy2")
"""Names of the sampling adapter inside its model: the next one is loaded beside the one that it replaces."""
_PREFIX = "base_model.model."
"""Prefix of peft for the names of an adapter's tensors."""
_NAMES = ("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type")
"""Keys of an adapter's config that do not describe its factors."""


def new_adapter(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze a model and add a new adapter that changes nothing yet (B = 0); its factors are float32 and trainable.

    Raises MismatchError when a target is missing, is the LM head (which the kernels read as one matrix), or is part of
    the experts that transformers stores in one tensor.
    """
    from peft import LoraConfig

    targets: str | list[str] = lora.target_modules if isinstance(lora.target_modules, str) else [*lora.target_modules]
    settings: dict[str, Any] = {
        "r": lora.r, "lora_alpha": lora.alpha or 2 * lora.r, "lora_dropout": lora.dropout, "task_type": "CAUSAL_LM",
    }  # fmt: skip
    config = LoraConfig(target_modules=targets, **settings)
    modules, experts = _beside_experts(model, LoraConfig(target_modules=targets, **settings))
    if experts and targets == "all-linear":
        config = LoraConfig(target_modules=modules, **settings)
    elif experts:
        raise MismatchError(
            f"train.lora.target_modules names {sorted({*targets} - {*modules})}, which are parts of the experts in "
            f'{type(model).__name__}; adapters of experts are not trained here: take {modules}, or "all-linear", which '
            "leaves them out"
        )
    _check_targets(model, config, "train.lora.target_modules")
    _inject(model, config, TRAINED, "train.lora.target_modules")
    _require_free_head(model, "train.lora.target_modules")
    _set_trainable(model)


def _beside_experts(model: PreTrainedModel, config: LoraConfig) -> tuple[list[str], list[str]]:
    """Return the modules that peft would adapt, and the parameters of fused experts that it would adapt instead of
    others.

    transformers stores the experts of a layer in one tensor for many families. peft then turns the names of their
    projections into `target_parameters`, for every module with such a name. Changes `config`.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(config, model, None)
    return sorted(config.target_modules or ()), sorted(config.target_parameters or ())


def continued_adapter(model: PreTrainedModel, folder: Path, lora: Lora) -> None:
    """Freeze a base and load the adapter of a folder into it, to continue its training.

    Raises MismatchError when the adapter's rank differs from the job's, or when it does not fit the base.
    """
    rank = int(read_adapter_config(folder)["r"])
    if rank != lora.r:
        raise MismatchError(
            f"{folder} is an adapter of rank {rank}, train.lora.r = {lora.r}; set it to {rank}, or have the stage that "
            'it comes from merge its adapter (train.lora.merge = "end")'
        )
    attach(model, folder, TRAINED)
    _require_free_head(model, str(folder))
    _set_trainable(model)


def attach(model: PreTrainedModel, folder: str | Path, name: str) -> None:
    """Load the adapter of a folder into its base under a name, in the base's dtype, and activate it.

    Raises MismatchError when a target is missing in the base, or when a factor does not have the shape that follows
    from the base and the rank in its config.
    """
    make_room(model, folder, name)
    fill(model, name, read_factors(model, folder, name))
    activate(model, name)


def shape_of(folder: str | Path) -> str:
    """Return a key that is equal for adapters whose factors have the same targets, shapes and scale.

    Such adapters can be copied into the same allocated factors, see make_room.
    Raises InputError, MismatchError or UnknownNameError as `read_adapter_config` does.
    """
    config: dict[str, Any] = _peft_config(folder).to_dict()  # type: ignore[no-untyped-call]
    return json.dumps(
        {key: value for key, value in config.items() if key not in _NAMES}, sort_keys=True, default=sorted
    )


def make_room(model: PreTrainedModel, folder: str | Path, name: str) -> None:
    """Allocate an adapter with the shape of a folder's adapter in a base under a name, without loading its factors.

    Raises MismatchError when a target is missing in the base or cannot be adapted.
    """
    config = _peft_config(folder)
    where = str(Path(folder) / ADAPTER_CONFIG)
    _check_targets(model, config, where)
    _inject(model, config, name, where)
    if model.config.tie_word_embeddings and any(map(_is_adapted, _ends(model))):
        raise MismatchError(
            f"{where} targets the embedding or the LM head, which are one matrix in {type(model).__name__}; an adapter "
            "would change only one of its two uses: train it without, or on a model whose embeddings are not tied"
        )
    if config.use_dora and _is_adapted(_ends(model)[1]):
        raise MismatchError(f"{where}: DoRA on the LM head is not supported; merge the adapter into its base")


def read_factors(model: PreTrainedModel, folder: str | Path, name: str) -> dict[str, torch.Tensor]:
    """Read the factors of a folder's adapter, by their names in peft's files, in dtype and on device of the adapter
    `name`.

    Raises MismatchError when one has another shape than the allocated factor.
    """
    from safetensors.torch import load_file

    file = Path(folder) / ADAPTER_WEIGHTS
    factors = {key.removeprefix(_PREFIX): tensor for key, tensor in load_file(file).items()}
    _drop_base(model, factors, file)
    room, rank = _room(model, name), read_adapter_config(folder)["r"]
    for key in sorted(room.keys() | factors.keys()):
        mine, theirs = room.get(key), factors.get(key)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            shapes = [None if one is None else list(one.shape) for one in (theirs, mine)]
            raise MismatchError(
                f"{file}: {key} is {shapes[0]}, rank {rank} on this base needs {shapes[1]}; this is an adapter of "
                "another rank or for another base"
            )
    return {key: factors[key].to(mine.device, mine.dtype, copy=True) for key, mine in room.items()}


def fill(model: PreTrainedModel, name: str, factors: Mapping[str, torch.Tensor]) -> None:
    """Copy factors from `read_factors` into the allocated adapter."""
    for key, tensor in _room(model, name).items():
        tensor.copy_(factors[key])


def replace_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Replace the active adapter by that of a folder, in the same base.

    Raises MismatchError as `attach` does; the previous one then stays active.
    """
    from peft.functional import delete_adapter

    (before,) = model.peft_config
    name = next(name for name in _IN_TURN if name != before)
    try:
        attach(model, folder, name)
    except MismatchError:
        delete_adapter(model, name, prefix="lora_")
        model.peft_config.pop(name, None)
        activate(model, before)
        raise
    delete_adapter(model, before, prefix="lora_")
    del model.peft_config[before]


def activate(model: PreTrainedModel, name: str | None) -> None:
    """Make one adapter of a model active, or none; nothing of the model is trainable afterwards."""
    from peft.functional import set_adapter

    layers: list[Any] = [module for module in model.modules() if _is_adapted(module)]
    for layer in layers:
        layer.enable_adapters(name is not None)
    if name is not None:
        set_adapter(model, name, inference_mode=True)
    for weight in model.parameters():
        weight.requires_grad_(False)


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain transformers model with the active adapter added to its weights."""
    for path, layer in [(path, module) for path, module in model.named_modules() if _is_adapted(module)]:
        layer.merge()
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.get_base_layer())
    del model.peft_config
    model.requires_grad_(True)
    return model


def head_delta(head: Any) -> torch.Tensor | None:
    """Return [V, D], the change of an LM head by the active adapter, or None when it does not change the head."""
    if not _is_adapted(head) or head.disable_adapters:
        return None
    active = [name for name in head.active_adapters if name in head.lora_A]
    delta: torch.Tensor | None = head.get_delta_weight(active[0]) if active else None
    return delta


def save_adapter(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], folder: Path, *, start: Path, base: Base
) -> None:
    """Write the trained adapter as a policy folder, durably and once: a temporary folder, then one rename.

    tensors: the whole adapter, by names in the model. start: the policy that the stage started from; if it is an
    adapter, the new one has its base. base: the start itself, if it is a whole model.
    """
    from safetensors.torch import save_file

    config: Any = model.peft_config[TRAINED]
    if is_adapter(start):
        base = named_base(start)
        base = replace(
            base, location=str((start / base.location).resolve()) if (start / base.location).is_dir() else base.location
        )
    name = base.location
    if Path(name).is_relative_to(folder.parents[1]):  # both are in one store, which may move
        base = replace(base, location=os.path.relpath(name, folder))
    said = {**config.to_dict(), "base_model_name_or_path": name, "revision": base.revision or None}
    said |= {"inference_mode": True, "target_modules": sorted(config.target_modules)}
    said["target_parameters"] = sorted(config.target_parameters or ()) or None  # peft leaves an empty set behind
    named = {_PREFIX + key.replace(f".{TRAINED}.", "."): tensor.contiguous() for key, tensor in tensors.items()}

    def fill(staging: Path) -> None:
        (staging / ADAPTER_CONFIG).write_text(json.dumps(said, indent=1, default=str))
        save_file(named, staging / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (staging / BASE).write_text(json.dumps(base.written(), indent=1))
        write_checksums(staging, identities=True)

    make_folder(folder, fill)


def trained_tensors(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the trained adapter, by their names in the model."""
    return {name: weight for name, weight in model.named_parameters() if f".{TRAINED}." in name and "lora_" in name}


def _peft_config(folder: str | Path) -> LoraConfig:
    """Return the config of a folder's adapter, for inference."""
    from peft import LoraConfig

    fields = LoraConfig.__dataclass_fields__
    said = {key: value for key, value in read_adapter_config(folder).items() if key in fields}
    return LoraConfig(**{**said, "inference_mode": True, "init_lora_weights": True, "lora_dropout": 0.0})


def _room(model: PreTrainedModel, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter in a model, by their names in peft's files; writing to them writes to the
    model."""
    from peft.functional import get_peft_model_state_dict

    tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return tensors


def _drop_base(model: PreTrainedModel, stored: dict[str, torch.Tensor], file: Path) -> None:
    """Remove copies of the base's own weights that peft stores beside factors of the embedding or the head.

    Raises MismatchError when such a copy differs from the base.
    """
    import torch

    for key in [key for key in stored if ".base_layer." in key]:
        mine, theirs = model.get_parameter(key), stored.pop(key)
        has_weights = not mine.is_meta  # a base that only has its shape
        if mine.shape != theirs.shape or (has_weights and not torch.equal(mine.cpu(), theirs.to(mine.dtype))):
            raise MismatchError(
                f"{file}: {key} is not the base's own; the adapter belongs on another base: merge it into that one"
            )


def _inject(model: PreTrainedModel, config: LoraConfig, name: str, where: str) -> None:
    from peft import inject_adapter_in_model

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several are what is wanted
            inject_adapter_in_model(config, model, adapter_name=name)
    except ValueError as error:
        raise MismatchError(f"{where} does not fit {type(model).__name__}: {error!s:.300}") from None


def _check_targets(model: PreTrainedModel, config: LoraConfig, where: str) -> None:
    """Check that every named target is in the model; peft accepts a single match. Raises MismatchError."""
    from torch.nn import Linear

    targets = config.target_modules
    if not isinstance(targets, set | list | tuple):
        return  # a pattern, or `all-linear`: peft refuses one that matches nothing
    modules = {name: part for name, part in model.named_modules() if name}
    for target in sorted(targets):
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            leaves = sorted({name.rpartition(".")[2] for name, part in modules.items() if isinstance(part, Linear)})
            raise MismatchError(f"{where}: {type(model).__name__} has no module {target!r}: {nearest(target, leaves)}")


def _is_adapted(module: Any) -> bool:
    """Check if a module is a layer of the base with adapters around it."""
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer)


def _ends(model: PreTrainedModel) -> tuple[Any, Any]:
    """Return the input embedding and the LM head."""
    return model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]


def _require_free_head(model: PreTrainedModel, where: str) -> None:
    if any(map(_is_adapted, _ends(model))):
        raise MismatchError(
            f"{where} names the embedding or the LM head; the kernels read the head as one matrix: leave it out"
        )


def _set_trainable(model: PreTrainedModel) -> None:
    """Make the factors of the active adapter trainable, in float32."""
    for weight in trained_tensors(model).values():
        weight.requires_grad_(True)
        weight.data = weight.data.float()
