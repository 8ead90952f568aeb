"""A running vLLM server by its URL: what it serves, which weights it has, and plain requests.

The API key comes from the environment variable VLLM_API_KEY and is sent in the request header only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_dataplane.base.extras import require
from mopd_dataplane.base.secrets import redacted
from mopd_dataplane.errors import EngineError, InputError, MismatchError
from mopd_dataplane.models.adapter_files import base_folder, is_adapter
from mopd_dataplane.models.hf import weights_digest
from mopd_dataplane.models.vllm_adapters import check_for_vllm

if TYPE_CHECKING:
    import httpx2

KEY_VARIABLE = "VLLM_API_KEY"
REQUEST_S = 600.0
"""Longest time one plain request may take."""
_CONNECT_S = 10.0
_ADAPTER = "mopd-"
"""What the names of adapters begin with that a run has loaded into a server."""
_MISSING = "No adapter found"
"""In what a server says of a folder that it does not see."""
_UNKNOWN = ("", "default")
"""Weight versions that say nothing: none, and what a server has before anybody names one."""


class VllmServer:
    """One vLLM server, by the URL of its API root, as http://127.0.0.1:8000/v1.

    Raises InputError for an impossible URL or without httpx2, EngineError when nobody answers there.
    """

    def __init__(self, url: str) -> None:
        require(["httpx2"])
        import httpx2

        base = url.rstrip("/")
        if not base.startswith(("http://", "https://")) or not base.endswith("/v1"):
            raise InputError(f"engine url {url!r}: give the server's API root, like http://127.0.0.1:8000/v1")
        self.url = base
        self.headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}
        self._client = httpx2.Client(headers=self.headers, timeout=httpx2.Timeout(REQUEST_S, connect=_CONNECT_S))
        served = self.get("models")["data"]
        if not served:
            self.close()
            raise EngineError(f"{self.url} serves no model; start it with the policy's folder")
        self.name = str(served[0]["id"])
        """Name of the served model; every request carries it."""
        self.folder = str(served[0].get("root") or self.name)
        """Path or name from which the server loaded the model."""
        self.context_length = int(served[0].get("max_model_len") or 0)

    def get(self, path: str) -> Any:
        """JSON of a path below the API root. Raises EngineError."""
        return self._answered("GET", f"{self.url}/{path}", None).json()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON answer of a path below the API root. Raises EngineError."""
        return self._answered("POST", f"{self.url}/{path}", body).json()

    def post_bytes(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Raw answer of a path beside the API root. Raises EngineError."""
        return self._answered("POST", f"{self.url.removesuffix('/v1')}/{path}", body).content

    def serve(self, folder: Path, digest: str, *, reload: bool) -> None:
        """Make sure that the server has the weights of a policy folder.

        It has them if its weight version is the policy's digest, or if it was started with that folder and no version
        was set afterwards. Otherwise, with `reload`, it is told to load them. Raises MismatchError.
        """
        version = self._weight_version()
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
        """Make sure that the server has a policy or a teacher; the name under which requests ask for it.

        A whole model is what the server serves, see serve(). An adapter is loaded beside its base, which must be what
        the server serves, under a name made of its digest. Raises MismatchError, EngineError.
        """
        if not is_adapter(folder):
            self.serve(folder, digest, reload=reload)
            return self.name
        check_for_vllm(folder)
        base = base_folder(folder)
        self.serve(base, weights_digest(base), reload=False)
        name = f"{_ADAPTER}{digest[:32]}"
        known = {str(one["id"]) for one in self.get("models")["data"]}
        if name not in known and (said := self._refused_adapter(name, folder.resolve())):
            raise MismatchError(f"{self.url} does not take adapter {folder}: {_next_step(said)} (it says: {said})")
        return name

    def require_adapters(self) -> None:
        """Raise MismatchError unless the server can be given adapters while it runs."""
        said = self._refused_adapter(f"{_ADAPTER}probe", Path("/nowhere"))
        if _MISSING not in said:
            raise MismatchError(f"{self.url} takes no adapters while it runs: {_next_step(said)} (it says: {said})")

    def forget(self, name: str) -> None:
        """Have the server forget an adapter; one that it does not know is none of our concern."""
        self._request("POST", f"{self.url}/unload_lora_adapter", {"lora_name": name})

    def _refused_adapter(self, name: str, folder: Path) -> str:
        """Load an adapter; what the server says against it, empty when it has it."""
        answer = self._request("POST", f"{self.url}/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        return redacted(answer.text)[:500] if answer.is_error else ""

    def _weight_version(self) -> str | None:
        """None when the server does not say."""
        answer = self._request("GET", f"{self.url.removesuffix('/v1')}/weight_info", None)
        return str(answer.json()["weight_version"]) if answer.is_success else None

    def _reload(self, folder: Path, digest: str) -> None:
        """Load new weights in place, drop cached prefixes of the old ones, and set the version last, so that it implies
        both."""
        base = self.url.removesuffix("/v1")
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        if self._adapts():
            raise MismatchError(
                f"{self.url} was started with --enable-lora, and reload_weights leaves such a server's weights as they "
                f"are; start it with {folder}, or without --enable-lora"
            )
        self._answered("POST", f"{base}/update_weight_version", {"new_version": "loading"})
        self._answered("POST", f"{base}/collective_rpc", arguments)
        if not self._answered("POST", f"{base}/reset_prefix_cache", None).json()["success"]:
            raise EngineError(f"{self.url} did not drop its cached prefixes: is somebody else using it? Run again")
        self._answered("POST", f"{base}/update_weight_version", {"new_version": digest})

    def _adapts(self) -> bool:
        """Whether the server was started ready for adapters; it has development endpoints."""
        url = f"{self.url.removesuffix('/v1')}/server_info?config_format=json"
        return bool(self._answered("GET", url, None).json()["vllm_config"].get("lora_config"))

    def _request(self, method: str, url: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        import httpx2

        try:
            return self._client.request(method, url, json=body)
        except httpx2.HTTPError as error:
            raise EngineError(
                f"{self.url} does not answer ({type(error).__name__}: {redacted(str(error))}); start it, then run "
                "again to continue"
            ) from error

    def _answered(self, method: str, url: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        answer = self._request(method, url, body)
        if answer.is_error:
            raise EngineError(f"{url} answered {answer.status_code}: {redacted(answer.text)[:500]!r}")
        return answer

    def close(self) -> None:
        self._client.close()


def _next_step(said: str) -> str:
    """Change to make at a server that refuses an adapter, by its message."""
    if _MISSING in said:
        return "it does not see that folder; share the disk, under the same path"
    if "max_lora_rank" in said:
        return "start it with a larger --max-lora-rank"
    if "not enabled" in said:
        return "start it with --enable-lora"
    if '"detail":"Not Found"' in said:
        return "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
    return "merge the adapter and serve the merged form, or see docs/engines.md"
