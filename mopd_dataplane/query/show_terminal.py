"""A sample on a terminal: with colours where the terminal has them, else with words and numbers."""

from collections.abc import Collection, Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mopd_dataplane.query.show import BINS, SampleView, Token, disagreements, strength
from mopd_dataplane.query.text import count, number, one_line, size, visible

STYLES = {
    -4: "black on #e0641f", -3: "black on #ee9468", -2: "black on #f8bfa0", -1: "black on #fde3d3", 0: "",
    1: "black on #dceafa", 2: "black on #b0d2f1", 3: "black on #74aee2", 4: "black on #3f8fdc",
}  # fmt: skip
"""Diverging from orange (the teacher's log-prob is lower) to blue (higher), as in the viewer and the report."""
NOT_TRAINED = "dim italic"
STRONGEST = 8
TEACHER_ROW = "cyan"
ROW_CELLS = 76
"""Width at which two rows of tokens go on in the next lines."""
MOST_CHUNKS = 60
"""Chunks of the response that a page shows."""


def render(view: SampleView) -> Group:
    """The whole page."""
    prompt = Panel(Text(visible(view.prompt)), title="prompt", title_align="left", border_style="dim")
    parts: list[RenderableType] = [_facts(view), prompt, _response(view), *_rest(view), _legend(view)]
    parts += [_two_rows(view)] if view.chunks else []
    parts += [_strongest(view)] if view.teacher else []
    return Group(*parts, *_lineage(view))


