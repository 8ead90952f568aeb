"""Files by path or by URL: every file that a user names, except the store itself, is read and written through this
module.

A URL is anything that fsspec opens: `hf://datasets/…`, `s3://`, `gs://`, `az://`, `https://` (reading only),
`memory://`, and the protocols of its plug-ins. S3, Google and Azure go through obstore if it is installed, so that a
file and a store use the same credentials. Options of a protocol are fsspec's own: FSSPEC_S3='{"config": {…}}' in the
environment, or a file under ~/.config/fsspec. Writing is atomic as for local files (files.py): a name has its whole
content, or does not exist.
"""

import hashlib
import os
import posixpath
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from mopd_dataplane.base.files import publish_file, publish_folder
from mopd_dataplane.base.processes import scratch_folder
from mopd_dataplane.errors import DeadlineError, InputError, MopdError, ResourceError, UnknownNameError

PathOrUrl = str | Path

_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "adl", "abfs", "abfss")
_WHOLE_WRITES = (*_OBJECT_STORES, "hf", "memory")
"""Protocols under which a name appears only with its whole content; elsewhere a file is renamed when it is complete."""
_READ_ONLY = ("http", "https", "github", "git", "zip", "tar")
_WEB = ("http://", "https://")
_GLOB = set("*?[")


def is_url(location: PathOrUrl) -> bool:
    """Check if a location is a URL; `file://` is a path.

    >>> is_url("s3://bucket/a.jsonl"), is_url("runs/a.jsonl"), is_url("file:///tmp/a")
    (True, False, False)
    """
    return "://" in str(location) and not str(location).startswith("file://")


def local_path(location: PathOrUrl) -> Path:
    """Return the path of a location that is no URL."""
    return Path(str(location).removeprefix("file://"))


def joined(folder: PathOrUrl, name: str) -> str:
    """Resolve a relative path in a folder, given by path or URL; `..` goes up.

    >>> joined("s3://bucket/jobs/", "job.toml")
    's3://bucket/jobs/job.toml'
    """
    if not is_url(folder):
        return str(local_path(folder) / name)
    protocol, _, path = str(folder).partition("://")
    return f"{protocol}://" + posixpath.normpath(f"{path}/{name}").lstrip("/")


def folder_of(location: PathOrUrl) -> str:
    """Return the folder of a file."""
    return str(location).rpartition("/")[0] if is_url(location) else str(local_path(location).parent)


def suffix_of(location: PathOrUrl) -> str:
    """Return the suffix of a file's name, such as `.jsonl`, without a URL's query."""
    return Path(str(location).partition("?")[0] if str(location).startswith(_WEB) else str(location)).suffix


def is_file(location: PathOrUrl) -> bool:
    """Check if a file exists. Raises the errors of read_file, except for a missing file."""
    if not is_url(location):
        return local_path(location).is_file()
    with _reached(location) as (system, path):
        return bool(system.isfile(path))


def exists(location: PathOrUrl) -> bool:
    """Check if a file or a folder exists. Raises the errors of read_file, except for a missing file."""
    if not is_url(location):
        return local_path(location).exists()
    with _reached(location) as (system, path):
        return bool(system.exists(path))


def read_file(location: PathOrUrl, most: int | None = None) -> bytes:
    """Read a file, or its first `most` + 1 bytes if a bound is set.

    Raises UnknownNameError when the file does not exist, InputError for a URL that cannot be opened or is refused,
    DeadlineError or ResourceError when its server does not answer or fails.
    """
    with open_file(location) as file:
        try:
            return file.read() if most is None else file.read(most + 1)
        except OSError as error:
            problem = error.strerror or str(error)
            raise InputError(f"{location} cannot be read as a file: {problem}; give another file") from None


