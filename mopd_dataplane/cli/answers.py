"""Commands that read stores: SQL, one sample, one report, two policies side by side, what tables and columns mean."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from typer import Argument, Option, Typer

from mopd_dataplane.cli.output import note, print_csv, print_grid, print_json, stdout
from mopd_dataplane.cli.register import register
from mopd_dataplane.cli.rows import print_fitting, print_table
from mopd_dataplane.errors import InputError

if TYPE_CHECKING:
    from mopd_dataplane.store.dataset import Store

PANEL = "Answers"

StoreUri = Annotated[str, Argument(metavar="STORE", help="Folder or URI of a store.")]
TokenizerFolder = Annotated[
    Path | None,
    Option("--tokenizer", metavar="DIR", help="Folder with a tokenizer.json; default: the store's policies."),
]


def query(
    store: StoreUri,
    sql: Annotated[str, Argument(metavar="SQL", help="One read-only SELECT (DuckDB).")],
    as_json: Annotated[bool, Option("--json", help="Print one JSON array of row objects.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV with a header line.")] = False,
    limit: Annotated[
        int | None, Option("--limit", min=1, help="Rows to print; default: 50 on a terminal, all for --json and --csv.")
    ] = None,
    snapshot: Annotated[
        str | None, Option("--snapshot", metavar="TAG", help="Read the rows of this pinned snapshot.")
    ] = None,
) -> None:
    """Query the tables with SQL.

    Tables: prompts, samples, tokens, teachers, scores, rewards, plans, steps, token_stats, evals, events, labels,
    changes, and signals_TEACHER_KIND.
    """
    if as_json and as_csv:
        raise InputError("give one of --json and --csv")
    _arrow_without_pandas()
    from mopd_dataplane import open_store
    from mopd_dataplane.store.read.snapshot import tagged
    from mopd_dataplane.store.sql.query import values_of

    opened = open_store(store)
    table = opened.sql(sql, tagged(opened, snapshot) if snapshot is not None else None)
    most = limit or (table.num_rows if as_json or as_csv else 50)
    rows = list(zip(*values_of(table.slice(0, min(most, table.num_rows))), strict=True))
    if as_json:
        print_json([dict(zip(table.column_names, row, strict=True)) for row in rows])
    elif as_csv:
        print_csv(table.column_names, rows)
    else:
        print_table(table.column_names, rows, total=table.num_rows)


def _arrow_without_pandas() -> None:
    """Import pyarrow's datasets as if pandas were not installed.

    pyarrow looks for pandas then, which takes as long as a query does; it looks again where a data frame is asked for.
    None in sys.modules would not do: compiled code takes it for the module.
    """
    if "pandas" in sys.modules:
        return
    sys.meta_path.insert(0, _NoPandas)
    try:
        import pyarrow.dataset  # noqa: F401
    finally:
        sys.meta_path.remove(_NoPandas)


class _NoPandas:
    @staticmethod
    def find_spec(fullname: str, path: object, target: object = None) -> None:
        """Nothing, and for pandas the end of the search."""
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not needed here", name=fullname)


def show(
    store: StoreUri,
    uid: Annotated[
        str | None,
        Argument(
            metavar="[UID]",
            help="Sample uid, or its first digits; default: of the newest iteration the farthest from its teacher.",
        ),
    ] = None,
    worst: Annotated[bool, Option("--worst", help="Show the sample with the lowest reward of all iterations.")] = False,
    disagreement: Annotated[
        bool,
        Option(
            "--disagreement", help="Show the sample whose teachers differ most, from each other or from the sampler."
        ),
    ] = False,
    random: Annotated[bool, Option("--random", help="Show a random sample.")] = False,
    domain: Annotated[
        str | None, Option("--domain", metavar="NAME", help="Choose among the samples of this domain.")
    ] = None,
    teacher: Annotated[
        str | None, Option("--teacher", metavar="NAME", help="Colour by this teacher; default: the first scored.")
    ] = None,
    tokenizer: TokenizerFolder = None,
    first: Annotated[
        int, Option("--from", metavar="POSITION", min=0, help="First response token; 20,000 are shown from there on.")
    ] = 0,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object with every token shown.")] = False,
) -> None:
    """Show one sample token by token: by its uid, or one worth seeing.

    Tokens are coloured by teacher minus sampler log-prob: blue where the teacher gives the token a higher probability,
    red where a lower one. Also reward, policy versions, interruptions, signals and lineage.
    """
    from mopd_dataplane import open_store
    from mopd_dataplane.query.ancestry import origin_of
    from mopd_dataplane.query.show import read_sample
    from mopd_dataplane.query.show_terminal import render

    opened = open_store(store)
    chosen, why = _chosen(opened, uid, {"worst": worst, "disagreement": disagreement, "random": random}, domain)
    view = read_sample(opened, chosen, teacher=teacher, tokenizer=tokenizer, first=first)
    if (origin := origin_of(opened)) is not None:
        note(f"{store} goes on from {origin.text}")
    if why:
        note(why)
    if as_json:
        print_json(view)
    else:
        stdout().print(render(view))


def _chosen(store: Store, uid: str | None, ways: dict[str, bool], domain: str | None) -> tuple[str, str]:
    """The uid that was given, or that of the sample asked for and why it is that one."""
    ways_given = [way for way, is_set in ways.items() if is_set]
    if len(ways_given) > 1 or (uid is not None and (ways_given or domain)):
        raise InputError("give a UID, or one of --worst, --disagreement and --random (with --domain if you like)")
    if uid is not None:
        return uid, ""
    from mopd_dataplane.query.pick import Pick, pick_sample

    picked = pick_sample(store, cast(Pick, ways_given[0]) if ways_given else None, domain=domain)
    return picked.uid, f"{picked.uid[:12]}: {picked.why}"


def report(
    store: StoreUri,
    out: Annotated[str | None, Option("-o", "--out", metavar="FILE", help="HTML file; path or URL.")] = None,
    tokenizer: TokenizerFolder = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object: the numbers of the report.")] = False,
) -> None:
    """Write one HTML page with plots: accuracy, reverse KL, lengths, staleness, cost, excerpts.

    The page is one file without scripts or links to elsewhere; it opens from disk, light or dark.
    """
    if out is None and not as_json:
        raise InputError("say where the report goes: -o report.html (or --json for its numbers)")
    from mopd_dataplane import open_store
    from mopd_dataplane.query.measures import measure
    from mopd_dataplane.query.report import write_report

    opened = open_store(store)
    measures = measure(opened)
    if out is not None:
        write_report(opened, out, measures=measures, tokenizer=tokenizer)
        note(f"wrote {out}")
    if as_json:
        print_json(measures.numbers())


def compare(
    a: Annotated[str, Argument(metavar="A", help="STORE, STORE#STAGE or STORE#STAGE@VERSION.")],
    b: Annotated[str, Argument(metavar="B", help="The policy to compare A with.")],
    equal: Annotated[
        Literal["answers", "tokens", "seconds"] | None,
        Option("--equal", metavar="COST", help="Choose versions of equal cost: `answers`, `tokens` or `seconds`."),
    ] = None,
    plot: Annotated[
        Path | None, Option("--plot", metavar="FILE", help="Also draw the differences: .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object with every figure.")] = False,
) -> None:
    """Compare two policies on the same held-out prompts.

    Two stores, two stages of one, or two versions. Answers are paired by prompt: difference of accuracy and of mean
    reward with 95 % intervals from a bootstrap over prompts, and McNemar's exact test. With --equal, the policy that
    has spent less is compared with the version of the other that is nearest to it in cost.
    """
    from mopd_dataplane.query.compare import compare_policies, plot_comparison
    from mopd_dataplane.query.sections import comparison_grid

    comparison = compare_policies(a, b, equal=equal)
    if plot is not None:
        plot_comparison(comparison, plot)
        note(f"wrote {plot}")
    if as_json:
        print_json({**vars(comparison), "rows": [{**vars(row), "verdict": row.verdict} for row in comparison.rows]})
        return
    note(f"A = {comparison.a}: {comparison.a_spent}\nB = {comparison.b}: {comparison.b_spent}")
    grid = comparison_grid(comparison)
    print_grid(grid)
    note(grid.caption)


def schema(
    store: StoreUri,
    table: Annotated[str | None, Argument(metavar="[TABLE]", help="Table, view or macro; default: list them.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON array of objects.")] = False,
) -> None:
    """Say what the tables of a store hold, or what the columns of one mean.

    Views and macros answer common questions: decoded responses, accuracy, teachers side by side. `mopd query STORE
    "describe TABLE"` lists the columns of a table or view too.
    """
    from mopd_dataplane import open_store
    from mopd_dataplane.store.read.describe import columns, relations

    opened = open_store(store)
    if table is not None:
        listing = columns(opened, table)
        if as_json:
            print_json(listing)
        else:
            print_fitting(
                ("column", "type", "unit", "meaning"), [(c.name, c.type, c.unit, c.doc) for c in listing], tall=True
            )
        return
    listed = list(relations(opened))
    if as_json:
        print_json(listed)
        return
    print_fitting(
        ("name", "kind", "rows", "what it holds"), [(r.name, r.kind, r.rows, r.doc) for r in listed], tall=True
    )
    note(f"columns of one: mopd schema {store} NAME")


def add_to(app: Typer) -> None:
    by_domain = "select domain, count(*), avg(reward) from samples join rewards using (uid) group by 1"
    register(app, query, f'mopd query runs/quickstart "{by_domain}"', panel=PANEL)
    examples = ("mopd show runs/quickstart", "mopd show runs/quickstart --worst --domain spiral_matrix")
    register(app, show, *examples, panel=PANEL)
    register(app, report, "mopd report runs/quickstart -o report.html", panel=PANEL)
    versions = "mopd compare 'runs/quickstart#student@6' 'runs/quickstart#student@12' --plot difference.svg"
    register(app, compare, "mopd compare runs/a runs/b --equal tokens", versions, panel=PANEL)
    register(app, schema, "mopd schema runs/quickstart", "mopd schema runs/quickstart samples", panel=PANEL)
