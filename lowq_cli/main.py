"""`lowq`: argv -> one command -> printed result and exit code.

Each file in commands/ is one command: a function with the file's name, whose parameters are Typer options and whose
docstring is the help. Command files import nothing heavy at their top, so `lowq --help` and the error of a mistyped flag do
not wait for torch. Every LowqError becomes one line on stderr and its exit code.
"""

import atexit
import errno
import importlib
import inspect
import io
import os
import pkgutil
import re
import shlex
import shutil
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial, wraps
from typing import Annotated, Any, NoReturn

import typer

from lowq_cli import commands, completion, console, hf, ranks
from lowq_cli.commands import EXIT_INTERRUPTED
from lowq_packers.errors import DamagedError, LowqError, NotFoundError, UsageError, disk_full

EXIT_OUR_BUG = 1
EXIT_USAGE = 2
EXIT_NO_MEMORY = 4
REFUSED = (  # the system's errors about a given file name
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
)
TWICE = "more than once per process"  # numpy's error where Ctrl-C ended its first import and a library went on without it
ORDER = (
    *("run", "quantize", "tune", "generate", "chat", "eval", "compare", "inspect", "bench"),
    *("draft", "export", "refine", "serve", "batch", "ps", "stop", "push", "ls", "rm", "doctor"),
)

COLUMNS = shutil.get_terminal_size().columns  # click's --help takes 50 or more, and folds no examples
WIDTH = max(30, COLUMNS - 2) if COLUMNS < 80 else 108


