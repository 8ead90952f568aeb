"""Episodes of prime-rl and verifiers: a graph of messages, of which every path from a root to a leaf is a sample.

The format is `Trace` of verifiers 0.4 (verifiers/v1/trace.py, version 1). A node holds the tokens that its message
adds, a mask of those that the policy sampled, and for these only the sampler's log-probs. If a reference model scored
them, its log-probs are there too. verifiers writes log-probs with four decimals unless it is configured otherwise.
"""

from collections.abc import Iterator

from mopd_dataplane.errors import InputError
from mopd_dataplane.interchange.row_files import Fields, floats, integer, integers, number, objects, part, text
from mopd_dataplane.interchange.rows import Row, as_response, drawn, finish_reason, read_messages

TRACE_VERSION = 1


def read_traces(fields: Fields, location: str) -> Iterator[Row]:
    """Read every trainable path of every trace of an episode, or of a single trace.

    Raises InputError for another version, a parent that is no earlier node, or values that do not fit a mask.
    """
    alone = "traces" not in fields
    for trace in [fields] if alone else objects(fields, "traces", location):
        version = trace.get("version", TRACE_VERSION)
        if version != TRACE_VERSION:
            raise InputError(f"{location}: trace version {version!r:.20}; this reads version {TRACE_VERSION}")
        if part(trace, "agent", location).get("trainable") is False:
            continue
        nodes = objects(trace, "nodes", location)
        for leaf in _leaves(nodes, location):
            path = _path(nodes, leaf)
            if any(nodes[step].get("sampled") is True for step in path):
                yield _row({} if alone else fields, trace, path, location)


def _leaves(nodes: list[Fields], location: str) -> list[int]:
    """Return the nodes without a successor, except attempts at a shorter context that were never used."""
    parents, attempts, taken_up = set(), set(), set()
    for place_of, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is not None and (not isinstance(parent, int) or not 0 <= parent < place_of):
            raise InputError(
                f"{location}: nodes[{place_of}].parent is {parent!r:.20}, expected null or an earlier node"
            )
        parents.add(parent)
        for link in objects(node, "semantic_parents", location):
            if link.get("type") == "compaction":
                taken_up.add(link.get("node"))
            elif link.get("type") == "compaction_attempt":
                attempts.add(place_of)
    return [leaf for leaf in range(len(nodes)) if leaf not in parents and leaf not in attempts - taken_up]


def _path(nodes: list[Fields], leaf: int) -> list[int]:
    path = [leaf]
    while (parent := nodes[path[-1]].get("parent")) is not None:
        path.append(parent)
    return path[::-1]


def _row(episode: Fields, trace: Fields, path: list[int], location: str) -> Row:
    nodes = [trace["nodes"][step] for step in path]
    environment = part(episode, "env", location)
    work = part(part(episode, "run", location), "work", location)
    calls = [call for call in objects(trace, "calls", location) if call.get("node") == path[-1]]
    sampling = [call["sampling"] for call in calls if isinstance(call.get("sampling"), dict)]
    row = Row(
        location=location,
        domain=text(environment, "name", location, default="") or text(environment, "id", location, default=""),
        iteration=integer(work, "step", location),
        turns=sum(node.get("sampled") is True for node in nodes),
        rewards=_reward(trace, location),
        sample={
            **(finish_reason(calls[-1].get("finish_reason")) if calls else {}),
            **(drawn(sampling[-1], location) if sampling else {}),
        },
    )
    if all(node.get("token_ids") for node in nodes if node.get("sampled") is True):
        _tokens(row, nodes, location)
    else:
        _texts(row, nodes, location)
    return row


def _tokens(row: Row, nodes: list[Fields], location: str) -> None:
    ids: list[int] = []
    mask: list[int] = []
    sampler: list[float] | None = []
    reference: list[float] | None = []
    for node in nodes:
        token_ids = integers(node.get("token_ids") or [], "nodes.token_ids", location)
        own = [int(bool(flag)) for flag in node.get("mask") or [0] * len(token_ids)]
        if len(own) != len(token_ids):
            raise InputError(
                f"{location}: a node has {len(token_ids)} tokens and a mask of {len(own)}; expected one each"
            )
        ids += token_ids
        mask += own
        sampler = _extended(sampler, node, "logprobs", own, location)
        reference = _extended(reference, node, "reference_logprobs", own, location)
    if 1 not in mask:
        raise InputError(f"{location}: the mask of every node is empty; save traces of a client that returns tokens")
    start, end = mask.index(1), len(mask) - mask[::-1].index(1)
    row.prompt_ids, row.response_ids, row.loss_mask = ids[:start], ids[start:end], mask[start:end]
    row.logprobs = None if sampler is None else sampler[start:end]
    row.teacher_logprobs = None if reference is None else reference[start:end]
    messages = [node.get("message") for node in nodes[: _first_sampled(nodes)]]
    row.prompt = read_messages(messages, "nodes.message", location) if messages else None


def _extended(
    values: list[float] | None, node: Fields, name: str, mask: list[int], location: str
) -> list[float] | None:
    """Append a node's values to those so far, with 0 for tokens that were not sampled; None once a node has no
    values."""
    logprobs = floats(node.get(name) or [], f"nodes.{name}", location)
    if logprobs and len(logprobs) != sum(mask):
        raise InputError(
            f"{location}: a node has {sum(mask)} sampled tokens and {len(logprobs)} {name}; expected one for each"
        )
    if values is None or (1 in mask and not logprobs):
        return None
    own = iter(logprobs)
    return [*values, *(next(own) if flag else 0.0 for flag in mask)]


def _texts(row: Row, nodes: list[Fields], location: str) -> None:
    """Fill in a row from messages, for an episode of a client that returns no tokens."""
    first = _first_sampled(nodes)
    for node in nodes[first:]:
        message = node.get("message")
        if isinstance(message, dict) and message.get("role") == "assistant" and node.get("sampled") is not True:
            raise InputError(
                f"{location}: the policy did not write every assistant message; such traces need token ids"
            )
    messages = read_messages([node.get("message") for node in nodes], "nodes.message", location)
    if not first:
        raise InputError(f"{location}: the trace begins with the policy's message; there is no prompt")
    row.prompt, row.response = messages[:first], as_response(messages[first:], "nodes.message", location)


def _first_sampled(nodes: list[Fields]) -> int:
    return next(place_of for place_of, node in enumerate(nodes) if node.get("sampled") is True)


def _reward(trace: Fields, location: str) -> dict[tuple[str, str], float]:
    """Return the weighted sum of the trace's rewards, as verifiers computes it; empty if nothing was scored."""
    scored = [entry for entry in part(trace, "rewards", location).values() if isinstance(entry, dict)]
    if not scored:
        return {}
    total = 0.0
    for entry in scored:
        weight = number(entry, "weight", location)
        total += (number(entry, "score", location) or 0.0) * (1.0 if weight is None else weight)
    return {("verifiers", ""): total}
