"""Commands that measure the data plane, each beside the machine's own limit in the same run."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

from typer import Option, Typer

from mopd_dataplane.base.files import check_target
from mopd_dataplane.bench import size as sizes
from mopd_dataplane.bench.fleet_settings import Fleet
from mopd_dataplane.cli import bench_models
from mopd_dataplane.cli.bench_models import Folder
from mopd_dataplane.cli.output import note, print_facts, print_json
from mopd_dataplane.cli.register import AsJson, register
from mopd_dataplane.cli.rows import print_fitting
from mopd_dataplane.errors import InputError


def plan(
    samples: Annotated[int, Option("--samples", min=1000, help="Samples to plan.")] = 1_000_000,
    strict: Annotated[bool, Option("--strict", help="Draw each batch before packing it.")] = False,
    window: Annotated[int, Option("--window", min=0, help="Samples planned together; 0 takes all.")] = 0,
    where: Annotated[str, Option("--where", metavar="SQL", help="Plan the samples that meet a condition.")] = "",
    processes: Annotated[int, Option("--processes", min=1, help="Plan the windows by this many processes too.")] = 1,
    simulated: Annotated[bool, Option("--simulated", help="Make the rows when they are read; store none.")] = False,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """From the metadata of a store on disk to a finished plan: select, shuffle, pack, balance, teacher order.

    Seconds, density, straggler ratio, peak memory and payload bytes read, in a process of its own on one core, beside
    the machine's limits. The store is made first, which is not timed. With --window, memory stays bounded. With
    --where, every sample also has a reward and a divergence, and the condition is part of the time. With --processes,
    the same windows are then planned by several processes, each on a core of its own, and their plans compared.
    """
    from mopd_dataplane.bench.plan import FIGURES, SEVERAL, measure

    figures = measure(
        samples, strict=strict, window=window, where=where, folder=folder, processes=processes, simulated=simulated
    )
    names = [name for name in (*FIGURES, *SEVERAL) if name in figures]
    print_json({name: figures[name] for name in names}) if as_json else print_facts(figures)


def link(
    samples: Annotated[int, Option("--samples", min=1000, help="Samples of the other store.")] = 100_000,
    source: Annotated[
        str, Option("--source", metavar="URI", help="Make the other store here, such as s3://bucket/bench.")
    ] = "",
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Samples of another store: the time to link them, and to read tokens of 4,096 of them from here and there.

    The other store is made first, which is not timed. Each step is a process of its own that has read nothing yet.
    """
    from mopd_dataplane.bench.link import measure

    figures = measure(samples, source=source, folder=folder)
    print_json(figures) if as_json else print_facts(figures)


