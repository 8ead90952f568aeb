"""Commands that measure: each prints its figures beside the machine's own limit, taken in the same run."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option, Typer

from mopd_dataplane.base.files import check_target
from mopd_dataplane.bench import size as sizes
from mopd_dataplane.bench.fleet_settings import Fleet
from mopd_dataplane.cli.long_sample import long_sample
from mopd_dataplane.cli.output import note, print_facts, print_json
from mopd_dataplane.cli.register import AsJson, register
from mopd_dataplane.cli.rows import print_fitting
from mopd_dataplane.errors import InputError

Folder = Annotated[
    Path, Option("--folder", metavar="DIR", exists=True, file_okay=False, help="Where to measure; default: here.")
]


def plan(
    samples: Annotated[int, Option("--samples", min=1000, help="Samples to plan.")] = 1_000_000,
    strict: Annotated[bool, Option("--strict", help="Draw each batch before packing it.")] = False,
    window: Annotated[int, Option("--window", min=0, help="Samples planned together; 0 takes all.")] = 0,
    where: Annotated[str, Option("--where", metavar="SQL", help="Plan the samples that meet a condition.")] = "",
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """From the metadata of a store on disk to a finished plan: select, shuffle, pack, balance, teacher order.

    Seconds, density, straggler ratio, peak memory and payload bytes read, in a process of its own on one core, beside
    the machine's limits. The store is made first, which is not timed. With --window, memory stays bounded. With
    --where, every sample also has a reward and a divergence, and the condition is part of the time.
    """
    from mopd_dataplane.bench.plan import FIGURES, measure

    figures = measure(samples, strict=strict, window=window, where=where, folder=folder)
    print_json({name: figures[name] for name in FIGURES}) if as_json else print_facts(figures)


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
    seconds: Annotated[float, Option("--seconds", min=0.2, help="Seconds that the writers commit.")] = 5.0,
    group: Annotated[bool, Option("--group", help="One process commits for all writers.")] = False,
    uri: Annotated[str, Option("--uri", help="Make the stores of the writers under this object-store URI.")] = "",
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Many small commits: time of a commit and of opening the store, memory, files and bytes.

    With --writers: processes that each finish some samples every 0.2 s and commit them as a rollout does; samples a
    second, and the time until a sample is committed.
    """
    from mopd_dataplane.bench import commit_writers
    from mopd_dataplane.bench.commits import measure

    if writers:
        rows = []
        for number in writers:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-commits-") as scratch:
                store = f"{uri.rstrip('/')}/{Path(scratch).name}" if uri else f"{scratch}/store"
                rows.append(commit_writers.measure(Path(scratch), store, number, seconds, finished, group=group))
        if as_json:
            print_json(rows)
        else:
            names = commit_writers.FIGURES
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


