"""Errors of an object store by cause: no answer, refused credentials, no bucket.

Of a refusal only status and error code are passed on: its text may hold access keys and the signed string.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mopd_dataplane.errors import DeadlineError, InputError, MopdError, ResourceError, UnknownNameError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_RETRIES = re.compile(r"after (\d+) retries")
_OF_THE_NETWORK = ("performing", "error sending request", "credential", "retries", "error decoding response body")
"""Words in messages of the object-store client; an error without any of them has another cause."""
_NO_CREDENTIALS = ("credential", "no providers in chain", "metadata endpoint", "security-credentials")
_WHERE_FROM = (
    "they come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or from the role of this machine "
    "(docs/storage.md, 'Object stores')"
)
_CONTINUE = "nothing that was acknowledged is lost: run the same command again to continue"


def network_failure(where: str, error: BaseException) -> MopdError | None:
    """Return the error to raise for one of the object store; None for others, and for those about missing files."""
    text = str(error)
    if isinstance(error, MopdError) or not any(word in text for word in _OF_THE_NETWORK):
        return None
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    if status == 412 or (isinstance(error, FileNotFoundError) and "NoSuchBucket" not in text):
        return None
    code = match[1] if (match := _CODE.search(text)) else ""
    answer = " ".join(part for part in (str(status or ""), code) if part)
    if code == "NoSuchBucket":
        return UnknownNameError(f"{where}: the object store has no such bucket; make it first, or correct the URI")
    if status in (401, 403):
        return InputError(f"{where}: the object store refuses these credentials ({answer}); {_WHERE_FROM}")
    if not status and any(word in text.lower() for word in _NO_CREDENTIALS):
        return InputError(f"{where}: no credentials for the object store; {_WHERE_FROM}")
    if status == 507:
        return ResourceError(f"{where}: the object store is full ({answer}); nothing became visible; make room, retry")
    if status and status < 500 and status not in (408, 429):
        return ResourceError(f"{where}: the object store refuses the request ({answer}); {_CONTINUE}")
    tried = f" after {match[1]} retries" if (match := _RETRIES.search(text)) else ""
    said = f"says {answer}" if answer else "does not answer"
    return DeadlineError(f"{where}: the object store {said}{tried}; {_CONTINUE}")


@contextmanager
def translate_network_errors(where: str) -> Iterator[None]:
    """Turn an object store's silence or refusal into an error of this package; other errors pass."""
    try:
        yield
    except Exception as error:
        if failure := network_failure(where, error):
            raise failure from None
        raise