def far(
    store: Annotated[str, Option("--store", metavar="URI", help="An empty place on an S3 server without TLS.")],
    samples: Annotated[int, Option("--samples", min=64, help="Samples of the store.")] = 2000,
    delay: Annotated[
        list[float] | None, Option("--delay", min=0, help="Milliseconds of each request; repeatable. Default: 30, 100.")
    ] = None,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Epochs over tokens and log-probs on an object store that is far away, with and without the node's cache.

    Seconds, requests and bytes of each epoch. The store is made first, which is not timed and not delayed. The server
    is that of AWS_ENDPOINT_URL. With --folder, the cache is in that folder.
    """
    from mopd_dataplane.bench.far import measure

    rows = measure(store, samples, delays_ms=delay or (30.0, 100.0), folder=folder)
    print_json(rows) if as_json else print_fitting(tuple(rows[0]), [list(row.values()) for row in rows])


def load(
    samples: Annotated[int, Option("--samples", min=1, help="Samples whose tokens are delivered.")] = 12_000,
    hidden_samples: Annotated[
        int, Option("--hidden-samples", min=1, help="Samples whose hidden states are delivered.")
    ] = 48,
    peers: Annotated[
        bool, Option("--peers", help="Other loaders on the same packs instead; needs the extra [bench].")
    ] = False,
    plot: Annotated[Path | None, Option("--plot", metavar="FILE", help="With --peers: write a plot here.")] = None,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """From a plan to batches in another process: tokens, hidden states, memory by number of trainers.

    The speed of memcpy and of preadv into the same slots is measured in the same run. The stores are made first.
    """
    if plot is not None:
        if not peers:
            raise InputError("--plot draws what --peers measures; give both")
        check_target(plot)
    from mopd_dataplane.bench.load import compare, draw, measure

    if peers:

        def report(loader: str, figures: dict[str, Any]) -> None:
            note(f"{loader}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))

        figures: dict[str, Any] = compare(samples, hidden_samples, report=report, folder=str(folder))
        if plot is not None:
            draw(figures, plot)
    else:
        figures = measure(samples, hidden_samples, folder=str(folder))
    print_json(figures) if as_json else print_facts(figures)


def write(
    rows: Annotated[
        list[int] | None,
        Option("--rows", min=1, help="Table size at which to time a commit; repeatable. Default: 10000, 100000."),
    ] = None,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """The write path: hidden states per second beside the raw disk, and commit time by table size.

    Every commit is durable, the raw write is synced as often. Large tables are filled up first, which takes a while and
    is not timed.
    """
    from mopd_dataplane.bench.write import FIGURES, write_figures

    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-write-") as scratch:
        figures = write_figures(Path(scratch), rows or [10_000, 100_000])
    print_json({name: figures[name] for name in FIGURES}) if as_json else print_facts(figures)


def commits(
    count: Annotated[int, Option("--commits", min=8, help="Commits of four short samples.")] = 2000,
    writers: Annotated[
        list[int] | None, Option("--writers", min=1, help="Measure so many concurrent writers instead; repeatable.")
    ] = None,
    finished: Annotated[int, Option("--finished", min=1, help="Samples that each writer finishes every 0.2 s.")] = 4,
    rate: Annotated[
        float, Option("--rate", min=0, help="Samples that all writers finish in a second, at random moments, instead.")
    ] = 0.0,
    mean_tokens: Annotated[
        int, Option("--mean-tokens", min=0, help="Mean response tokens, with a long tail; 0: 60 tokens each.")
    ] = 0,
    lengths: Annotated[
        str, Option("--lengths", metavar="STORE", help="Replay the response lengths of the samples of this store.")
    ] = "",
    seconds: Annotated[float, Option("--seconds", min=0.2, help="Seconds that the writers commit.")] = 5.0,
    group: Annotated[bool, Option("--group", help="One process commits for all writers.")] = False,
    per_process: Annotated[
        int, Option("--per-process", min=1, help="With --group: writers that a process simulates by threads.")
    ] = 1,
    uri: Annotated[str, Option("--uri", help="Make the stores of the writers under this object-store URI.")] = "",
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Many small commits: time of a commit and of opening the store, memory, files and bytes.

    With --writers: processes that finish samples and commit them as a rollout does; samples a second, and the time
    until a sample is committed. With --group also the load, the share of the time in which commits are made.
    """
    from mopd_dataplane.bench import commit_writers
    from mopd_dataplane.bench.commits import measure

    if lengths and mean_tokens:
        raise InputError("--lengths and --mean-tokens both say how long samples are; give one of them")
    if writers:
        if lengths:
            tokens = commit_writers.stored_lengths(lengths)
        else:
            tokens = commit_writers.drawn_lengths(mean_tokens) if mean_tokens else [commit_writers.SHORT]
        rows = []
        for number in writers:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-commits-") as scratch:
                store = f"{uri.rstrip('/')}/{Path(scratch).name}" if uri else f"{scratch}/store"
                rows.append(
                    commit_writers.measure(
                        Path(scratch),
                        store,
                        number,
                        seconds,
                        finished,
                        rate=rate,
                        lengths=tokens,
                        group=group,
                        per_process=per_process,
                    )
                )
        if as_json:
            print_json(rows)
        else:
            names = [name for name in commit_writers.FIGURES if name in rows[0]]
            print_fitting(names, [[round(row[name], 1) for name in names] for row in rows])
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-commits-") as scratch:
        figures = measure(Path(scratch), count)
    if as_json:
        print_json(figures)
        return
    curve = figures.pop("curve")
    print_fitting(tuple(curve[0]), [[round(value, 1) for value in point.values()] for point in curve])
    print_facts(figures)


def fork(
    size: Annotated[
        list[float] | None, Option("--gb", min=0.001, help="GB of hidden states; repeatable. Default: 0.2, 2.")
    ] = None,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """A fork by the size of its run: seconds, bytes that both share and bytes of its own.

    A copy of the smallest run's files is timed beside it. The runs are made first, which takes their size on disk.
    """
    from mopd_dataplane.bench.fork import measure

    rows = []
    for figures in measure(folder, size or [0.2, 2.0]):
        if not as_json:
            note(", ".join(f"{name} {value:,}" for name, value in figures.items()))
        rows.append(figures)
    if as_json:
        print_json({"runs": rows})


def wal(
    sequences: Annotated[int, Option("--sequences", min=1, help="Sequences decoded together.")] = 64,
    seconds: Annotated[float, Option("--seconds", min=0.1, help="Seconds of each part.")] = 3.0,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """The token log: tokens per second, time to acknowledgement, share of decode time.

    The raw write limit of the same folder and a real decode step are measured in the same run.
    """
    from mopd_dataplane.bench.wal import measure

    figures = measure(folder, sequences=sequences, seconds=seconds)
    print_json(figures) if as_json else print_facts(figures)


def queue(
    processes: Annotated[
        list[int] | None, Option("--processes", min=1, help="Writers; repeatable (default: 1, 4, 16, 64).")
    ] = None,
    seconds: Annotated[float, Option("--seconds", min=0.1, help="Seconds of each part.")] = 5.0,
    backends: Annotated[
        bool, Option("--backends", help="Measure a real TransferQueue over this store and over its own memory.")
    ] = False,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """The queue under many small writers: puts, folding, gets and memory, beside the disk's own syncs."""
    from mopd_dataplane.bench import queue as store_queue
    from mopd_dataplane.bench import queue_backends

    rows = []
    for count in processes or [1, 4, 16, 64]:
        for backend in queue_backends.BACKENDS if backends else [""]:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-queue-") as scratch:
                if backend:
                    rows.append(queue_backends.measure(backend, Path(scratch), count, seconds))
                else:
                    rows.append(store_queue.measure(Path(scratch), count, seconds))
    if as_json:
        print_json(rows)
        return
    names = queue_backends.FIGURES if backends else store_queue.FIGURES
    print_fitting(
        names, [[row[name] if isinstance(row[name], str) else round(row[name], 2) for name in names] for row in rows]
    )


def fleet(
    settings: Fleet,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """A simulated fleet on one store: engines, scorers and trainers that are killed with SIGKILL and started again.

    Prints tokens a day, requests, bytes, waits for acknowledgements, staleness, and what an audit of the store counts
    as lost or duplicated. Engines replay lengths and rates in place of models; everything else is real. Ends with an
    error if anything was lost, duplicated or changed.
    """
    from mopd_dataplane.bench.fleet import measure

    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-fleet-") as scratch:
        figures = measure(settings, Path(scratch).resolve(), lambda text: None if as_json else note(text))
    print_json(figures) if as_json else print_facts(figures)


def long_sample(
    tokens: Annotated[int, Option("--tokens", min=1000, help="Response tokens of the sample.")] = 1_000_000,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """One very long sample through every stage: peak memory of each beside a bound that follows from the sizes.

    Token log with a SIGKILL in the middle, recovery, store, scoring, signals, plan, loader, training by two ranks that
    share the pack, and `mopd show`. Each stage is a process of its own; its tokens are compared with those that went
    in. The engine replays a response, and the model has two layers and a sliding window of 256 tokens.
    """
    from mopd_dataplane.bench.long_sample import MIB, measure

    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-long-sample-") as scratch:
        rows = measure(Path(scratch).resolve(), tokens, note=lambda text: None if as_json else note(text))
    if as_json:
        print_json(rows)
        return
    print_fitting(
        ("stage", "seconds", "peak MiB", "bound MiB", "equal"),
        [
            [row["stage"], round(row["seconds"], 1), round(row["peak_bytes"] / MIB, 1),
             round(row["bound_bytes"] / MIB, 1), "yes" if row["is_equal"] else "NO"]
            for row in rows
        ],
    )  # fmt: skip


def size(
    workload: sizes.Workload,
    machine: sizes.Machine,
    ladder: Annotated[
        bool, Option("--ladder", help="Print a table from one laptop to 10^10 tokens a day instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Size of a run, computed: bytes by table, bandwidth by stage, requests, GPUs, nodes and cost. Nothing is run.

    Arithmetic on constants that are measured on real stores; docs/scale.md says which, and how to read the figures.
    """
    if ladder:
        rows = sizes.ladder(workload.fidelity, workload.codec, workload.topk)
        print_json(rows) if as_json else print_fitting(list(rows[0]), [list(row.values()) for row in rows])
        return
    figures = sizes.size(workload, machine)
    if as_json:
        print_json({"inputs": sizes.inputs(workload, machine), **figures})
    else:
        print_facts(sizes.readable(figures))


def view(
    samples: Annotated[int, Option("--samples", min=100, help="Samples of the store that is made.")] = 1_000_000,
    mean_tokens: Annotated[int, Option("--mean-tokens", min=32, help="Mean tokens of a sample.")] = 1000,
    store: Annotated[str, Option("--store", metavar="STORE", help="Measure this existing store instead.")] = "",
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Times of the requests of `mopd view`: first page, filter, sort, histogram, a long sample, a search.

    Asked over HTTP: medians of five, the worst of several filters, sorts and columns, and the peak memory of the
    server, beside Lance's scan of one column. The store is made first, which is not timed and takes most of the time;
    interrupted, the same command continues with it. Its folder is removed at the end.
    """
    from mopd_dataplane.bench.view import measure

    figures = measure(samples, mean_tokens=mean_tokens, folder=str(folder), store=store, note=note)
    print_json(figures) if as_json else print_facts(figures)


def add_to(app: Typer) -> None:
    group = Typer(no_args_is_help=True, rich_markup_mode="rich")
    register(group, plan, "mopd bench plan --samples 10000000 --json")
    register(group, link, "mopd bench link", "mopd bench link --samples 1000000 --json")
    register(group, far, "mopd bench far --store s3://bucket/bench", "mopd bench far --store s3://bucket/b --delay 50")
    register(group, load, "mopd bench load --json", "mopd bench load --peers --plot loaders.png")
    register(group, write, "mopd bench write --folder /tmp --rows 10000 --rows 1000000 --json")
    register(group, commits, "mopd bench commits --commits 2000 --json", "mopd bench commits --writers 1 --writers 64")
    register(group, fork, "mopd bench fork", "mopd bench fork --folder /tmp --gb 20 --json")
    register(group, wal, "mopd bench wal --sequences 64")
    register(
        group, queue, "mopd bench queue", "mopd bench queue --processes 16 --seconds 10 --json",
        "mopd bench queue --backends --processes 4",
    )  # fmt: skip
    register(group, fleet, "mopd bench fleet", "mopd bench fleet --engines 8 --samples 20000 --kills 40 --json")
    register(group, long_sample, "mopd bench long-sample --tokens 20000", "mopd bench long-sample --json")
    bench_models.add_to(group)
    register(group, view, "mopd bench view --samples 100000 --json")
    register(
        group, size, "mopd bench size --tokens-per-day 1e10 --fidelity hidden --codec int8", "mopd bench size --ladder"
    )
    app.add_typer(group, name="bench", rich_help_panel="Measurements", help="Measure this machine and the data plane.")
