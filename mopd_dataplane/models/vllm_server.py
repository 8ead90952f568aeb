"""A running vLLM server by its URL: the model that it serves, its weights, and plain requests.

The API key comes from the environment variable VLLM_API_KEY and is sent in the request header only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from mopd_dataplane.base.http_client import SMALL_BYTES, STATUS_S, WORK_S, Answer, Call, HttpClient, Traffic, check_root
from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.models.adapter_files import base_folder, is_adapter
from mopd_dataplane.models.hf import weights_digest
from mopd_dataplane.models.vllm_adapters import check_for_vllm
from mopd_dataplane.models.vllm_replies import (
    CacheReset,
    RankedLogprob,
    ReadTexts,
    ServedModels,
    ServerInfo,
    Tokenized,
    WeightInfo,
    check_mass,
    checked_logprob,
)

KEY_VARIABLE = "VLLM_API_KEY"
_GLANCE_S = 5.0
"""How long a check before a run waits for a server."""
_AT_ONCE = 8
"""Number of requests sent to one server at a time."""
_ENTRY_BYTES = 1024
"""Upper bound of the bytes of one log-prob in an answer, with its token's text."""
_ADAPTER = "mopd-"
"""Prefix of the names of adapters that a run has loaded into a server."""
_MISSING = "No adapter found"
"""Text in a server's reply when it does not see a folder."""
_UNKNOWN = (None, "", "default")
"""Weight versions that identify nothing: no development endpoints, no version, and the default before one is set."""

Form = TypeVar("Form", bound=BaseModel)
Value = TypeVar("Value")


def served_context(url: str) -> int:
    """Return the context in tokens of the model at a server; 0 where it does not say. Raises as VllmServer, at once."""
    root = check_root(url)
    with closing(HttpClient(headers=_headers(), most=1, patience_s=0)) as client:
        served = _served_models(client, root, deadline_s=_GLANCE_S).data
    return (served[0].max_model_len or 0) if served else 0


def _headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}


def _served_models(client: HttpClient, root: str, *, deadline_s: float) -> ServedModels:
    return client.request(Call(method="GET", url=f"{root}/models", deadline_s=deadline_s)).read(ServedModels)


