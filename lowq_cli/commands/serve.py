"""lowq serve: an OpenAI-compatible server and a chat page for a checkpoint, with lowq's engine or vLLM."""

import os
import shlex
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import completion, console
from lowq_cli.commands import Activations, Device, Draft, KvCache, option
from lowq_cli.serving.token_budget import PREFER
from lowq_packers.errors import LowqError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import socket

    from lowq_cli.serving.http.app import Served
    from lowq_cli.serving.http.loading import Loaded
    from lowq_cli.serving.http.opening import Arguments
    from lowq_cli.serving.printer import Printer

EXAMPLES = """Examples:
  lowq serve
  lowq serve my-lowq --port 8001 --api-key secret
  lowq serve my-lowq --host 0.0.0.0 --api-key secret   (for other machines)
  lowq serve --models /srv/models --memory 40GB --keep-alive 30m   (every model there, by its name)
  lowq serve my-lowq --engine vllm --tp 2
  lowq serve my-lowq --engine vllm --args '--max-model-len 8192' --dry-run"""
LAST_LINE_S = 2.0  # timeout, in s, for writing the last lines of the log
ENGINES = ("auto", "own", "vllm")
SHOWN = 8  # max. names of other models to print


def serve(
    ckpt: Annotated[
        str | None,
        typer.Argument(
            metavar="CKPT",
            help="Checkpoint, model folder or hub id to serve alone. Default: every model that lowq ls lists.",
            autocompletion=completion.checkpoints,
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        option("Also serve all models in this folder; repeatable.", completion.checkpoints, "DIR", "--models"),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE.toml", help="Names and options of models; SIGHUP reads it again."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for all loaded models, such as 40GB.  [default: the device's]"),
    ] = None,
    keep_alive: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Unload a model after this long without requests, such as 10m.  [default: never]"),
    ] = None,
    kv_host: Annotated[
        str | None,
        typer.Option(
            "--kv-host",
            metavar="SIZE",
            help="Host memory for cache that the device cannot hold, such as 8GB.  [default: none]",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="A LoRA adapter (a folder of PEFT) that requests call NAME; repeatable."),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Only for this user's lowq commands: no port; ends when idle.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    engine: Annotated[
        str,
        typer.Option(
            help="own, vllm, or auto: vllm if --tp, --pp, --native or --args is given, else own.",
            autocompletion=completion.words(*ENGINES),
        ),
    ] = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse requests with unknown fields, instead of ignoring these.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="LOWQ_API_KEY", show_envvar=True, help="Key that clients must send.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name for clients.  [default: its folder's]")] = None,
    device: Device = "auto",
    max_batch: Annotated[
        int | None,
        typer.Option("--max-batch", min=1, help="Most requests computed at once.  [default: by device]"),
    ] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option("--cache-tokens", min=1, help="Tokens that the cache holds for all requests.  [default: by memory]"),
    ] = None,
    kv: KvCache = "16",
    draft: Draft = "auto",
    act: Activations = None,
    prefer: Annotated[
        str,
        typer.Option(
            help="balanced: early first tokens, few long waits; smooth: evenly spaced tokens; first-token: new prompts first.",
            autocompletion=completion.words(*PREFER),
        ),
    ] = PREFER[0],
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bit-equal answers at any load: always the same kernels, slower.")
    ] = False,
    allow_image_urls: Annotated[
        bool, typer.Option("--allow-image-urls", help="Fetch pictures that requests link to, from public addresses.")
    ] = False,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds that running answers get after SIGTERM or Ctrl-C.")] = 10.0,
    tp: Annotated[int, typer.Option("--tp", help="vLLM: tensor-parallel GPUs.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="vLLM: pipeline-parallel GPUs.")] = 1,
    native: Annotated[
        bool | None,
        typer.Option(
            "--native/--export", help="vLLM: lowq's kernels (plugin), or vLLM's own on an export.  [default: the faster]"
        ),
    ] = None,
    args: Annotated[str, typer.Option(help="vLLM: more arguments for `vllm serve`, as one string.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, or vLLM's command line, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout: the plan, or vLLM's command.")] = False,
) -> None:
    """Serve a checkpoint to OpenAI's clients and a browser: with lowq's own engine, or with vLLM."""
    from lowq_cli import state

    if prefer not in PREFER:
        raise UsageError(f"--prefer {prefer} must be one of {', '.join(PREFER)}")
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine} must be one of {', '.join(ENGINES)}")
    for_vllm = (tp, pp) != (1, 1) or native is not None or args != ""
    through_vllm = engine == "vllm" or (engine == "auto" and for_vllm)
    if not through_vllm and for_vllm:
        raise UsageError("--tp, --pp, --native and --args are for vLLM; leave --engine own out")
    if through_vllm:
        own: dict[str, object] = {"--host": host != "127.0.0.1", "--kv": kv != "16", "--draft": draft != "auto"}
        own |= {"--prefer": prefer != PREFER[0]}
        own |= {"--models": models, "--config": config, "--memory": memory, "--keep-alive": keep_alive, "--kv-host": kv_host}
        own |= {"--lora": lora, "--local": local, "--strict": strict, "--api-key": api_key, "--name": name, "--act": act}
        own |= {"--max-batch": max_batch, "--cache-tokens": cache_tokens, "--deterministic": deterministic}
        own |= {"--allow-image-urls": allow_image_urls}
        if given := ", ".join(option for option, value in own.items() if value):
            raise UsageError(f"vLLM is not given {given}: only lowq's own engine takes that; pass vLLM's options with --args")
        _serve_through_vllm(state.checkpoint_or_last(ckpt), tp, pp, port, native, args, dry_run, as_json)
    else:
        from lowq_cli.serving.http.opening import Arguments

        how = {"running": max_batch, "cache_tokens": cache_tokens, "deterministic": deterministic, "kv": kv}
        how |= {"act": act, "prefer": prefer, "draft": draft}
        flags = Arguments(ckpt, tuple(models or ()), config, memory, keep_alive, name, _adapters(lora or [], ckpt), kv_host)
        address = None if local else (host, port)
        _serve(flags, address, api_key or "", strict, device, how | {"urls": allow_image_urls}, grace, dry_run, as_json)