@contextmanager
def open_file(location: PathOrUrl) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, seekable.

    A file at a URL is downloaded first, since not every server supports byte ranges. Raises the errors of read_file.
    """
    if not is_url(location) and not local_path(location).is_file():
        raise UnknownNameError(f"no file {local_path(location)}; check the path")
    with local_copy(location) as path, path.open("rb") as file:
        yield file


def files_at(location: PathOrUrl, suffixes: Iterable[str]) -> list[str]:
    """List the files with these suffixes: the file itself, those under a folder, or those that match a pattern.

    A pattern has `*`, `?` or `[…]`. Files are sorted by name, numbers by value. Raises InputError when there is none.
    """
    endings = tuple(suffixes)
    paths = _remote_files(location) if is_url(location) else _local_files(str(local_path(location)))
    fitting = [file for file in paths if suffix_of(file) in endings]
    if not fitting:
        raise InputError(
            f"{location}: no {' or '.join(endings)} file there; give a file, a folder that holds some, or a pattern"
        )
    return sorted(fitting, key=lambda file: (len(Path(file).name), file))


def _local_files(location: str) -> list[str]:
    import glob

    if os.path.isfile(location):
        return [location]
    if os.path.isdir(location):
        return [str(file) for file in Path(location).rglob("*") if file.is_file()]
    return [file for file in glob.glob(location, recursive=True) if os.path.isfile(file)]


def _remote_files(location: PathOrUrl) -> list[str]:
    if str(location).startswith(_WEB):  # here a `?` begins a query, and few servers list a folder
        return [str(location)]
    with _reached(location) as (system, path):
        if _GLOB & set(path):
            files = [name for name in system.glob(path) if system.isfile(name)]
        else:
            files = [path] if system.isfile(path) else system.find(path)
        return [str(system.unstrip_protocol(name)) for name in files]


@contextmanager
def local_copy(location: PathOrUrl) -> Iterator[Path]:
    """Provide a file or a folder as a local path: its own, or a copy of a URL's for as long as the context.

    Raises the errors of read_file.
    """
    if not is_url(location):
        yield local_path(location)
        return
    with tempfile.TemporaryDirectory(prefix="mopd-") as scratch:
        target = Path(scratch) / Path(str(location).partition("?")[0]).name
        _download(location, target)
        yield target


def kept_copy(location: PathOrUrl, cache_folder: Path) -> Path:
    """Provide a folder behind a URL as a local folder in the cache, downloaded once for each state of its listing.

    Names, sizes and the server's tags of the files identify the state. Raises the errors of read_file.
    """
    with _reached(location) as (system, path):
        listing = system.find(path, detail=True)
        if not listing:
            raise UnknownNameError(f"nothing at {location}; check the path")
        state = sorted(
            (name, entry.get("size"), str(entry.get("e_tag") or entry.get("ETag") or entry.get("blob_id") or ""),
             str(entry.get("last_modified") or entry.get("created") or ""))
            for name, entry in listing.items()
        )  # fmt: skip
    folder = cache_folder / hashlib.sha256(repr((str(location), state)).encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    cache_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder, prefix=".arriving-") as scratch:
        arrived = Path(scratch) / "folder"
        _download(location, arrived)
        try:
            publish_folder(arrived, folder)
        except OSError:
            if not folder.is_dir():  # another process has downloaded it meanwhile
                raise
    return folder


def _download(location: PathOrUrl, target: Path) -> None:
    """Download a file or a folder of a URL to a new local path."""
    with _reached(location) as (system, path):
        if str(location).startswith(_WEB) or system.isfile(path):
            system.get_file(path, str(target))
            return
        names = system.find(path)
        if not names:
            raise UnknownNameError(f"nothing at {location}; check the path")
        root = path.rstrip("/") + "/"
        for name in names:
            below = name.removeprefix(root)
            file = target / below
            if below == name or not file.resolve().is_relative_to(target.resolve()):
                raise InputError(f"{location} lists {name!r:.80}, which does not lie under it")
            file.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(name, str(file))


def write_file(location: PathOrUrl, content: bytes) -> None:
    """Replace a small file; a reader sees the old content or the new.

    Raises the errors of read_file, and InputError for a location that cannot be written to.
    """
    if not is_url(location):
        publish_file(local_path(location), content)
        return
    with tempfile.TemporaryDirectory(prefix="mopd-") as scratch:
        staging = Path(scratch) / "content"
        staging.write_bytes(content)
        _upload(staging, location)


def check_new(location: PathOrUrl) -> None:
    """Check that a location is free and can be written to. Raises InputError if not."""
    if is_url(location):
        _check_writable(location)
    if exists(location):
        raise InputError(f"{location} exists; give a path that does not exist")
    if not is_url(location):
        above = next(folder for folder in local_path(location).absolute().parents if folder.exists())
        if not above.is_dir():
            raise InputError(f"{location} cannot be written: {above} is a file, not a folder; give another path")


@contextmanager
def scratch_beside(location: PathOrUrl) -> Iterator[Path]:
    """Create a temporary folder on the disk of a local location, or anywhere for a URL; see publish_new."""
    parent = None if is_url(location) else local_path(location).parent
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(parent) as scratch:
        yield scratch


def publish_new(staging: Path, location: PathOrUrl) -> None:
    """Move a finished file or folder of scratch_beside to its final location, durably.

    A folder is copied to a URL file by file, with the JSON files at its top last, because readers begin with them.
    """
    if not is_url(location):
        publish_folder(staging, local_path(location))
        return
    if staging.is_file():
        _upload(staging, location)
        return
    files = [file for file in staging.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: (file.suffix == ".json" and file.parent == staging, file)):
        _upload(file, joined(location, file.relative_to(staging).as_posix()))


def _upload(file: Path, location: PathOrUrl) -> None:
    _check_writable(location)
    protocol = str(location).partition("://")[0]
    with _reached(location) as (system, path):
        if protocol not in _OBJECT_STORES:
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
        if protocol in _WHOLE_WRITES:
            system.put_file(str(file), path)
            return
        beside = f"{path}.{os.urandom(4).hex()}.tmp"
        try:
            system.put_file(str(file), beside)
            system.mv(beside, path)
        except BaseException:
            if system.exists(beside):
                system.rm_file(beside)
            raise


def _check_writable(location: PathOrUrl) -> None:
    if (protocol := str(location).partition("://")[0]) in _READ_ONLY:
        raise InputError(
            f"{location} cannot be written: {protocol}:// can only be read; give a local file, or an object store's URL"
        )


@contextmanager
def _reached(location: PathOrUrl) -> Iterator[tuple[Any, str]]:
    """Provide (file system, path in it) of a URL, and turn errors inside the block into this package's own.

    Messages of servers may hold credentials, so only their kind is passed on.
    """
    url = str(location)
    host = url.partition("://")[2].partition("/")[0]
    if "@" in host and not url.startswith("hf://"):
        raise InputError(
            "a URL must not carry a user or a password, which would be stored; put them into environment variables "
            "(docs/storage.md)"
        )
    try:
        import fsspec

        _prefer_obstore(url.partition("://")[0])
        yield fsspec.core.url_to_fs(url)
    except (MopdError, GeneratorExit):
        raise
    except FileNotFoundError:
        raise UnknownNameError(f"nothing at {url}; check the name") from None
    except (ImportError, ValueError) as error:
        is_named = isinstance(error, ImportError) or "rotocol" in str(error)
        if not is_named:
            raise
        raise InputError(
            f"{url}: nothing here opens {url.partition('://')[0]}:// ({error!s:.120}); give a path, or a URL that "
            "begins with hf://, s3://, gs://, az:// or https://; other protocols need a package: "
            "pip install 'mopd-dataplane[files]', or what the message names"
        ) from None
    except PermissionError:
        raise InputError(f"{url}: access is refused; see docs/storage.md for where credentials come from") from None
    except TimeoutError:
        raise DeadlineError(f"{url}: no answer in time; run the same command again") from None
    except (ConnectionError, socket.gaierror) as error:
        raise DeadlineError(f"{url}: no server answers ({error.strerror}); check the name, or run again") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        status = getattr(error, "status", "") or getattr(getattr(error, "response", None), "status_code", "")
        what = f"{type(error).__name__} {status}".strip()
        if status in (401, 403):
            raise InputError(f"{url}: access is refused ({what})") from None
        if status == 404:
            raise UnknownNameError(f"nothing at {url}; check the name") from None
        raise ResourceError(f"{url}: its server fails ({what}); run the same command again") from None


_CLIENTS = ("aiohttp", "obstore", "_obstore", "botocore", "aiobotocore", "gcsfs", "adlfs", "huggingface_hub", "httpx",
            "ftplib", "paramiko")  # fmt: skip
"""Top-level modules whose exceptions come from a server or its client."""


@cache
def _prefer_obstore(protocol: str) -> None:
    """Use obstore for object stores if it is installed: it reads the same environment variables as the store."""
    if protocol in _OBJECT_STORES and find_spec("obstore"):
        from obstore.fsspec import register

        register(protocol)