class VllmServer:
    """One vLLM server, by the URL of its API root, as http://127.0.0.1:8000/v1.

    Raises InputError for an impossible URL or without httpx2, EngineError when nobody answers there.
    """

    def __init__(self, url: str) -> None:
        self.url = check_root(url)
        self.root = self.url.removesuffix("/v1")
        """URL of the endpoints beside the API root."""
        self.headers = _headers()
        self._client = HttpClient(headers=self.headers, most=_AT_ONCE)
        try:
            served = self._served().data
            if not served:
                raise EngineError(f"{self.url} serves no model; start it with the policy's folder")
        except BaseException:
            self.close()
            raise
        self.name = served[0].id
        """Name of the served model; every request carries it."""
        self.folder = served[0].root or self.name
        """Path or name from which the server loaded the model."""
        self.context_length = served[0].max_model_len or 0
        self.names_weights = False
        """True if the server had a name for its weights at the last request."""

    @property
    def traffic(self) -> Traffic:
        """Requests to the server so far."""
        return self._client.traffic

    def completion(self, body: Mapping[str, Any], form: type[Form], purpose: str) -> tuple[Form, Answer]:
        """Send one request for a completion that is not streamed. Returns its parsed answer. Raises EngineError,
        DeadlineError."""
        answer = self._client.request(Call(url=f"{self.url}/completions", body=body, purpose=purpose))
        return answer.read(form), answer

    def reading(self, name: str, ids: list[int], k: int) -> Call:
        """Build the request for the log-probs of a text under a model of the server, with the k likeliest tokens
        everywhere."""
        body = {
            "model": name,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": k,
            "add_special_tokens": False,
        }
        limit = SMALL_BYTES + len(ids) * (k + 1) * _ENTRY_BYTES
        return Call(
            url=f"{self.url}/completions", body=body, purpose=f"log-probs of {len(ids)} tokens", limit_bytes=limit
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text by the server's tokenizer, without special tokens. Raises EngineError."""
        body = {"model": self.name, "prompt": text, "add_special_tokens": False}
        call = Call(url=f"{self.root}/tokenize", body=body, purpose="ids of a text", deadline_s=STATUS_S)
        return self._client.request(call).read(Tokenized).tokens

    def gather(self, calls: Sequence[Call], read: Callable[[int, Answer], Value]) -> list[Value]:
        """Send all requests and return `read` of each answer, see HttpClient.gather."""
        return self._client.gather(calls, read)

    def serve(self, folder: Path, digest: str, *, reload: bool) -> None:
        """Make sure that the server has the weights of a policy folder.

        It has them if its weight version is the policy's digest, or if it was started with that folder and no version
        was set afterwards; a server without development endpoints has no version and serves the weights it was started
        with. Otherwise it is told to load them if `reload` is true.
        Raises MismatchError when the server has other weights.
        """
        version = self._weight_version()
        self.names_weights = version not in _UNKNOWN
        if version == digest or (version in _UNKNOWN and Path(self.folder).resolve() == folder.resolve()):
            return
        if not reload:
            raise MismatchError(
                f"{self.url} serves {self.folder!r} (weight version {version or 'unknown'}), this run needs {folder} "
                f"(digest {digest}); serve that folder, or load it there and name it (POST /update_weight_version with "
                "this digest), or let this run do both: engine.reload = true and VLLM_SERVER_DEV_MODE=1 at the server"
            )
        if version is None:
            raise MismatchError(
                f"{self.url} has no development endpoints, so engine.reload cannot give it {folder}; start it with "
                "VLLM_SERVER_DEV_MODE=1, on an address that only this run can reach"
            )
        self._reload(folder, digest)

    def take(self, folder: Path, digest: str, *, reload: bool) -> str:
        """Make sure that the server has a policy or a teacher. Returns the model name to use in requests.

        A whole model must be what the server serves, see serve(). An adapter is loaded beside its base, which must be
        what the server serves, under a name made of its digest. Raises MismatchError, EngineError.
        """
        if not is_adapter(folder):
            self.serve(folder, digest, reload=reload)
            return self.name
        check_for_vllm(folder)
        base = base_folder(folder)
        self.serve(base, weights_digest(base), reload=False)
        name = f"{_ADAPTER}{digest[:32]}"
        if self._has(name):
            return name
        # The repetition of an interrupted request is refused if the first one loaded the adapter.
        if (said := self._refused_adapter(name, folder.resolve())) and not self._has(name):
            raise MismatchError(f"{self.url} does not take adapter {folder}: {_next_step(said)} (it says: {said})")
        return name

    def require_adapters(self) -> None:
        """Check that adapters can be loaded into the running server. Raises MismatchError if not."""
        said = self._refused_adapter(f"{_ADAPTER}probe", Path("/nowhere"))
        if _MISSING not in said:
            raise MismatchError(f"{self.url} takes no adapters while it runs: {_next_step(said)} (it says: {said})")

    def forget(self, name: str) -> None:
        """Unload an adapter from the server; no error if the server does not have it."""
        self._client.request(Call(url=f"{self.url}/unload_lora_adapter", body={"lora_name": name}, deadline_s=STATUS_S))

    def _served(self) -> ServedModels:
        return _served_models(self._client, self.url, deadline_s=STATUS_S)

    def _has(self, name: str) -> bool:
        """Check if the server has a model or an adapter of this name."""
        return name in {model.id for model in self._served().data}

    def _refused_adapter(self, name: str, folder: Path) -> str:
        """Load an adapter. Returns the server's reason for refusing it, or an empty string on success."""
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = self._client.request(Call(url=f"{self.url}/load_lora_adapter", body=body, purpose=f"adapter {folder}"))
        return "" if answer.is_success else redacted(answer.content.decode(errors="replace"))[:500]

    def _weight_version(self) -> str | None:
        """Return the name of the server's weights, or None when it has no development endpoints."""
        answer = self._client.request(Call(method="GET", url=f"{self.root}/weight_info", deadline_s=STATUS_S))
        return answer.read(WeightInfo).weight_version if answer.is_success else None

    def _reload(self, folder: Path, digest: str) -> None:
        """Load new weights without a restart, drop cached prefixes of the old ones, and set the version.

        The version is set last, so that it implies both.
        """
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        if self._adapts():
            raise MismatchError(
                f"{self.url} was started with --enable-lora, and reload_weights leaves such a server's weights as they "
                f"are; start it with {folder}, or without --enable-lora"
            )
        self._develop("update_weight_version", {"new_version": "loading"})
        self._develop("collective_rpc", arguments, deadline_s=WORK_S)
        if not self._develop("reset_prefix_cache", None).read(CacheReset).success:
            raise EngineError(f"{self.url} did not drop its cached prefixes: is somebody else using it? Run again")
        self._develop("update_weight_version", {"new_version": digest})

    def _develop(self, path: str, body: Mapping[str, Any] | None, deadline_s: float = STATUS_S) -> Answer:
        """Return the answer of a development endpoint. Raises EngineError when the request fails."""
        return self._client.request(Call(url=f"{self.root}/{path}", body=body, deadline_s=deadline_s)).require_success()

    def _adapts(self) -> bool:
        """Check if the server was started with support for adapters; it has development endpoints."""
        call = Call(method="GET", url=f"{self.root}/server_info?config_format=json", deadline_s=STATUS_S)
        return bool(self._client.request(call).read(ServerInfo).vllm_config.lora_config)

    def close(self) -> None:
        self._client.close()


def read_prompt_logprobs(answer: Answer, ids: list[int], k: int, vocab_size: int) -> list[dict[int, tuple[int, float]]]:
    """Read the answer to `reading`: {token: (rank, log-prob)} for every position of the text but the first.

    Raises EngineError unless every token of the text and the k likeliest are there, with log-probs that a model can
    have.
    """
    rows = answer.read(ReadTexts).choices[0].prompt_logprobs
    if len(rows) != len(ids):
        raise answer.refused(f"prompt_logprobs has {len(rows)} rows for {len(ids)} tokens")
    return [
        _read_row(answer, position, ids[position], rows[position], k, vocab_size) for position in range(1, len(ids))
    ]


def _read_row(
    answer: Answer, position: int, token: int, row: dict[int, RankedLogprob] | None, k: int, vocab_size: int
) -> dict[int, tuple[int, float]]:
    where = f"prompt_logprobs.{position}"
    if row is None:
        raise answer.refused(f"{where} is null; only the first token of a text has no log-prob")
    if token not in row:
        raise answer.refused(f"{where} has no log-prob of token {token}, which the text has there")
    if (highest := max(row)) >= vocab_size:
        raise answer.refused(f"{where} has token {highest} of a vocabulary of {vocab_size}")
    if (ranked := sum(entry.rank <= k for entry in row.values())) < k:
        raise answer.refused(
            f"{where} has {ranked} of the {k} likeliest tokens, with ranks from 1; start the server with a "
            f"--max-logprobs of at least {k}"
        )
    try:
        values = {other: checked_logprob(entry.logprob, other) for other, entry in row.items()}
        check_mass(list(values.values()))
    except ValueError as error:
        raise answer.refused(f"{where}: {error}") from None
    return {other: (entry.rank, values[other]) for other, entry in row.items()}


def _next_step(said: str) -> str:
    """Return the change to make at a server that refuses an adapter, by its message."""
    if _MISSING in said:
        return "it does not see that folder; share the disk, under the same path"
    if "max_lora_rank" in said:
        return "start it with a larger --max-lora-rank"
    if "not enabled" in said:
        return "start it with --enable-lora"
    if '"detail":"Not Found"' in said:
        return "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
    return "merge the adapter and serve the merged form, or see docs/engines.md"