def _facts(view: SampleView) -> Table:
    row = view.metadata
    lines = {
        "sample": f"{view.uid} (row {view.sample_row})",
        "domain": row["domain"] + (f" / {row['effort']}" if row["effort"] else ""),
        "prompt": row["prompt_id"],
        "policy": f"{row['policy']}, {_versions(view)}",
        "sampling": f"temperature {row['temperature']:g}, top-p {row['top_p']:g}, top-k {row['top_k'] or 'off'}",
        "length": f"{count(row['prompt_len'])} prompt + {count(row['response_len'])} response tokens, "
        f"{count(row['loss_tokens'])} trained",
        "finished": f"{row['finish_reason']}, {_interruptions(row)}",
        "reward": ", ".join(f"{number(r['reward'])} ({r['verifier']})" for r in view.rewards)
        or (f"cannot be scored: {view.unscorable}" if view.unscorable else "none recorded"),
        "reference": view.answer or "none",
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in lines.items():
        grid.add_row(Text(name, style="bold"), Text(one_line(value)))
    return grid


def _versions(view: SampleView) -> str:
    if len(view.spans) == 1:
        return f"version {view.spans[0]['version']}"
    return "versions " + ", ".join(f"{s['version']} on tokens {s['start']}–{s['end'] - 1}" for s in view.spans)


def _interruptions(row: dict[str, Any]) -> str:
    times = row["interruptions"]
    if not times:
        return "never interrupted"
    return f"interrupted {times} {'time' if times == 1 else 'times'}, resume {row['resume']}"


def _response(view: SampleView) -> Panel:
    text = Text()
    for token in view.tokens:
        style = STYLES[strength(_compared(view, token))] if token.trained else NOT_TRAINED
        text.append(visible(token.text), style=style)
    title = f"response, coloured by teacher {one_line(view.teacher)}" if view.teacher else "response"
    return Panel(text, title=Text(title), title_align="left", border_style="dim")


def _rest(view: SampleView) -> list[Text]:
    """Which tokens of a long response are on the page; nothing where all are."""
    shown, length = view.tokens, view.metadata["response_len"]
    if len(shown) == length:
        return []
    first, end = shown[0].position, shown[-1].position + 1
    more = f"; --from {end} shows the next" if end < length else ""
    return [Text(f"tokens {count(first)} to {count(end - 1)} of {count(length)}{more}", style="dim")]


def _compared(view: SampleView, token: Token) -> float | None:
    """The value that colours a token: the log-ratio, or the teacher's log-prob if the sampler's is not known."""
    return token.log_ratio if view.has_sampler_logprobs else token.teacher_logprob


def _legend(view: SampleView) -> Text:
    if not view.teacher:
        return Text("no teacher log-probs are stored for this sample, so its tokens have no colour\n", style="dim")
    alone = not view.has_sampler_logprobs
    legend = Text(
        "teacher log-prob, nats (the sampler's are not known):  " if alone else "teacher − sampler log-prob, nats:  "
    )
    for level, label in BINS.items():
        if level <= 0 or not alone:
            legend.append(f" {label} ", style=STYLES[level])
    if not all(token.trained for token in view.tokens):
        legend.append("   ").append("not trained on", style=NOT_TRAINED)
    return legend.append("\n")


def _two_rows(view: SampleView) -> Panel:
    """The first chunks of the response: the student's tokens above the teacher's own, a bar between two tokens."""
    text, first = Text(), 0
    while first < min(len(view.chunks), MOST_CHUNKS):
        rows = Text("student  "), Text("teacher  ", style=TEACHER_ROW)
        for chunk in view.chunks[first:MOST_CHUNKS]:
            base = view.tokens[0].position
            own = [one_line(token.text) for token in view.tokens[chunk.start - base : chunk.end - base]]
            cells = "│".join(own), "│".join(map(one_line, chunk.teacher_texts))
            width = max(map(cell_len, cells))
            if len(rows[0].plain) > len("student  ") and rows[0].cell_len + width > ROW_CELLS:
                break
            for row, cell in zip(rows, cells, strict=True):
                row.append(cell + " " * (width - cell_len(cell)) + "┃")
            first += 1
        text.append_text(rows[0]).append("\n").append_text(rows[1]).append("\n\n")
    text.rstrip()
    if len(view.chunks) > MOST_CHUNKS:
        text.append(f"\n\n{count(len(view.chunks) - MOST_CHUNKS)} more chunks: `mopd view`, or --json", style="dim")
    title = f"one text in two tokenizations: {count(len(view.tokens))} tokens of the student, "
    title += f"{count(sum(len(chunk.teacher_tokens) for chunk in view.chunks))} of {one_line(view.teacher)}"
    return Panel(text, title=Text(title), title_align="left", border_style="dim")


def _strongest(view: SampleView) -> Table:
    if view.has_sampler_logprobs:
        title, strongest = "where teacher and sampler differ most", disagreements(view.tokens, STRONGEST)
    else:
        scored = [token for token in view.tokens if token.teacher_logprob is not None]
        title = "least likely for its teacher"
        strongest = sorted(scored, key=lambda token: token.teacher_logprob or 0.0)[:STRONGEST]
    rows: list[list[str | Text]] = []
    for token in strongest:
        ratio = token.log_ratio
        difference = Text("–" if ratio is None else f"{ratio:+.3f}", style=STYLES[strength(ratio)])
        logprobs = number(token.sampler_logprob), number(token.teacher_logprob)
        rows.append([str(token.position), repr(one_line(token.text)), *logprobs, difference])
    return _table(title, rows, ("position", "token", "sampler", "teacher", "difference"), words=("token",))


def _table(title: str, rows: Iterable[Iterable[str | Text]], columns: Iterable[str], words: Collection[str]) -> Table:
    """words: columns that begin at the left; others hold numbers."""
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold", header_style="dim"
    )
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row))
    return table


def _lineage(view: SampleView) -> list[RenderableType]:
    signals: Table | Text = Text("signals: none; no teacher has scored this sample")
    uses: Table | Text = Text("trained on: not yet planned")
    if view.scores:
        columns = ("teacher", "kind", "codec", "positions", "bytes", "reverse KL,\nnat/token")
        scored = [
            [s["teacher"], s["kind"], s["codec"], count(s["rows"]), size(s["bytes"]), number(s["mean_reverse_kl"], 4)]
            for s in view.scores
        ]
        signals = _table("signals", scored, columns, words=columns[:3])
    if view.uses:
        planned = [
            [use["stage"], str(use["window"]), use["plan_digest"][:12], str(use["pack"]),
             "planned" if use["step"] is None else str(use["step"]),
             "–" if use["policy_version"] is None else str(use["policy_version"])]
            for use in view.uses
        ]  # fmt: skip
        columns = ("stage", "window", "plan", "pack", "step", "from version")
        uses = _table("trained on", planned, columns, words=("stage", "plan"))
    return [signals, uses]
