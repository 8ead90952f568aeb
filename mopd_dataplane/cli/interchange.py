"""Commands that import rollouts of other frameworks and export samples."""

from typing import Annotated, Literal

from typer import Argument, Option, Typer

from mopd_dataplane.cli.answers import StoreUri
from mopd_dataplane.cli.output import note, plain, print_facts, print_json, stderr
from mopd_dataplane.cli.register import AsJson, register

PANEL = "Exchange"


def import_(
    source: Annotated[
        str,
        Argument(
            metavar="FORMAT",
            help="verl, trl, skyrl, prime-rl, verifiers, tinker, openai, sft, preference, plain, one that a package "
            "installs, or module:function.",
        ),
    ],
    path: Annotated[
        str, Argument(metavar="PATH", help="A .jsonl or .parquet file, a folder of them or a pattern; path or URL.")
    ],
    store: Annotated[str, Option("--store", metavar="STORE", help="Store to import into; made when there is none.")],
    tokenizer: Annotated[
        str, Option("--tokenizer", metavar="DIR", help="Tokenizer of the model to train: a folder, URL or hub name.")
    ],
    stage: Annotated[
        str,
        Option(
            "--stage", metavar="NAME", help="Job stage that owns the samples; a row of format plain may name its own."
        ),
    ] = "",
    domain: Annotated[
        str, Option("--domain", metavar="NAME", help="Domain of rows that name none; it routes to a teacher.")
    ] = "",
    policy: Annotated[str, Option("--policy", metavar="NAME", help="Policy that sampled them.")] = "imported",
    teacher: Annotated[
        str, Option("--teacher", metavar="NAME", help="Teacher whose log-probs the rows hold (prime-rl).")
    ] = "imported",
    template: Annotated[
        str, Option("--prompt-template", help="How the student reads a prompt text; `chat` is the chat template.")
    ] = "{prompt}",
    rewritten: Annotated[
        Literal["refuse", "split"],
        Option(
            "--rewritten",
            help="Conversations whose earlier answers the chat template writes in another way later: "
            "refuse, or split into a sample for each answer.",
        ),
    ] = "refuse",
    follow: Annotated[
        bool,
        Option("--follow", help="Go on as files grow and come, until Ctrl-C; a row that is not whole yet is left."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import rollouts of another framework as samples, with their prompts and rewards.

    Token ids and sampler log-probs are kept where the format has them. Text is tokenised and gets the token that ends
    an answer, messages are written by the chat template; such samples have no log-probs. Log-probs of a reference model
    become a teacher's signals. All rows are checked before anything is written. Importing the same rows again adds
    nothing.

    With --follow a training run of another framework is imported while it writes, and `mopd view --follow` shows it.
    """
    from mopd_dataplane.base.stop_request import StopRequest
    from mopd_dataplane.interchange.conversion import ImportSettings
    from mopd_dataplane.interchange.follow import follow_rollouts
    from mopd_dataplane.interchange.importer import import_rollouts
    from mopd_dataplane.interchange.vocabulary import TokenizerVocabulary
    from mopd_dataplane.models import hf
    from mopd_dataplane.models.hub import model_folder
    from mopd_dataplane.run.progress import Progress

    settings = ImportSettings(
        format=source, stage=stage, domain=domain, policy=policy, teacher=teacher, rewritten=rewritten
    )
    shown = Progress(stderr())
    with shown.step(stage or "import", source, total=None, unit="samples") as (advance, _):
        read = hf.load_tokenizer(model_folder(tokenizer, weights=False))
        vocabulary = TokenizerVocabulary(read, hf.tokenizer_digest(read), template=template)
        if follow:
            with StopRequest() as stop:
                report = follow_rollouts(store, path, settings, vocabulary, stop=stop, progress=advance, say=shown.say)
        else:
            report = import_rollouts(store, path, settings, vocabulary, progress=advance)
    print_json(report) if as_json else print_facts(plain(report))


def export(
    store: StoreUri,
    out: Annotated[str, Argument(metavar="OUT", help="New file .parquet, .jsonl or .arrow, or a folder; path or URL.")],
    kind: Annotated[
        str, Option("--format", metavar="KIND", help="parquet, jsonl, arrow or datasets; else as OUT ends.")
    ] = "",
    form: Annotated[
        str, Option("--as", metavar="FORM", help="Form of a row: plain, sft, messages, tokens or traces.")
    ] = "plain",
    signals: Annotated[
        str, Option("--signals", metavar="KINDS", help="Signals of teachers to include: logprob,topk,hidden,alignment.")
    ] = "",
    teacher: Annotated[
        list[str] | None, Option("--teacher", metavar="NAME", help="Teacher whose signals are included; repeatable.")
    ] = None,
    where: Annotated[
        str | None,
        Option("--where", metavar="SQL", help="Only samples that meet this condition, as reward > 0."),
    ] = None,
) -> None:
    """Export samples with tokens, log-probs, prompts, rewards and teachers' signals, in a form that another tool reads.

    `plain` is everything, and `mopd import plain` reads it back unchanged. `sft` has prompt and completion, `messages`
    a conversation, `tokens` the exact ids with labels and columns for each teacher, `traces` episodes of verifiers and
    prime-rl. Hidden states come with the LM heads of their teachers, in the folder OUT.heads, and alignments with
    their tokenizers, in OUT.tokenizers.
    """
    from mopd_dataplane import open_store
    from mopd_dataplane.interchange.exporter import export_samples
    from mopd_dataplane.run.progress import Progress

    chosen = [name.strip() for name in signals.split(",") if name.strip()]
    with Progress(stderr()).step("export", form, total=None, unit="samples") as (advance, _):
        count = export_samples(
            open_store(store), out, kind, form=form, signals=chosen, teachers=teacher or (), where=where,
            progress=advance,
        )  # fmt: skip
    note(f"wrote {count:,} samples to {out}")


def add_to(app: Typer) -> None:
    register(
        app, import_, "mopd import verl dumps/ --store runs/demo --stage student --domain math --tokenizer models/base",
        name="import", panel=PANEL,
    )  # fmt: skip
    examples = (
        "mopd export runs/quickstart samples.parquet --where \"domain = 'spell_backward'\"",
        "mopd export runs/quickstart tokens.parquet --as tokens --signals logprob",
    )
    register(app, export, *examples, panel=PANEL)
