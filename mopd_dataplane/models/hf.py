"""Models and tokenizers on disk: loading, saving, digests, and the forward pass that stops before the LM head."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.file_checksums import CHECKSUMS, check_folder, write_checksums
from mopd_dataplane.base.files import file_digest, make_folder
from mopd_dataplane.base.memory import is_out_of_memory
from mopd_dataplane.base.tensor_header import check_tensor_files
from mopd_dataplane.errors import InputError, MismatchError, MopdError, UnknownNameError
from mopd_dataplane.models.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    base_folder,
    check_base,
    is_adapter,
    read_adapter_config,
    settings_digest,
    weights_folder,
)
from mopd_dataplane.models.architecture import attention_implementation, text_decoder
from mopd_dataplane.models.chat_template import terminators
from mopd_dataplane.models.checkpoint_quantisation import check_readable, quantisation_method, read_as_plain
from mopd_dataplane.models.config_files import read_config

if TYPE_CHECKING:
    import torch
    from mopd_kernels.heads import Head
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BESIDE_SHAPE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of config.json that do not describe the shape of the weights."""
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every `from_pretrained`: no network, and no code from the folder."""
_TOKENIZER_FILES = (".json", ".jinja", ".model", ".txt")
_tokenizers: dict[tuple[tuple[str, str], ...], PreTrainedTokenizerBase] = {}
"""Tokenizers of this process, by names and digests of their files: opening one takes up to a second."""


def weights_digest(folder: str | Path) -> str:
    """Return the sha256 of a model folder, 64 hex digits, over its safetensors files and config.

    For an adapter, it covers its factors, the settings that scale them, and its base's digest. A folder that this
    package wrote is checked, and its recorded sums are used; any other folder is read once per process.
    Raises UnknownNameError without weights, DamagedError when a file has changed since it was written.
    """
    root = Path(folder).resolve()
    check_tensor_files(root)
    if is_adapter(root):
        return _adapter_digest(root)
    files = [*sorted(root.glob("*.safetensors")), root / "config.json"]
    if len(files) == 1:
        raise UnknownNameError(
            f"no model weights (*.safetensors) in {root}; pickled weights (*.bin) are never read: save the model as "
            "safetensors"
        )
    recorded = check_folder(root)
    if recorded is not None:
        return _digest_of([(file.name, recorded[file.name]["sha256"]) for file in files])
    return _read_digest(root, tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


def _adapter_digest(root: Path) -> str:
    recorded = check_folder(root)
    file = root / ADAPTER_WEIGHTS
    settings = settings_digest(root)
    if recorded is not None:
        factors = recorded[file.name]["sha256"]
    else:
        factors = _read_digest(root, ((file.name, file.stat().st_size, file.stat().st_mtime_ns),))
    base = weights_digest(base_folder(root))
    check_base(root, base)
    return _digest_of([(file.name, factors), ("settings", settings), ("base", base)])


@lru_cache(maxsize=1024)
def _read_digest(root: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """Compute the digest of a folder without a record. files: (name, bytes, time) of each."""
    return _digest_of([(name, file_digest(root / name)) for name, *_ in files])


def _digest_of(sums: list[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name}:{digest}\n" for name, digest in sums).encode()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits over the vocabulary and the special tokens, which must agree between student and teacher."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    text = json.dumps([vocabulary, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local model folder; uses no network.

    Folders with the same files beside the weights, such as versions of one policy, share one object: do not change it.
    """
    _require_sound(folder)  # before seconds are spent on an import
    from transformers import AutoTokenizer

    folder_of_tokenizer = tokenizer_folder(folder)
    files = sorted(file for file in folder_of_tokenizer.iterdir() if file.suffix in _TOKENIZER_FILES and file.is_file())
    content = tuple((file.name, file_digest(file)) for file in files if file.name != CHECKSUMS)
    if content not in _tokenizers:
        with _opening(folder_of_tokenizer, "tokenizer"):
            _tokenizers[content] = AutoTokenizer.from_pretrained(str(folder_of_tokenizer), **LOCAL)
    return _tokenizers[content]


