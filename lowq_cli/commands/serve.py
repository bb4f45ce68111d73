"""lowq serve: an OpenAI-compatible server on a checkpoint, through vLLM."""

import shlex
import shutil
from typing import Annotated

import typer

from lowq_cli import console
from lowq_packers.errors import UnsupportedError, UsageError

EXAMPLES = """Examples:
  lowq serve
  lowq serve my-lowq --tp 2 --port 8001
  lowq serve my-lowq --dry-run
  lowq serve my-lowq --args '--max-model-len 8192'"""


def serve(
    ckpt: Annotated[
        str | None, typer.Argument(metavar="CKPT", help="Checkpoint, model folder or hub id. Default: the last one written.")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", help="GPUs to spread the weights over.")] = 1,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    native: Annotated[
        bool, typer.Option("--native", help="Do not export: lowq's own kernels, through its vLLM plugin.")
    ] = False,
    args: Annotated[str, typer.Option(help="More arguments for `vllm serve`, as one string.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON object on stdout.")] = False,
) -> None:
    """Serve a checkpoint with vLLM: exported into the cache where vLLM has kernels for it, else with lowq's."""
    from lowq_cli import state

    model = state.checkpoint_or_last(ckpt)
    if not dry_run and shutil.which("vllm") is None:
        raise UnsupportedError(
            "vLLM is not installed here: pip install vllm (Linux with a GPU); without one, export for llama.cpp: "
            "lowq export --to gguf"
        )

    from lowq_cli.interop.serving import command

    try:
        extra = tuple(shlex.split(args))
    except ValueError as e:
        raise UsageError(f"--args {args!r}: {str(e).lower()}") from None
    line = command(model, tp, port, extra, write=not dry_run, native=native)
    if dry_run:
        if as_json:
            console.out_json({"command": line})
        else:
            console.out(shlex.join(line))
        return
    console.say(shlex.join(line))
    import subprocess  # 5 ms of `lowq --help`

    raise typer.Exit(subprocess.run(line, check=False).returncode)