def _adapters(given: list[str], ckpt: str | None) -> dict[str, str]:
    """NAME=DIR as names and folders, which are there. Raises UsageError."""
    from lowq_cli import state

    folders = dict(one.partition("=")[::2] for one in given)
    if given and ckpt is None:
        raise UsageError("--lora needs one model; name it, or give adapters in a --config FILE.toml (lora = {name = dir})")
    if wrong := next((one for one in given if not all(one.partition("=")[::2])), None):
        raise UsageError(f"--lora {wrong}: write NAME=DIR, such as german=./german-lora")
    if len(folders) < len(given):
        raise UsageError("--lora: two adapters have the same name")
    if typo := next((one for one in folders.items() if not state.user_path(one[1]).is_dir()), None):
        raise UsageError(f"--lora {typo[0]}={typo[1]}: there is no folder {typo[1]}")
    return folders


def _serve(
    arguments: "Arguments",
    address: tuple[str, int] | None,
    api_key: str,
    strict: bool,
    device: str,
    how: dict[str, Any],
    grace: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Load the default model, print the plan, and answer requests until a signal ends the server."""
    if address is not None and not 0 <= address[1] < 1 << 16:
        raise UsageError(f"--port {address[1]} must be from 0 to 65535")
    from lowq_cli import running
    from lowq_cli.serving.http import run
    from lowq_cli.serving.http.opening import Opening
    from lowq_cli.serving.printer import Printer

    offers = arguments.read()
    bound, local = None if address is None else run.listen(*address), None if dry_run else running.listen()
    if bound is None and local is None and not dry_run:
        raise UnsupportedError("--local needs a Unix socket in a folder that you own; name one: XDG_STATE_HOME=DIR")
    opening, printer = Opening(arguments, offers, device, how), Printer()
    try:
        from lowq_cli.serving.http.app import PICTURE_BODY, Served  # imported while the model loads

        pool = opening.pool(printer.say)
        names, url = (run.LOOPBACK, "") if bound is None else (run.names(bound), run.url(bound))
        about = {"url": url, "kept": bound is None}
        served = Served(pool, api_key, names, log=printer.say, failed=_failed, strict=strict, about=about)
        if pool.one.pictures is not None or not arguments.one:
            served.body_bytes = PICTURE_BODY
        if bound is None:
            served.idle_s, pool.keep_alive = offers.keep_alive, float("inf")
        plan = _plan(served, opening.loaded, url, {**how, **opening.first.offer.how})
        _show_plan(plan)
        if as_json:
            console.out_json(plan)
        if not dry_run:
            _run(served, [s for s in (bound, local) if s is not None], grace, plan, printer, arguments)
    finally:
        running.forget()
        opening.stop()
        printer.close(LAST_LINE_S)


def _run(
    served: "Served", bound: "list[socket.socket]", grace: float, plan: dict[str, Any], printer: "Printer", flags: "Arguments"
) -> None:
    """Answer requests until a signal ends the server, with a live line of the speed on a terminal."""
    from lowq_cli.serving.http import run
    from lowq_cli.serving.http.metrics import Speed

    if not plan["local"] and not served.api_key:
        console.warn("other machines can use this server; --api-key KEY admits only clients that send it")
    shown = ExitStack()  # a terminal shows one live line at a time: a progress bar, then the speed
    speed = Speed(served.models.reports.stats)
    bars: list[Callable[[int, str], None]] = []
    lives: list[Callable[[str], None]] = []

    def recording(n: int, of: int) -> None:
        if not bars:
            bars.append(shown.enter_context(console.progress("record", of)))
        bars[0](n, f"{n} of {of} passes")

    def ready() -> None:
        shown.close()
        _show_ready(plan)
        lives.extend(filter(None, [shown.enter_context(console.live())]))

    def look() -> None:
        s, rate = speed.now()
        cache = f", cache {s.blocks_used / s.blocks:.0%}" if s.blocks else ""
        busy = f"{s.running} running, {s.waiting} waiting, {rate:.0f} tokens/s{cache}"
        for show in lives:
            show(busy if s.running else "waiting for requests")

    def reload() -> None:
        try:
            new = flags.read()
        except LowqError as e:
            printer.say(f"nothing has changed: {e}")
            return
        models = served.models
        models.replace_all(new.models, new.default)
        models.loads.memory, models.keep_alive = new.memory or models.loads.memory, new.keep_alive
        host = models.reports.host
        if (new.kv_host or 0) != (0 if host is None else host.bytes):
            printer.say("kv_host is unchanged: it is read only at the start")
        printer.say(f"read again: {len(new.models)} models")

    served.recording = recording
    with shown:
        run.serve(served, bound, grace, ready, lambda: printer.do(look), reload)
    s = served.models.reports.stats()
    printer.say(f"stopped: {s.prompt_tokens} prompt tokens read, {s.new_tokens} generated")
    if not printer.close(LAST_LINE_S):
        os._exit(0)  # the log is blocked, so Python's flush at exit would block too


def _plan(served: "Served", loaded: "Loaded", url: str, how: dict[str, Any]) -> dict[str, Any]:
    """The printed plan: the models, the engine, and how many requests fit. how: the settings of the default model."""
    model = served.models.one
    engine, limits = model.engine, model.engine.limits
    return {
        "model": model.name,
        "device": loaded.facts.device,
        "engine": engine.name,
        "reason": engine.reason,
        "weight_bytes": loaded.facts.weight_bytes,
        "longest": limits.longest,
        "running": limits.running,
        "waiting": limits.waiting,
        "cache_tokens": limits.cache_tokens,
        "cache_tokens_asked": how["cache_tokens"],
        "cache_bytes": limits.cache_bytes,
        "kv": loaded.facts.kv,
        "kv_host_bytes": 0 if served.models.reports.host is None else served.models.reports.host.bytes,
        "drafts": loaded.facts.drafts,
        "act": loaded.facts.act,
        "act_from": loaded.facts.act_from,
        "prefer": how["prefer"],
        "url": url,
        "local": bool(served.hosts),
        "chat_template": bool(model.tokenizer.chat_template),
        "sampling": model.draw,
        "models": list(served.models.places),
    }


def _show_plan(plan: dict[str, Any]) -> None:
    why = f" ({plan['reason']})" if plan["reason"] else ""
    weights = console.size(plan["weight_bytes"])
    console.say(f"{plan['model']} on {plan['device']}, {weights} of weights; engine: {plan['engine']}{why}")
    users, each = plan["running"], plan["cache_tokens"] // plan["running"]
    console.say(
        f"requests of up to {plan['longest']:,} tokens; {users} at once, {plan['waiting']} waiting; "
        f"cache for {plan['cache_tokens']:,} tokens ({console.size(plan['cache_bytes'])}, "
        f"{plan['kv'] if plan['kv'] == 'fp8' else plan['kv'] + ' bits'}): {each:,} for each of {users}{_cache_note(plan)}"
    )
    if plan["kv_host_bytes"]:
        console.say(f"up to {console.size(plan['kv_host_bytes'])} of host memory for cache that does not fit on the device")
    console.say(f"drafts: {plan['drafts']}")
    said = {"checkpoint": "as the checkpoint says", "given": "--act", "auto": "chosen by --act auto"}[plan["act_from"]]
    console.say(f"activations of prompts: {plan['act'].replace('none', '16 bits')} ({said}); prefer: {plan['prefer']}")
    if others := [m for m in plan["models"] if m != plan["model"]]:
        some = ", ".join(others[:SHOWN]) + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
        console.say(f"loaded on their first request: {some}")
    if plan["sampling"]:
        settings = ", ".join(f"{n} {v:g}" for n, v in plan["sampling"].items())
        console.say(f"requests that set no sampling use generation_config.json's: {settings}")


def _cache_note(plan: dict[str, Any]) -> str:
    """Why the cache has not the size that was asked for; "" if it has."""
    from lowq_cli.engine.state import BLOCK

    asked, has, running, longest = (plan[n] for n in ("cache_tokens_asked", "cache_tokens", "running", "longest"))
    if asked in (None, has):
        return ""
    if plan["reason"]:
        why = "this engine does not use --cache-tokens"
    elif has > asked:
        why = f"a cache has whole blocks of {BLOCK}"
    elif has >= running * longest:
        why = f"{running} requests of {longest:,} tokens take no more"
    else:
        why = "no more fit into memory"
    return f"; {asked:,} were asked for, but {why}"


def _show_ready(plan: dict[str, Any]) -> None:
    """The lines with the server's address and a command to try."""
    if not plan["url"]:
        return
    path, field = ("chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]')
    if not plan["chat_template"]:
        path, field = ("completions", '"prompt": "Once upon a time"')
    console.say(f"listening on {plan['url']} (a chat in the browser) and {plan['url']}/v1 (OpenAI's clients); Ctrl-C stops")
    body = f'{{{field}, "max_tokens": 64}}'
    console.say(f"try: curl {plan['url']}/v1/{path} \\")  # two lines of less than 80 columns, for copying
    console.say(f"  -d '{body}'")


def _failed(e: Exception) -> None:
    """Report a bug of ours: with its traceback under --debug."""
    import traceback

    if os.environ.get("LOWQ_DEBUG"):
        console.page("".join(traceback.format_exception(e)))


def _serve_through_vllm(
    model: str, tp: int, pp: int, port: int, native: bool | None, args: str, dry_run: bool, as_json: bool
) -> None:
    """Run vLLM's server with the kernels that are faster for the checkpoint."""
    if not dry_run and shutil.which("vllm") is None:
        raise UnsupportedError(
            "vLLM is not installed here: pip install vllm (Linux with a GPU); without it: lowq serve --engine own"
        )

    from lowq_cli.interop.serving import command

    try:
        extra = tuple(shlex.split(args))
    except ValueError as e:
        raise UsageError(f"--args {args!r}: {str(e).lower()}") from None
    line = command(model, tp, port, extra, write=not dry_run, native=native, stages=pp)
    if dry_run:
        if as_json:
            console.out_json({"command": line})
        else:
            console.out(shlex.join(line))
        return
    console.say(shlex.join(line))
    raise typer.Exit(_until_told(line))


def _until_told(line: list[str]) -> int:
    """Run vLLM and return its exit code; it gets this process's signals. 1 if a worker died, where vLLM returns 0."""
    import signal  # imported here: it would add 5 ms to `lowq --help`
    import subprocess

    signals: list[int] = []
    process = subprocess.Popen(line, process_group=0)  # a separate process group: Ctrl-C reaches it only through this process

    def pass_on(number: int, frame: object) -> None:
        signals.append(number)
        process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)

    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & vars(signal).keys():  # SIGHUP: a terminal that closes
        signal.signal(getattr(signal, name), pass_on)
    code = process.wait()
    if not signals:
        console.warn(f"vLLM's server ended with exit code {code}; its last lines above say why")
    return code or int(not signals)
