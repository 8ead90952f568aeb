"""A sample on a terminal: with colours where the terminal has them, else with words and numbers."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mopd_dataplane.query.show import BIN_EDGES, SampleView, Token, disagreements, strength
from mopd_dataplane.query.text import count, number, one_line, size, visible

STYLES = {
    -4: "white on #b2182b", -3: "black on #d6604d", -2: "black on #f4a582", -1: "black on #fddbc7", 0: "",
    1: "black on #d1e5f0", 2: "black on #92c5de", 3: "black on #4393c3", 4: "white on #2166ac",
}  # fmt: skip
"""Diverging from red (the teacher's log-prob is lower) to blue (higher)."""
NOT_TRAINED = "dim italic"
STRONGEST = 8


def render(view: SampleView) -> Group:
    """The whole page."""
    parts: list[RenderableType] = [_facts(view), _panel("prompt", visible(view.prompt)), _response(view), _legend(view)]
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
        "reward": ", ".join(f"{number(r['reward'])} ({r['verifier']})" for r in view.rewards) or "none recorded",
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


def _compared(view: SampleView, token: Token) -> float | None:
    """The value that colours a token: the log-ratio, or the teacher's log-prob if the sampler's is not known."""
    return token.log_ratio if view.has_sampler_logprobs else token.teacher_logprob


def _panel(title: str, body: str) -> Panel:
    return Panel(Text(body), title=title, title_align="left", border_style="dim")


def _legend(view: SampleView) -> Text:
    if not view.teacher:
        return Text("no teacher log-probs are stored for this sample, so its tokens have no colour\n", style="dim")
    alone = not view.has_sampler_logprobs
    legend = Text(
        "teacher log-prob, nats (the sampler's are not known):  " if alone else "teacher − sampler log-prob, nats:  "
    )
    edges = [f"{edge:g}" for edge in BIN_EDGES]
    labels = {-4: f"< −{edges[3]}", -3: f"−{edges[2]}", -2: f"−{edges[1]}", -1: f"−{edges[0]}", 0: "0"}
    labels |= {1: edges[0], 2: edges[1], 3: edges[2], 4: f"> {edges[3]}"}
    for level, label in labels.items():
        if alone and level > 0:
            continue
        legend.append(f" {label} ", style=STYLES[level])
    if not all(token.trained for token in view.tokens):
        legend.append("   ")
        legend.append("not trained on", style=NOT_TRAINED)
    return legend.append("\n")


def _strongest(view: SampleView) -> Table:
    table = _titled(
        "where teacher and sampler differ most" if view.has_sampler_logprobs else "least likely for its teacher"
    )
    for name in ("position", "token", "sampler", "teacher", "difference"):
        table.add_column(name, justify="left" if name == "token" else "right")
    if view.has_sampler_logprobs:
        strongest = disagreements(view.tokens, STRONGEST)
    else:
        scored = [token for token in view.tokens if token.teacher_logprob is not None]
        strongest = sorted(scored, key=lambda token: token.teacher_logprob or 0.0)[:STRONGEST]
    for token in strongest:
        table.add_row(*_strong_row(token))
    return table


def _titled(title: str) -> Table:
    return Table(
        box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold", header_style="dim"
    )


def _strong_row(token: Token) -> list[Text]:
    ratio = token.log_ratio
    values = [
        str(token.position),
        repr(one_line(token.text)),
        number(token.sampler_logprob),
        number(token.teacher_logprob),
    ]
    return [*map(Text, values), Text("–" if ratio is None else f"{ratio:+.3f}", style=STYLES[strength(ratio)])]


def _lineage(view: SampleView) -> list[RenderableType]:
    if not view.scores:
        signals: Table | Text = Text("signals: none; no teacher has scored this sample")
    else:
        signals = _titled("signals")
        for name in ("teacher", "kind", "codec", "positions", "bytes", "reverse KL,\nnat/token"):
            signals.add_column(name, justify="left" if name in ("teacher", "kind", "codec") else "right")
        for row in view.scores:
            figures = [count(row["rows"]), size(row["bytes"]), number(row["mean_reverse_kl"], 4)]
            signals.add_row(*(Text(one_line(v)) for v in [row["teacher"], row["kind"], row["codec"], *figures]))
    if not view.uses:
        return [signals, Text("trained on: not yet planned")]
    uses = _titled("trained on")
    for name in ("stage", "window", "plan", "pack", "step", "from version"):
        uses.add_column(name, justify="left" if name in ("stage", "plan") else "right")
    for row in view.uses:
        step = "planned" if row["step"] is None else str(row["step"])
        version = "–" if row["policy_version"] is None else str(row["policy_version"])
        values = [row["stage"], str(row["window"]), row["plan_digest"][:12], str(row["pack"]), step, version]
        uses.add_row(*(Text(one_line(value)) for value in values))
    return [signals, uses]