class _ThatFits:
    """Help whose names take at most a third of a narrow terminal: click gives them 32 columns, and their texts 10 or more."""

    def format_help(self, context: Any, formatter: Any) -> None:
        if COLUMNS < 80:
            formatter.write_dl = partial(formatter.write_dl, col_max=WIDTH // 3)
        super().format_help(context, formatter)  # type: ignore[misc]


class _Group(_ThatFits, typer.core.TyperGroup):
    pass


class _Command(_ThatFits, typer.core.TyperCommand):
    pass


def _folded(line: str) -> str:
    """A line of examples in as many lines as the terminal needs, the later ones indented further."""
    if len(line) + 2 <= WIDTH:  # click indents it by 2
        return line
    indent = len(line) - len(line.lstrip()) + 4
    return textwrap.fill(line, WIDTH - 2, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


app = typer.Typer(
    name="lowq",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,  # Rich's help takes 0.17 s more, which exceeds the limit of 0.2 s
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
    | ({"terminal_width": WIDTH} if COLUMNS < 80 else {}),
    help="Quantize a Hugging Face model to 8/4/3/2/1 bits, tune kernels, run it.",
    epilog="\b\n" + _folded("Start with:  lowq quantize demo  &&  lowq generate --prompt 'Once upon a time'"),
)


def _show_version(shown: bool) -> None:
    if shown:
        from importlib.metadata import version

        console.out(f"lowq {version('lowq')}")
        raise typer.Exit


@app.callback()
def _global(
    debug: Annotated[bool, typer.Option("--debug", help="Show Python tracebacks (also LOWQ_DEBUG=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if debug:
        os.environ["LOWQ_DEBUG"] = "1"


def _add_commands() -> None:
    modules = {m.name for m in pkgutil.iter_modules(commands.__path__)}
    for name in sorted(modules, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n)):
        module = importlib.import_module(f"lowq_cli.commands.{name}")
        function = getattr(module, name)
        summary = re.split(r"[;:.]\s", function.__doc__, maxsplit=1)[0].rstrip(".")
        paragraphs = ("\n".join(map(_folded, p.splitlines())) for p in module.EXAMPLES.split("\n\n"))
        examples = "\n\n".join("\b\n" + paragraph for paragraph in paragraphs)  # \b keeps line breaks
        app.command(name, cls=_Command, short_help=summary, epilog=examples)(_with_quiet(_guarded(function)))


_entered = False  # whether this run has reached its command: before that, Typer ends at Ctrl-C without a message


class _Stopped(Exception):
    """Ctrl-C, with the command's message about it: Typer would end the process without a message."""


# How the parameters of commands that name a model are completed
NAMES_MODELS = (completion.checkpoints, completion.models, completion.drafts, completion.originals, completion.quantized)
TEXTS = ("prompt", "words", "system", "args")  # the parameters of commands whose value may be an empty text


def _check_filled(function: Callable[..., None], given: dict[str, Any]) -> None:
    """Refuse an empty value, such as that of --out "$OUT" where OUT is not set: as a path it would be the working folder."""
    for name, value in given.items():
        empty = value == "" or (isinstance(value, list | tuple) and "" in value)
        parameter = inspect.signature(function).parameters.get(name)
        if empty and parameter and value != parameter.default and name not in TEXTS:
            shown = next(m for m in parameter.annotation.__metadata__ if hasattr(m, "metavar"))
            names = [n for n in (shown.default, *(shown.param_decls or ())) if str(n).startswith("--")]
            flag = names[0] if names else f"--{name.replace('_', '-')}"
            where = flag if isinstance(shown, typer.models.OptionInfo) else shown.metavar.strip("[].")
            raise UsageError(f"{where} is empty; give a value, or leave it out")


def _with_paths(function: Callable[..., None], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with the folder in the cache where one is the name of a model there that `lowq ls` lists."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        markers = getattr(parameter.annotation, "__metadata__", ())
        if function.__name__ == "rm" or not any(getattr(m, "autocompletion", None) in NAMES_MODELS for m in markers):
            continue
        if isinstance(value := given.get(name), str | list):
            from lowq_cli.cached_models import model_path

            found[name] = [*map(model_path, value)] if isinstance(value, list) else model_path(value)
    return {**given, **found}


def _check_place() -> None:
    """Refuse a working folder that was deleted: relative paths mean nothing there, and torch's libraries end the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise NotFoundError("the working folder does not exist any more; change to another one (cd)") from None


def _guarded(function: Callable[..., None]) -> Callable[..., None]:
    """The command, with Ctrl-C and a closed stdout passed to `main` instead of Typer."""

    @wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        global _entered
        _entered = True
        try:
            _check_place()
            _check_filled(function, kwargs)
            function(*args, **_with_paths(function, kwargs))
        except KeyboardInterrupt as e:
            raise _Stopped(*e.args) from None
        except BrokenPipeError:  # `lowq ... | head`: the reader has ended, which is not an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return command


QUIET = typer.Option("--quiet", help="Print results and errors only.")


def _with_quiet(function: Callable[..., None]) -> Callable[..., None]:
    """The command with the option --quiet, which all commands have."""

    @wraps(function)
    def command(*args: Any, quiet: bool = False, **kwargs: Any) -> None:
        console.quiet = quiet
        function(*args, **kwargs)

    shown = inspect.signature(function)
    flag = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, QUIET])
    command.__signature__ = shown.replace(parameters=[*shown.parameters.values(), flag])  # type: ignore[attr-defined]
    command.__annotations__ = {**function.__annotations__, "quiet": Annotated[bool, QUIET]}
    return command


_add_commands()


VALUES = {
    r"Input should be a valid integer.*": "a whole number is needed",
    r"Input should be a valid number.*": "a number is needed",
    r"Input should be a valid boolean.*": "yes or no is needed",
    r"Input should be greater than or equal to (\S+)": r"\1 or more is needed",
    r"Input should be less than or equal to (\S+)": r"\1 or less is needed",
    r"Input should be greater than (\S+)": r"more than \1 is needed",
    r"Input should be less than (\S+)": r"less than \1 is needed",
    r"Input should be a finite number": "a finite number is needed",
    r"Input should be (.*)": r"\1 is needed",
}
MEANT = {  # words that people try, from other tools -> the command
    **{"info": "lowq inspect", "show": "lowq inspect", "demo": "lowq run demo", "pull": "lowq run", "ask": "lowq run"},
    **{"convert": "lowq export", "server": "lowq serve", "benchmark": "lowq bench", "perplexity": "lowq eval"},
    **{"list": "lowq ls", "remove": "lowq rm", "delete": "lowq rm", "version": "lowq --version", "help": "lowq --help"},
}
EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", re.I)


def _fail(message: str, code: int) -> int:
    """Report an error: one line on stderr, and with --json one object on stdout, unless one has been printed."""
    if os.environ.get("LOWQ_DEBUG"):
        traceback.print_exc()
    console.fail(message)
    if console.json_wanted and not console.json_is_out:
        with suppress(OSError):  # stdout may be closed
            console.out_json({"error": message, "exit_code": code})
    return code


def run(failed: BaseException | None = None) -> None:
    """Run the command line of this process. failed: the error with which `start` has ended, which is reported instead."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes must not import modules from the working folder
    _open_streams()
    hf.leave_out()
    if ranks.rank():
        console.only_errors()
    if os.environ.get(completion.ASKED, "").startswith("complete_"):
        text, code = completion.answer(lambda verb: _parser(verb)([], prog_name="lowq"))
        sys.stdout.write(text)
        _end(code)
    code = main(sys.argv[1:], failed)
    if ranks.world() > 1:
        _leave_group()
    _end(code)


def _open_streams() -> None:
    """Make the streams usable for all commands: replace closed ones (`>&-`), and tolerate characters they cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in this order each gets its own number
        if getattr(sys, name) is None:  # printing would fail, or go to the other stream or into the next file
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):  # invalid UTF-8 is reported later, by name
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _end(code: int) -> NoReturn:
    """End the process; if torch is loaded without cleanup, as freeing its modules and CUDA's context takes 1.3 to 1.8 s.

    Threads with an attribute `cut_off` are not waited for: an 8B's command whose text was written waited for a compiler (H200).
    """
    awaited = (t for t in threading.enumerate() if not t.daemon and not getattr(t, "cut_off", False))
    others = (t for t in awaited if t is not threading.main_thread())
    if "torch" not in sys.modules or any(others):  # wait for other threads, as Python does
        _flush()
        sys.exit(code)
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _flush() -> None:
    """Flush the streams. If that fails (the reader has ended, the disk is full), the error has been reported and the rest is
    dropped: Python would try again at its end and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())


def _leave_group() -> None:
    """Close the process group of torch.distributed, if there is one: torch warns about open groups."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@cache
def _parser(verb: str) -> Callable[..., Any]:
    """Typer's parser of the command with this name, or of all where none has it: that of all 20 takes 17 ms to build."""
    one = copy(app)
    one.registered_commands = [c for c in app.registered_commands if c.name == verb] or app.registered_commands
    return typer.main.get_command(one)


def _raise(failed: BaseException) -> None:
    raise failed


def main(words: Sequence[str], failed: BaseException | None = None) -> int:
    """Run one command, given as the words after `lowq`, and print what it says or the error; returns the exit code.

    failed: the error with which the command has ended already.
    """
    global _entered
    console.json_wanted, console.json_is_out, console.quiet, _entered = "--json" in words, False, False, False
    try:
        if failed is not None:
            _guarded(_raise)(failed)
            return 0
        code = int(_parser(words[0] if words else "")(list(words), prog_name="lowq", standalone_mode=False) or 0)
        return code if _entered or code != EXIT_INTERRUPTED else _fail("interrupted", code)
    except LowqError as e:
        return _fail(" ".join(str(e).split()), e.exit_code)
    except (KeyboardInterrupt, _Stopped) as e:
        return _fail("; ".join(["interrupted", *map(str, e.args)]), EXIT_INTERRUPTED)
    except MemoryError:
        return _fail("out of memory; close other programs, or use fewer bits or a smaller model", EXIT_NO_MEMORY)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else EXIT_OUR_BUG
    except Exception as e:  # not a LowqError: an error of the machine or a library, or a bug; each gets its line and exit code
        if isinstance(e, OSError) and (full := disk_full(e, e.filename)):
            return _fail(str(full), full.exit_code)
        if isinstance(e, OSError) and e.filename and e.errno in REFUSED:
            return _fail(f"{e.filename}: {e.strerror}", EXIT_USAGE)
        if isinstance(e, ImportError) and TWICE in str(e):
            return _fail("interrupted", EXIT_INTERRUPTED)
        if isinstance(e, ModuleNotFoundError) and e.name and not e.name.startswith("lowq"):  # pip install --no-deps
            return _fail(f"{e.name.partition('.')[0]} is not installed, which lowq needs here; install it with pip", EXIT_USAGE)
        if hasattr(e, "format_message"):  # errors of Typer, or of click in older releases
            return _mistyped(e)
        if type(e).__name__ == "OutOfMemoryError":  # torch's class, compared by name so that torch is not imported
            return _fail(f"the GPU is out of memory: {str(e).splitlines()[0]}; try --bits 2 or --device cpu", EXIT_NO_MEMORY)
        what = f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
        where = [str(f.f_globals.get("__name__")) for f, _ in traceback.walk_tb(e.__traceback__)]
        whose = [name for name in where if name.startswith(("lowq", "transformers.models."))]
        if whose[-1].startswith("transformers"):
            line = f"the model cannot be computed, its config.json may contradict itself: {what.splitlines()[0]}"
            return _fail(line, DamagedError.exit_code)
        return _fail(f"internal error, please report it: {what.splitlines()[0]} (details: LOWQ_DEBUG=1)", EXIT_OUR_BUG)


def _in_plain_words(text: str, command: str) -> str:
    """Replace pydantic's phrases about values by lowq's (VALUES), in an error of `command`."""
    for pattern, plain in VALUES.items():
        text = re.sub(pattern, plain, text)
    if "'--bits'" in text and "whole number" in text:
        text += " (a mean of several widths: --bpw)"
    if match := EXTRA.match(text):
        given = shlex.quote(match[1])
        text = f"one argument too many: {match[1]}"
        text += f"; a text is given as --prompt {given}" if command == "lowq generate" else ""
    return text


def _first_screen(text: str) -> str:
    """The help without options, for `lowq` without arguments: it fits a terminal of 24 lines together with the prompt."""
    usage = text.partition("\n")[0]
    lines = text[text.index("\nCommands:") :].splitlines()
    return "\n".join([f"{usage}   (options: lowq -h)", *filter(str.strip, lines)])


def _alike(name: str, typed: str) -> bool:
    """Whether an option may be what somebody meant: the parser also compares the dashes, which all options share."""
    from difflib import SequenceMatcher

    name, typed = name.lstrip("-"), typed.lstrip("-")
    return name.startswith(typed) or SequenceMatcher(None, name, typed).ratio() >= 0.6


def _mistyped(e: Any) -> int:
    """Report an unknown flag, command or value, with a hint to the help; for `lowq` without arguments, print the commands."""
    if type(e).__name__ == "NoArgsIsHelpError":
        console.page(_first_screen(e.format_message()))
        return EXIT_USAGE
    text = " ".join(e.format_message().split()).rstrip(".")
    if near := getattr(e, "possibilities", None):  # the most similar one, as for a command
        meant_option = next((f". Did you mean {name}?" for name in near if _alike(name, e.option_name)), "")
        text = f"no such option: {e.option_name}{meant_option}"
    if match := re.match(r"No such command '([^']*)'", text):
        meant = MEANT.get(match[1].lower())
        text = f"no such command '{match[1]}'. Did you mean '{meant}'?" if meant else text
    path = e.ctx.command_path if getattr(e, "ctx", None) else "lowq"
    text = _in_plain_words(text, path)
    way_out = f" See: {path} --help" if text.endswith("?") else f"; see: {path} --help"
    return _fail(text[:1].lower() + text[1:] + way_out, EXIT_USAGE)