def tokenizer_folder(folder: str | Path) -> Path:
    """Return the folder of a policy's tokenizer: the policy's own, or its base's for an adapter without one."""
    own = (Path(folder) / "tokenizer.json").is_file() or (Path(folder) / "tokenizer_config.json").is_file()
    return Path(folder) if own else weights_folder(folder)


def check_model_folder(folder: str | Path) -> None:
    """Check a model folder without reading its weights.

    Raises UnknownNameError when there is no config or no weights, InputError when the config is not one that
    transformers reads without running code of the folder, DamagedError when a header of the weights does not fit them.
    """
    if is_adapter(folder):
        read_adapter_config(folder)
        check_tensor_files(Path(folder))
        folder = base_folder(folder)
    _require_folder(folder)
    if not any(Path(folder).glob("*.safetensors")):
        raise UnknownNameError(
            f"no model weights (*.safetensors) in {folder}; pickled weights (*.bin) are never read: save the model as "
            "safetensors"
        )
    check_tensor_files(Path(folder))
    from transformers import AutoConfig

    with _opening(folder, "config"):
        AutoConfig.from_pretrained(str(folder), **LOCAL)


@contextmanager
def _opening(folder: str | Path, part: str) -> Iterator[None]:
    """Turn anything that transformers raises over unreadable files into an InputError that names the folder."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MopdError) or is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):
            raise InputError(
                f"the {part} in {folder} needs code that lies in the folder, which is never run (trust_remote_code is "
                "False everywhere); use a model whose architecture transformers knows"
            ) from None
        raise InputError(
            f"the {part} in {folder} cannot be read ({type(error).__name__}: {error!s:.300}); give a folder that "
            "`save_pretrained` wrote, or copy it again"
        ) from None


def stop_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end an answer, ascending.

    They are the end-of-sequence ids of a model folder's generation config (else its config) and of its tokenizer, and
    the terminators of its chat template.
    """
    weights = weights_folder(folder)
    files = (weights / name for name in ("generation_config.json", "config.json"))
    settings: dict[str, Any] = next((read_config(file) for file in files if file.is_file()), {})
    configured = settings.get("eos_token_id")
    ids = {
        *(configured if isinstance(configured, list) else [configured]),
        tokenizer.eos_token_id,
        *terminators(tokenizer),
    }
    return sorted(int(i) for i in ids if i is not None)


def model_shape(folder: str | Path) -> dict[str, Any]:
    """Return the config of a model folder without the keys that may differ between versions of one model. For an
    adapter, it is the base's."""
    _require_sound(folder)
    config = read_config(weights_folder(folder) / "config.json")
    return {key: value for key, value in config.items() if key not in _BESIDE_SHAPE}