def sample(
    vocabulary: Annotated[int, Option("--vocabulary", min=1, help="Entries of a row of logits.")] = 151_936,
    slots: Annotated[int, Option("--slots", min=1, help="Sequences decoded together.")] = 16,
    model: Annotated[
        Path | None,
        Option(
            "--model",
            metavar="MODEL",
            exists=True,
            file_okay=False,
            help="Take this model's logits and its decode step.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Drawing tokens: processor time an entry of the vocabulary, of every sampler, in turn on the same logits.

    With --model also the share of a decode step. Cuts (top-k, top-p) are measured beside the plain case.
    """
    from mopd_dataplane.bench.sample import measure

    figures = measure(vocabulary, slots, model=model)
    print_json(figures) if as_json else print_facts(figures)


def decode(
    size: Annotated[Literal["tiny", "mid"], Option("--size", help="0.1 M or 40 to 60 M parameters.")] = "mid",
    slots: Annotated[int, Option("--slots", min=1, help="Sequences decoded together.")] = 16,
    tokens: Annotated[int, Option("--tokens", min=4, help="Tokens of an answer.")] = 48,
    model: Annotated[
        list[str] | None, Option("--model", metavar="NAME", help="One of the models; repeatable. Default: all.")
    ] = None,
    threads: Annotated[int, Option("--threads", min=1, help="CPU threads of both sides.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Processor time of a decode step of the built-in sampler, beside transformers' `generate`, on random models.

    Both decode the same prompts in turn. Plain attention, sliding windows, linear attention and short convolutions.
    """
    from mopd_dataplane.bench.decode import measure

    figures = measure(size, slots, tokens, models=model, threads=threads)
    if as_json:
        print_json(figures)
        return
    columns = ("model", *next(iter(figures.values())))
    print_fitting(columns, [[name, *own.values()] for name, own in figures.items()])


def step(
    iterations: Annotated[int, Option("--iterations", min=2, help="Iterations; the first is not counted.")] = 3,
    model: Annotated[
        Path | None,
        Option(
            "--model",
            metavar="MODEL",
            exists=True,
            file_okay=False,
            resolve_path=True,
            help="SmolLM2-135M-Instruct as a folder; default: the package that the recipe names.",
        ),
    ] = None,
    prompts: Annotated[int, Option("--prompts", min=2, help="Prompts of an iteration.")] = 32,
    peers: Annotated[
        str, Option("--peers", metavar="PYTHON", help="Python interpreter with TRL, which is measured too.")
    ] = "",
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """One iteration of the recipe smollm2, phase by phase: sampling, scoring, planning, training, and the rest.

    Beside plain transformers doing the same work, and beside TRL's SDFTTrainer. Seconds are
    medians over all iterations but the first; processor time and peak memory are those of the whole run.
    """
    from mopd_dataplane.bench.step import measure

    if peers and shutil.which(peers) is None:
        raise InputError(f"--peers {peers!r:.200} is no program; give the Python of an environment with TRL")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-step-") as scratch:
        figures = measure(
            Path(scratch).resolve(), iterations=iterations, prompts=prompts, model=model, peer_python=peers
        )
    if as_json:
        print_json(figures)
        return
    names = list(dict.fromkeys(name for part in figures.values() for name in part if name != "version"))
    print_fitting(("", *figures), [[name, *(part.get(name, "–") for part in figures.values())] for name in names])


def adapters(
    model: Annotated[Path, Argument(metavar="MODEL", help="Folder of a Hugging Face causal LM: the base.")],
    count: Annotated[int, Option("--count", min=1, help="Number of adapters, each of which is a teacher.")] = 100,
    rank: Annotated[int, Option("--rank", min=1, help="Rank of each adapter.")] = 8,
    folder: Folder = Path(),
    as_json: AsJson = False,
) -> None:
    """Many teachers that are adapters on one base in memory: bytes held, loads, switches, time of a pass.

    Beside the base alone on the same text. Log-probs of some of them are compared with those of merged weights.
    """
    from mopd_dataplane.bench.adapters import measure

    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-adapters-") as scratch:
        figures = measure(model.resolve(), Path(scratch).resolve(), count=count, rank=rank)
    print_json(figures) if as_json else print_facts(figures)


def train_memory(
    model: Annotated[Path, Argument(metavar="MODEL", help="Folder of a Hugging Face causal LM.")],
    as_json: AsJson = False,
) -> None:
    """Memory of a trainer on the CPU, beside what `mopd check` computes: weights and adapter, float32 and bfloat16.

    Two steps of a few tokens each, in a process of its own for every row: activations are next to nothing.
    """
    from mopd_dataplane.bench.train_memory import measure

    rows = measure(model.resolve())
    print_json(rows) if as_json else print_fitting(list(rows[0]), [list(row.values()) for row in rows])


def length_bias(
    samples: Annotated[int, Option("--samples", min=100, help="Prompts in every arm.")] = 10_000,
    dose: Annotated[
        float, Option("--dose", min=0.01, help="Interruptions per sample of mean length, in the control arms.")
    ] = 0.25,
    plot: Annotated[Path | None, Option("--plot", metavar="FILE", help="Write the plot here (PNG).")] = None,
    as_json: AsJson = False,
) -> None:
    """Whether interruptions make samples shorter: log resume and six other treatments, on a deterministic engine.

    Resume must equal the uninterrupted arm sample by sample; naive restart and its relatives must be rejected.
    """
    from mopd_dataplane.bench.length_bias import measure

    if plot is not None:
        check_target(plot)
    figures = measure(samples, dose=dose, plot=plot)
    print_json(figures) if as_json else print_facts(figures)


def resume(
    model: Annotated[Path, Argument(metavar="MODEL", help="Folder of a Hugging Face causal LM.")],
    engine: Annotated[Literal["hf", "vllm"], Option("--engine", help="Engine that samples.")] = "hf",
    samples: Annotated[int, Option("--samples", min=1, help="Prompts to sample, three times each.")] = 64,
    slots: Annotated[int, Option("--slots", min=1, help="Sequences decoded together.")] = 16,
    tokens: Annotated[int, Option("--tokens", min=1, help="Most tokens of one sample.")] = 64,
    every: Annotated[int, Option("--every", min=1, help="Decode steps between two interruptions.")] = 20,
    threads: Annotated[int, Option("--threads", min=0, help="CPU threads; 0 leaves the choice to torch.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Share of exact resumes of a real model: killed and prefilled again, or stopped with its cache saved.

    Every sample is compared with the one of an uninterrupted run.
    """
    from mopd_dataplane.bench.resume import measure

    figures = measure(
        model, engine=engine, samples=samples, slots=slots, max_new_tokens=tokens, every=every, threads=threads
    )
    print_json(figures) if as_json else print_facts(figures)


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
    register(group, sample, "mopd bench sample --json", "mopd bench sample --slots 64 --vocabulary 49152")
    register(group, decode, "mopd bench decode", "mopd bench decode --size tiny --model llama --json")
    register(group, step, "mopd bench step --json", "mopd bench step --peers ~/trl/bin/python")
    register(group, adapters, "mopd bench adapters models/SmolLM2-135M-Instruct --count 100 --json")
    register(group, train_memory, "mopd bench train-memory models/SmolLM2-135M-Instruct")
    register(group, length_bias, "mopd bench length-bias --samples 1000 --plot length-bias.png")
    register(group, resume, "mopd bench resume runs/quickstart/policies/student/v1 --json")
    register(group, view, "mopd bench view --samples 100000 --json")
    register(
        group, size, "mopd bench size --tokens-per-day 1e10 --fidelity hidden --codec int8", "mopd bench size --ladder"
    )
    app.add_typer(group, name="bench", rich_help_panel="Measurements", help="Measure this machine and the data plane.")
