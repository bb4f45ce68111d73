"""The console script. A plain request of `generate` or `run` goes to a running server before Typer is imported.

Typer and pydantic take 0.1 to 0.2 s to import, the first token of a running server 0.03. Whatever is not plain is left to
`main`: other commands and options, mistakes, and models that no server has loaded.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lowq_cli import ranks, running

COMMANDS = {"generate": "greedy", "run": "conversation"}  # command -> the settings where neither user nor model names any
INTERRUPTED = 130  # exit code after Ctrl-C
NUMBERS: dict[str, Callable[[str], int | float]] = {
    **{"--max-new-tokens": int, "--seed": int, "--temperature": float},
    **{"--top-p": float, "--top-k": int, "--repetition-penalty": float},
}
PLAIN = {int: re.compile(r"[0-9]{1,9}"), float: re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")}
IN_RUN = ("--max-new-tokens", "--seed", "--temperature")


class Asked(NamedTuple):
    """A plain request: its command, checkpoint, text, `--device`, and the settings and seed as `request_body` takes them."""

    command: str
    model: str
    text: str
    device: str
    settings: dict[str, Any]
    seed: int


def plain(words: Sequence[str]) -> Asked | None:
    """The request of a command line; None if it is not plain. Mistakes are not plain: `main` reports them."""
    command, *rest = words or [""]
    if command not in COMMANDS or "" in rest:
        return None
    numbers = NUMBERS if command == "generate" else {name: NUMBERS[name] for name in IN_RUN}
    given, names, stops = dict[str, Any](), list[str](), list[str]()
    texts = ("--prompt", "--device", *(("--kv",) if command == "generate" else ()))
    while rest:
        word = rest.pop(0)
        if word in ("--chat", "--no-think") and (word == "--no-think" or command == "generate") and word not in given:
            given[word] = True
        elif word.startswith("-"):
            if not rest or word in given or rest[0].startswith("-"):
                return None
            value = rest.pop(0)
            if word == "--stop" and command == "generate":
                stops.append(value.replace("\\n", "\n").replace("\\t", "\t"))
            elif word in texts:
                given[word] = value
            elif word in numbers and PLAIN[numbers[word]].fullmatch(value):  # type: ignore[index]
                given[word] = numbers[word](value)
            else:
                return None
        else:
            names.append(word)
    text = given.get("--prompt")
    if len(names) != (1 if text else 2) or given.get("--max-new-tokens") == 0:
        return None
    text = text or names[1]
    if command == "run" and "--prompt" not in given and not any(map(str.isspace, text)):  # it may be a picture's name
        return None
    settings = {
        **{name[2:].replace("-", "_"): given.get(name) for name in NUMBERS if name != "--seed"},
        **{"chat": "--chat" in given if command == "generate" else None, "think": False if "--no-think" in given else None},
        **{"max_new_tokens": given.get("--max-new-tokens", 256), "kv": given.get("--kv", "16"), "stop": stops},
    }
    seed = given["--seed"] if "--seed" in given else int.from_bytes(os.urandom(4)) >> 1
    return Asked(command, names[0], text, given.get("--device", "auto"), settings, seed)


def answered(words: Sequence[str]) -> int | None:
    """Let a running server answer a plain request: the exit code; None if `main` has to run the command."""
    if ranks.world() > 1 or not running.sockets() or None in (sys.stdin, sys.stdout, sys.stderr):
        return None
    if (asked := plain(words)) is None:
        return None
    from lowq_cli.generation.running_server import answered_by_a_server

    folder = asked.model
    if asked.command == "run":
        from lowq_cli import state

        if os.path.exists(asked.text) or (made := state.run_of(asked.model, None)) is None:
            return None
        folder = made
    elif not ("/" in folder or folder == "demo" or os.path.exists(folder)):  # maybe a name of the cache
        from lowq_cli.cached_models import model_path

        folder = model_path(folder)
    how = (asked.settings, asked.seed, COMMANDS[asked.command], asked.device, False, None)
    why, interrupted = answered_by_a_server(folder, asked.text, *how)
    return None if why else INTERRUPTED if interrupted else 0


def run() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    failed: BaseException | None = None
    try:
        code = answered(sys.argv[1:])
        if code is not None:
            sys.stdout.flush()
            sys.exit(code)
    except BrokenPipeError:  # `lowq ... | head`: the reader has ended, which is not an error; what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except (Exception, KeyboardInterrupt) as e:  # any error of the answer, or of writing it
        failed = e
    try:
        from lowq_cli import main
    except KeyboardInterrupt:  # the imports take 0.1 to 0.2 s; `main` reports the ones after it
        from lowq_cli import console

        console.fail("interrupted")
        if "--json" in sys.argv[1:]:
            console.out_json({"error": "interrupted", "exit_code": INTERRUPTED})
        os._exit(INTERRUPTED)  # without the end of modules that were imported in part
    main.run(failed)
