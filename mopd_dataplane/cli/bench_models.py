"""Commands that measure sampling, models and training steps, each beside a plain way to do the same."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option, Typer

from mopd_dataplane.base.files import check_target
from mopd_dataplane.cli.output import print_facts, print_json
from mopd_dataplane.cli.register import AsJson, register
from mopd_dataplane.cli.rows import print_fitting
from mopd_dataplane.errors import InputError

Folder = Annotated[
    Path, Option("--folder", metavar="DIR", exists=True, file_okay=False, help="Where to measure; default: here.")
]


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


def add_to(group: Typer) -> None:
    register(group, sample, "mopd bench sample --json", "mopd bench sample --slots 64 --vocabulary 49152")
    register(group, decode, "mopd bench decode", "mopd bench decode --size tiny --model llama --json")
    register(group, step, "mopd bench step --json", "mopd bench step --peers ~/trl/bin/python")
    register(group, adapters, "mopd bench adapters models/SmolLM2-135M-Instruct --count 100 --json")
    register(group, train_memory, "mopd bench train-memory models/SmolLM2-135M-Instruct")
    register(group, length_bias, "mopd bench length-bias --samples 1000 --plot length-bias.png")
    register(group, resume, "mopd bench resume runs/quickstart/policies/student/v1 --json")
