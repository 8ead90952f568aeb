"""Replies to requests that cannot be committed.

It imports neither lance nor pyarrow, whose absence may be the reason.
"""

from mopd_dataplane.errors import MopdError
from mopd_dataplane.store.group_commit.mailbox import REPLIES, REQUESTS, Mailbox
from mopd_dataplane.store.group_commit.requests import Reply, encode_reply


def refusal(error: Exception) -> Reply:
    """Return the reply that makes a writer raise this error."""
    if isinstance(error, MopdError):
        return Reply(error=type(error).__name__, message=str(error), errno=getattr(error, "errno", None) or 0)
    return Reply(error="EngineError", message=f"the batch cannot be committed: {type(error).__name__}: {error}")


def refuse_pending(mailbox: Mailbox, reply: Reply) -> None:
    """Give every request in a mailbox this reply, a refusal."""
    for name in mailbox.children(REQUESTS):
        mailbox.write(f"{REPLIES}/{name}", encode_reply(reply))
        mailbox.remove([f"{REQUESTS}/{name}"])