def load_model(folder: str | Path, *, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """Load a causal LM from a local folder, safetensors only, in evaluation mode. An adapter is added to its base,
    unmerged. Quantised weights are read as plain ones, or refused; see checkpoint_quantisation.py."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet_transformers()
    _require_sound(folder)
    if is_adapter(folder):
        from mopd_dataplane.models.adapters import attach

        weights_digest(folder)  # checks that the base is the one that the adapter was trained on
        adapted = load_model(base_folder(folder), dtype=dtype, device=device)
        attach(adapted, folder, "policy")
        return adapted
    check_tensor_files(Path(folder))
    check_readable(folder)
    with _opening(folder, "model"):
        config = AutoConfig.from_pretrained(str(folder), **LOCAL)
        read_as_plain(config)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            attn_implementation=attention_implementation(config),
            **LOCAL,
        )
    if dtype == "float32" and quantisation_method(folder):
        model.float()  # MXFP4 is read as bfloat16, exactly
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    return model


def load_merged(folder: str | Path, *, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """Load a model with an adapter merged into its base: a plain transformers model."""
    model = load_model(folder, dtype=dtype, device=device)
    if not is_adapter(folder):
        return model
    from mopd_dataplane.models.adapters import merge

    return merge(model)


def quiet_transformers() -> None:
    """Turn off transformers' progress bars and its hub client's network access."""
    from transformers.utils import logging

    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def save_policy(
    model: PreTrainedModel,
    tokenizer_folder: str | Path,
    folder: str | Path,
    *,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a policy folder (weights, config, tokenizer) once and durably, see make_folder.

    state_dict: weights to write instead of the model's own, which may be shards or of another dtype.
    """

    def fill(staging: Path) -> None:
        model.save_pretrained(staging, state_dict=state_dict)
        copy_tokenizer(tokenizer_folder, staging)
        write_checksums(staging, identities=True)

    make_folder(Path(folder), fill)


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copy the tokenizer files of one model folder into another."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        file = tokenizer_folder(source) / name
        if file.is_file():
            shutil.copy2(file, Path(target) / name)


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the LM head's weight [V, D], with the change by the active adapter."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight: torch.Tensor = head.weight
    if not hasattr(model, "peft_config"):
        return weight
    from mopd_dataplane.models.adapters import head_delta

    delta = head_delta(head)
    return weight if delta is None else weight + delta


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the input embedding's weight [V, D]; in a tied model it is the same tensor as the head's."""
    weight: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return weight


def lm_head(model: PreTrainedModel) -> Head:
    """Return the LM head for the kernels: weight, bias, and the architecture's changes to the logits."""
    from mopd_kernels.heads import Head

    bias = getattr(model.get_output_embeddings(), "bias", None)  # type: ignore[no-untyped-call]
    config = model.config
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0) or None
    factors = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier"))
    scale = math.prod(map(float, factors)) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(head_weight(model), bias, softcap, scale)


def load_head(folder: str | Path, *, dtype: str, device: str = "cpu") -> Head:
    """Load the LM head of a model folder, without the model."""
    from mopd_kernels.heads import Head

    head = lm_head(load_model(folder, dtype=dtype))
    bias = None if head.bias is None else head.bias.detach().clone().to(device)
    return Head(head.weight.detach().clone().to(device), bias, head.softcap, head.logit_scale)


def load_final_norm(folder: str | Path, *, dtype: str) -> torch.nn.Module:
    """Load the final norm of a model folder, between last layer and LM head, without the rest of the model.

    Raises MismatchError when the last operation of the model is not a module of its own.
    """
    import copy

    import torch

    model = load_model(folder, dtype=dtype)
    said: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _module, _input, output, name=name: said.update({name: output}))
        for name, module in text_decoder(model).named_children()
    ]
    with torch.no_grad():
        states = hidden_states(model, torch.zeros(1, 1, dtype=torch.int64))
    for hook in hooks:
        hook.remove()
    last = next((name for name, output in said.items() if output is states), None)
    if last is None:
        raise MismatchError(
            f"{folder}: the states that the LM head reads are not the output of a module of {type(model).__name__}, so "
            'its final norm cannot be taken out; set score.reads = "states"'
        )
    norm: torch.nn.Module = copy.deepcopy(text_decoder(model).get_submodule(last))
    return norm


def hidden_states(model: PreTrainedModel, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Compute the states [B, T, D] after the final norm, which the LM head reads. The head itself is not run.

    For packed rows, pass `position_ids` that restart at 0 in every sequence, and no attention mask.
    """
    output = text_decoder(model)(input_ids=input_ids, use_cache=False, **inputs)
    states: torch.Tensor = output.last_hidden_state
    return states


def _require_folder(folder: str | Path) -> None:
    usual_files = ("config.json", "tokenizer.json", ADAPTER_CONFIG)
    if not any((Path(folder) / name).is_file() for name in usual_files):
        raise UnknownNameError(f"no model folder at {folder} (a local folder with config.json is needed)")


def _require_sound(folder: str | Path) -> None:
    """Check a model folder. Raises UnknownNameError if it is none, DamagedError when a file has changed since it was
    written."""
    _require_folder(folder)
    check_folder(folder)
