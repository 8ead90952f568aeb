"""The command tree, and how a command ends: with the exit codes that reference.py lists."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from mopd_dataplane import __version__
from mopd_dataplane.base.extras import missing_package
from mopd_dataplane.base.files import full_disk_named, out_of_descriptors
from mopd_dataplane.base.memory import is_out_of_memory
from mopd_dataplane.base.processes import end_with_parent
from mopd_dataplane.cli import answers, bench, evaluate, forks, interchange, jobs, load, recipes, stores, sweep, view
from mopd_dataplane.cli.output import note, print_error
from mopd_dataplane.errors import InputError, MopdError, ResourceError
from mopd_dataplane.store.remote.network import translate_network_errors

INTERRUPTED = 130
_REFUSED = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
}  # fmt: skip
"""Errors of the system that concern a given path, not a defect."""
_ENDINGS = (SystemExit, GeneratorExit, BrokenPipeError, TyperException, typer.Exit, typer.Abort)
"""How typer, and a reader that has seen enough, end a command."""
_UsageError: Any = typer.BadParameter.__base__
"""Errors of the parser: unknown option or command, missing argument, wrong type."""
_BY_DEFAULT: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Flow(TyperGroup):
    """The root group: turns errors into one paragraph, or one JSON object, and an exit code."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the options before the command; raises typer.Exit where they are wrong and `--json` was asked for."""
        with _usage_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command; raises typer.Exit with the exit code of the error tree."""
        with _recorded_interrupts() as interrupts:
            try:
                with _usage_errors(), full_disk_named(), translate_network_errors("the store"):
                    return super().invoke(ctx)
            except BaseException as error:
                if interrupts or isinstance(error, KeyboardInterrupt):
                    note("interrupted; run the same command again to continue")
                    raise typer.Exit(INTERRUPTED) from None
                if isinstance(error, _ENDINGS) or _debugging(ctx):
                    raise
                explained = _known(error)
                print_error(explained, as_json=_wants_json())
                raise typer.Exit(explained.exit_code) from None


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Report errors of the parser as JSON under `--json`, like every other error."""
    try:
        yield
    except _UsageError as error:
        if not _wants_json():
            raise
        print_error(InputError(error.format_message()), as_json=True)
        raise typer.Exit(InputError.exit_code) from None


def _wants_json() -> bool:
    return "--json" in sys.argv[1:]


@contextmanager
def _recorded_interrupts() -> Iterator[list[int]]:
    """Signals of Ctrl-C and `kill` so far; each raises KeyboardInterrupt, so that children end before their parent.

    What that becomes may be another error, from DuckDB or from a peer that died.
    """
    seen: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    listening = [number for number, usual in _BY_DEFAULT.items() if signal.getsignal(number) is usual]
    for number in listening:
        signal.signal(number, interrupt)
    try:
        yield seen
    finally:
        for number in listening:
            signal.signal(number, _BY_DEFAULT[number])


def _known(error: BaseException) -> MopdError:
    """The error as one of this package's tree: itself, what to install, what the system refused, or a defect."""
    if isinstance(error, MopdError):
        return error
    if isinstance(error, ModuleNotFoundError) and (missing := missing_package(error)):
        return InputError(missing)
    if failure := out_of_descriptors("mopd", error):
        return failure
    if is_out_of_memory(error):
        reason = str(error).partition("\n")[0] or type(error).__name__
        return ResourceError(
            f"out of memory ({reason:.300}); what is stored stays: use a smaller model, or a device with more memory"
        )
    if isinstance(error, OSError) and error.errno in _REFUSED and error.filename:
        return InputError(f"{str(error.filename)[:200]}: {error.strerror}; give another path, or the right to use it")
    trace = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(trace[-1].filename).name}:{trace[-1].lineno}" if trace else ""
    return MopdError(
        f"internal error: {type(error).__name__}: {str(error)[:500]}{where}; a defect of mopd: please report it with "
        "what MOPD_DEBUG=1 shows"
    )


def _debugging(ctx: typer.Context) -> bool:
    return bool(ctx.params.get("debug")) or os.environ.get("MOPD_DEBUG", "") not in ("", "0")


app = typer.Typer(
    name="mopd",
    cls=Flow,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: mopd run jobs/quickstart",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"mopd-dataplane {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (or set MOPD_DEBUG=1).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Multi-teacher on-policy distillation: roll out, store, score, plan, train, query.

    A JOB is one TOML file, or a folder with a job.toml. A STORE is the folder or URI that a job writes to.
    """


for commands in (jobs, forks, sweep, recipes, load, answers, view, evaluate, stores, interchange, bench):
    commands.add_to(app)


def main() -> None:
    """Entry point of the `mopd` command."""
    # Read when numpy is imported. On machines whose hypervisor takes free memory back, the first touch of a huge page
    # costs several times that of small ones: 2 of 7 seconds of a large plan (docs/benchmarks/planner_and_writes.md).
    os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    end_with_parent()
    app()
