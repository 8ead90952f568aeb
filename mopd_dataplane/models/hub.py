"""Models by their Hugging Face name: downloaded once to the hub's own cache, and read from that folder.

A model may also be at a URL that fsspec opens, such as `s3://bucket/model`; it is copied to the user's cache folder. A
name is a repository of huggingface.co, such as `Qwen/Qwen3-0.6B`; a path that exists is a folder and never a name. Only
weights in safetensors, configs and tokenizers are fetched, never code or pickles.
"""

import os
import re
from functools import lru_cache
from pathlib import Path

from mopd_dataplane.base.file_urls import is_url, kept_copy, local_path
from mopd_dataplane.errors import InputError, UnknownNameError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
"""Files besides the weights."""


def is_hub_name(source: str) -> bool:
    """Check if the source of a model is a name on the hub.

    >>> is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("/models/mine"), is_hub_name("./models/mine")
    (True, False, False)
    """
    return _NAME.fullmatch(source) is not None and not Path(source).exists()


def model_folder(source: str, revision: str = "", *, weights: bool = True) -> Path:
    """Return the local folder of a model: its path, or the copy of a URL or hub name, downloaded unless it is cached.

    revision: branch, tag or commit; default the main branch. weights: if false, only config and tokenizer are fetched.
    HF_HOME sets the path of the cache; with HF_HUB_OFFLINE=1 the network is not used.
    Raises InputError for a folder with a revision and for http, UnknownNameError when neither hub nor cache has the
    model.
    """
    if is_hub_name(source):
        return _snapshot(source, revision, (*_SMALL, "*.safetensors") if weights else _SMALL)
    if revision:
        raise InputError(f"{source} is a folder, which has no revision {revision!r}; leave it out, or name a hub model")
    if source.startswith(("http://", "https://")):
        raise InputError(
            f"{source}: a model is a folder, and http lists none; download it and give the folder, or a name of "
            "the hub (owner/name), or a URL that lists: s3://, gs://, az://, hf://"
        )
    return _url_copy(source) if is_url(source) else local_path(source)


def commit_of(source: str, revision: str = "") -> str:
    """Return the current commit of a hub name, 40 hex digits; empty for a folder. Raises the errors of model_folder."""
    return model_folder(source, revision).name if is_hub_name(source) else ""


@lru_cache(maxsize=256)
def _url_copy(source: str) -> Path:
    """Copy a model from a URL, once per process: later calls see the model as it was then."""
    return kept_copy(source, Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mopd" / "models")


@lru_cache(maxsize=256)
def _snapshot(name: str, revision: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import constants, snapshot_download

    offline = bool(constants.HF_HUB_OFFLINE)
    try:
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=list(patterns), local_files_only=offline)
        )
    except Exception as error:
        what = name + (f" at revision {revision}" if revision else "")
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        looked = (  # what the hub's client says of a cache is of its own arguments
            f"the cache {constants.HF_HUB_CACHE} (HF_HUB_OFFLINE is set)" if offline else f"huggingface.co: {why:.200}"
        )
        raise UnknownNameError(
            f"no folder {name} here, and no model {what} in {looked}; check the name, give a folder, or "
            "download it first where there is a network: hf download " + name
        ) from None
