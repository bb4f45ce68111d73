"""lowq batch: a file of requests in the form of OpenAI's batches -> a file of answers."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import completion, console
from lowq_cli.commands import Device, KvCache, checkpoint_argument, option
from lowq_packers.errors import UsageError

if TYPE_CHECKING:
    from lowq_cli.serving.http.batch_file import Answers, Line
    from lowq_cli.serving.http.opening import Opening

EXAMPLES = """Examples:
  lowq batch requests.jsonl my-lowq
  lowq batch requests.jsonl --out answers.jsonl   (each line names its model)
  cat requests.jsonl | lowq batch - my-lowq --out answers.jsonl"""
DEEP = 2  # requests in the engine per sequence that it runs in parallel: the next request is queued when one ends


def batch(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Requests, one JSON object per line; - is stdin.")],
    ckpt: Annotated[str | None, checkpoint_argument("The model for requests that name it, or none.")] = None,
    out: Annotated[str | None, option("File for the answers.  [default: FILE.answers.jsonl]", metavar="FILE")] = None,
    models: Annotated[
        list[str] | None,
        option("A folder of models that requests name; repeatable.", completion.checkpoints, "DIR", "--models"),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE.toml", help="Names and options of models, as for lowq serve.")
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for all loaded models, such as 40GB.")] = None,
    max_batch: Annotated[int | None, typer.Option("--max-batch", min=1, help="Most requests computed at once.")] = None,
    device: Device = "auto",
    kv: KvCache = "16",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout: how many were answered.")] = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format; run it again to answer those without an answer."""
    from lowq_cli.serving.http import batch_file as batches
    from lowq_cli.serving.http.opening import Arguments, Opening

    signal.signal(signal.SIGTERM, _leave)
    if file == "-" and out is None:
        raise UsageError("answers to requests from stdin need a file; name it with --out")
    if Path(file).is_dir():
        raise UsageError(f"{file} is a folder; the file of requests comes first: lowq batch FILE CKPT")
    lines = batches.read(_text(file), file)
    target = Path(out) if out is not None else Path(f"{file.removesuffix('.jsonl')}.answers.jsonl")
    counts = {"answered": 0, "refused": 0}
    with batches.held(target) as (answers, done):
        left = [line for line in lines if line.custom_id not in done]
        if done:
            console.say(f"{len(lines) - len(left)} of {len(lines)} requests are answered in {target} already")
        if left:
            flags = Arguments(ckpt, tuple(models or ()), config, memory, None, None)
            how = {"running": max_batch, "cache_tokens": None, "deterministic": False, "kv": kv, "act": None}
            opening = Opening(flags, flags.read(), device, how)
            try:
                counts = _answer(opening, left, answers)
            finally:
                opening.stop()
    if as_json:
        console.out_json({**counts, "requests": len(lines), "out": str(target)})
    refused = f", {counts['refused']} refused (their lines say why)" if counts["refused"] else ""
    console.say(f"{counts['answered']} requests answered{refused}; {target}")


def _leave(number: int, frame: object) -> None:
    """End as after an error, which removes a file without answers."""
    raise SystemExit(128 + number)


def _text(file: str) -> str:
    from lowq_cli.calibrate.texts import read_utf8

    try:
        return sys.stdin.read() if file == "-" else read_utf8(Path(file), "requests in")
    except UnicodeDecodeError:
        raise UsageError("stdin is not UTF-8 text; a batch has one JSON object per line") from None


def _answer(opening: "Opening", lines: "list[Line]", answers: "Answers") -> dict[str, int]:
    """Answer requests into a file. Raises LowqError where the engine ends."""
    import asyncio

    from lowq_cli.serving.http.app import PICTURE_BODY, Served, make_app
    from lowq_cli.serving.http.batch_file import run

    with console.status("loading"):
        pool = opening.pool(console.say)
    served, at_once = Served(pool, body_bytes=PICTURE_BODY, answer_s=float("inf")), DEEP * pool.one.engine.limits.running

    async def work(write: Any) -> dict[str, int]:
        await pool.start(lambda n, of: None)
        try:
            return await run(make_app(served), lines, at_once, write, pool.look)
        finally:
            pool.close()

    try:
        with console.progress("answer", len(lines)) as advance:
            done = 0

            def write(row: bytes) -> None:
                nonlocal done
                answers.write(row)
                done += 1
                advance(done, "")

            return asyncio.run(work(write))
    except ExceptionGroup as e:  # report only the first of several errors
        raise e.exceptions[0] from None
    finally:
        pool.stop()
