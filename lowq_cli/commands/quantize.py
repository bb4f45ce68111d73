"""lowq quantize: a Hugging Face model -> a low-bit checkpoint. Shows the plan, then works tensor by tensor."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from textwrap import fill
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import completion, console, drawing, quantizers, recipes
from lowq_cli.commands import AsJson, MixtureType, option
from lowq_cli.run_output import follow, preparing, show_plan
from lowq_packers.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from lowq_cli.plan.recipe import Recipe
    from lowq_cli.run.events import Result
    from lowq_cli.run.own_text import Make
    from lowq_cli.run.prepare import Prepared

METHODS = quantizers.methods()
INDENT = max(map(len, METHODS)) + 1  # columns of the methods' names in --help
PRESETS = recipes.names()
SWITCH_S = 0.0005  # thread switch interval in s while kernels compile: with Python's 5 ms the demo took 1.5 s more
EXAMPLES = """Examples:
  lowq quantize demo
  lowq quantize meta-llama/Llama-3.1-8B-Instruct --bits 4 --group 128
  lowq quantize ./my-model --bits 3 --override 'down_proj=4:64' --lm-head 8
  lowq quantize ./my-model --recipe small
  lowq quantize ./my-model --max-kl 0.02 --tokens-per-s 40
  lowq quantize ./my-model --export gguf
  lowq quantize ./my-model --export gguf --type Q4_K_M
  lowq quantize ./my-model --format nvfp4
  lowq quantize ./my-model --dry-run

Methods:
""" + "\n".join(fill(f"  {name:{INDENT}}{text}", 76, subsequent_indent=" " * (INDENT + 2)) for name, text in METHODS.items())


# The options that set the fields of a recipe: field -> (type, option)
FLAGS: dict[str, tuple[type, Any]] = {
    "bits": (int, option("Width of the codes: 8, 4, 3, 2 or 1.  [default: 4]", completion.bits)),
    "group": (str, option("Weights that share a scale, or channel.  [default: 64]")),
    "method": (str, option(f"auto (the measured best per width), or {', '.join(METHODS)}: see below.", completion.methods)),
    "zero": (str, option("Kind of zero: float, int or none (symmetric).  [default: float]", completion.zeros)),
    "bpw": (float, option("Mixed widths: this many bits per weight on average.", metavar="BITS")),
    "size": (str, option("Mixed widths: the best in weight files of this size.", metavar="4GB")),
    "max_kl": (float, option("Mixed widths: the smallest with at most this KL divergence.", metavar="NATS")),
    "max_ppl": (str, option("Mixed widths: the smallest with at most this much more perplexity.", metavar="1%")),
    "fit": (str, option("With --max-kl or --max-ppl: weight files of at most this size.", metavar="16GB")),
    "tokens_per_s": (float, option("With these two: decode one text at least this fast here.", metavar="N")),
    "judge": (str, option("With these two: the text to measure on.  [default: a sample of novels]", metavar="FILE")),
    "widths": (str, option("Mixed widths: the widths to choose from.  [default: 8,4,3,2]", metavar="8,4,3,2")),
    "layout": (str, option("Order of the words in the files: auto (rowstream), tile for CUDA, or cpu.")),
    "overrides": (
        list[str],
        option("Other bits for some weights; or PATTERN=keep.", None, "PATTERN=BITS[:GROUP]", "--override"),
    ),
    "skip": (list[str], option("Leave these weights as they are.", metavar="PATTERN")),
    "lm_head": (str, option("Output head.  [default: 8 up to 4 bits, 4 up to 2]", metavar="BITS|keep")),
    "embedding": (
        str,
        option("Input embedding.  [default: keep, or 8 if it is the head, too]", metavar="BITS|keep"),
    ),
    "vision": (str, option("The vision tower, if there is one.  [default: keep]", metavar="BITS|keep")),
    "calib": (
        str,
        option(
            "Text for calibrated methods: self, .txt, .jsonl, pictures or bundled.  [default: self, unless that is more work]",
            None,
            "self|FILE|DIR",
        ),
    ),
    "calib_tokens": (
        int,
        option("How many tokens of it to read (distill: a pass).  [default: 65536; distill on a GPU: to 524288; x>=4096]"),
    ),
    "calib_seed": (int, option("With --calib self: the seed of that text.  [default: 0]")),
    "rotate": (bool, option("Rotate the residual stream first (folded into the weights).", None, None, "--rotate/--no-rotate")),
    "format": (
        str,
        option(
            "lowq; nvfp4, mxfp4, nf4, or table, table-e4m3 (fitted); fp8 (e4m3).  "
            "[default: lowq; distill with mixed widths: table-e4m3]"
        ),
    ),
    "block": (str, option("With --format fp8: 128x128 or 256x256.  [default: 128x128]")),
    "act": (
        str,
        option("Round activations while running: none, int8 or fp8.  [default: none; --format fp8: fp8]", completion.acts),
    ),
    "dtype": (str, option("Dtype of scales and kept tensors: source, float16, bfloat16, float32.")),
}


def with_recipe_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A command of a model, with FLAGS as options in the place of its **flags."""
    shown = inspect.signature(command)
    model, *others, _ = shown.parameters.values()
    how = {name: Annotated[kind | None, option] for name, (kind, option) in FLAGS.items()}
    flags = [inspect.Parameter(name, model.kind, default=None, annotation=how[name]) for name in FLAGS]
    command.__signature__ = shown.replace(parameters=[model, *flags, *others])  # type: ignore[attr-defined]
    return command


@with_recipe_flags
def quantize(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model folder, hub id, or demo (the bundled model).", autocompletion=completion.originals
        ),
    ],
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="With mixed widths: plot the width of every layer.")
    ] = None,
    engine: Annotated[
        str | None,
        option(
            "What this engine reads exactly: vllm, llama.cpp, mlx; or format: gptq, awq, humming, hqq, modelopt, bitsandbytes.",
            completion.engines,
            "ENGINE",
            "--for",
        ),
    ] = None,
    to: Annotated[
        str | None,
        option(
            "What this format stores exactly, and export it: compressed-tensors, gguf, mlx, gptq, awq, humming, hqq, "
            "modelopt, bitsandbytes.",
            completion.exports,
            "FORMAT",
            "--export",
        ),
    ] = None,
    kind: MixtureType = None,
    recipe: Annotated[
        str | None,
        option(f"A recipe: {', '.join(PRESETS)}, or a file; flags win over it.", completion.words(*PRESETS), "NAME|FILE.toml"),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder to write; with --export or --type, what is exported.  [default: ./MODEL-lowq-4b-g64, ...]",
        ),
    ] = None,
    device: Annotated[str, option("auto, cpu, cuda, or several GPUs: cuda:0,cuda:1.", completion.devices)] = "auto",
    shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 2GiB or 500MB.")] = "2GiB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; only a budget reads weights for it.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing what is in the folder.")] = False,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Quantize a model into a checkpoint folder; run it again after an interruption and it continues."""
    from lowq_cli import state
    from lowq_cli.commands import export
    from lowq_cli.plan import targets
    from lowq_cli.plan.values import parse_size

    if kind:
        others = {"for": engine, "recipe": recipe, "plot": plot, **flags}
        return _mixture(model, kind, to, out, {n: v for n, v in others.items() if v is not None}, device, dry_run, as_json)
    asked = f"--for {engine}" if engine else f"--export {to}"
    engine = targets.of_export(to, engine) if to else engine
    exported_to, out = (out, None) if to else (None, out)
    if out and out.endswith(".gguf"):
        raise UsageError(f"--out {out} would be a folder; for a GGUF file add --export gguf")
    recipes = _recipes(recipe, flags, engine, asked)
    largest = parse_size(shard_size)
    budgeted = any(one.budgeted for one in recipes)
    for name, value in (("plot", plot), ("widths", flags["widths"])):
        if value and not budgeted:
            raise UsageError(f"--{name} {value} needs --bpw, --size, --max-kl or --max-ppl")
    if flags["calib_tokens"] is not None and not any(
        one.method != "auto" and quantizers.needs_text(one.method) for one in recipes
    ):
        advised = f"add --method {quantizers.ADVISED}"
        raise UsageError(f"--calib-tokens is for methods that read a text, not {recipes[0].method}: {advised}")
    if plot:
        drawing.check(Path(plot))

    from lowq_cli.devices import wake
    from lowq_cli.files.source import check_there

    check_there(model)
    if not dry_run:
        wake(device.split(",")[0])
    with ExitStack() as stack:
        with preparing(model) as watch:
            from lowq_cli.run.prepare import prepare

            faults = []
            for one in recipes:
                make = maker(model, device, largest)
                begun = prepare(model, one, out, device, largest, headers_only=dry_run, watch=watch, make=make)
                prepared = stack.enter_context(begun)
                fault = None if engine is None else targets.problem(engine, prepared.plan)
                if fault is None:
                    break
                faults.append(fault)
                stack.close()
            else:
                raise UnsupportedError(f"{asked}: {faults[0]}")
        if engine:
            from lowq_cli.interop.export_checks import check_plan

            check_plan(prepared.plan, prepared.source, targets.get(engine).export)
        target = _export_target(prepared.out, to, exported_to) if to else None
        show_plan(prepared, on_stdout=dry_run and not as_json)
        if target:
            say = console.out_line if dry_run and not as_json else console.say
            say(f"then exported: {target}; the checkpoint {prepared.out} stays, for lowq itself")
        if plot and prepared.mixed:
            from lowq_cli.calibrate import mixed

            mixed.plot(prepared.mixed, Path(plot))
            console.say(f"drew {plot}")
        if dry_run and as_json:
            more = {"mixed": prepared.mixed.to_json()} if prepared.mixed else {}
            more |= _bound(prepared) | ({"export": {"format": to, "out": str(target)}} if target else {})
            console.out_json({**prepared.plan.to_json(), "out": str(prepared.out), "budget": prepared.budget.to_json(), **more})
        elif dry_run:
            read = "" if prepared.mixed or prepared.text or prepared.own else "read of the weights, nothing was "
            console.say(f"dry run: nothing was {read}written into {prepared.out}")
        if dry_run:
            return
        from lowq_cli.run.output_folder import run_in
        from lowq_cli.run.pipeline import execute

        if target:
            _check_room(prepared, target)
        with compiling(prepared):
            state.begin(prepared.out)
            result = follow(execute(prepared, fresh), prepared.plan)
    from lowq_packers.heads import is_head

    head = is_head(prepared.source.config)
    if not head:
        state.remember(prepared.out, run_in(prepared.out), model)
    if not as_json:
        from lowq_cli.plan.candidates import wordless

        _show_result(result, prepared.plan.recipe, engine, to, model, not wordless(prepared.source), head)
    exported = export.write(result.out, to, str(target)) if to else None
    if as_json:
        more = {"export": vars(exported)} if exported else {}
        console.out_json({**result.to_json(), "parameters": prepared.plan.params, **_bound(prepared), **more})
    elif exported:
        export.show(exported)


def _export_target(checkpoint: Path, to: str, out: str | None) -> Path:
    """Where the checkpoint's export is written. Raises UsageError where there is something that lowq did not export."""
    from lowq_cli import state
    from lowq_cli.files.folder import check_free
    from lowq_cli.interop.exporter import export_path

    target = export_path(checkpoint, to, out)
    if not state.export_of(target)[0]:
        check_free(target)
    if target.resolve() == checkpoint.resolve():
        raise UsageError(f"--out {target} is where the checkpoint is written; name another place for its export")
    return target


def _check_room(prepared: "Prepared", target: Path) -> None:
    """Raise DoesNotFitError if the checkpoint leaves too little room for its export."""
    from lowq_cli.calibrate.requirements import layers_bytes
    from lowq_cli.files.folder import check_room, on_one_disk

    if target.exists():
        return
    plan = prepared.plan
    least = sum(i.params * i.scheme.bits // 8 if i.scheme else i.nbytes for i in plan.items)  # without scales and zeros
    first = max(0, prepared.budget.disk_bytes - layers_bytes(plan)) if on_one_disk(prepared.out, target) else 0
    check_room(first + least, target, "use fewer bits")


def _mixture(
    model: str, kind: str, to: str | None, out: str | None, others: dict[str, Any], device: str, dry_run: bool, as_json: bool
) -> None:
    """A GGUF file in one of llama.cpp's mixtures of types, straight from a model; with a text, calibrated on it."""
    from lowq_cli import state
    from lowq_cli.commands import export, refine
    from lowq_cli.files.source import check_there
    from lowq_cli.plan.gguf_types import get

    get(kind)
    if to not in (None, "gguf"):
        raise UsageError(f"--type {kind} is a mixture of GGUF's types; use it with --export gguf, not {to}")
    text: dict[str, Any] = {name: others.pop(name) for name in ("calib", "calib_tokens", "calib_seed") if name in others}
    if others:
        name = next(iter(others)).replace("_", "-")
        raise UsageError(f"--type {kind} sets the type of every weight; leave --{name} or --type out")
    check_there(model)
    with console.status(f"reading {model}"):
        files = export.show_mixture(model, kind, out, dry_run and not as_json, bool(text), timed=not (text or dry_run))
    refined = refine.calibrated(model, kind, out, device, text, dry_run, as_json) if text else None
    if dry_run and as_json:
        names = ("type", "tensors", "weights", "bytes")
        types = [[dict(zip(names, r, strict=True)) for r in rows] for rows in files.values()]
        return console.out_json({"type": kind.upper(), "types": types[0], "files": dict(zip(files, types, strict=True))})
    if dry_run:
        return console.say("dry run: nothing was read of the weights, nothing was written")
    done = refined.exported if refined else export.write(model, "gguf", out, kind=kind)
    state.remember(Path(done.out), source=model)
    if as_json:
        numbers = {name: getattr(refined, name) for name in ("better", "before", "after")} if refined else {}
        return console.out_json({**vars(done), **numbers})
    export.show(done)
    if refined:
        refine.show_numbers(refined)
    return None


@contextmanager
def compiling(prepared: "Prepared") -> Iterator[None]:
    """On a GPU, compile meanwhile the kernels that decode the checkpoint; at the end wait only for those in work."""
    from lowq_packers.heads import is_head

    if not str(prepared.workers[0]).startswith("cuda") or is_head(prepared.source.config):
        yield
        return
    stop, interval = Event(), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)

    def work() -> None:
        from lowq_cli.serving.precompiling import compile_ahead  # imported in this thread: it takes half a second

        compile_ahead(prepared, stop.is_set)

    thread = Thread(target=work, name="lowq-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def _bound(prepared: "Prepared") -> dict[str, Any]:
    return {"bound": prepared.bound.to_json()} if prepared.bound else {}


def maker(model: str, device: str, largest: int | None = None) -> "Make":
    """A function that quantizes a model by another recipe into a folder, in files of at most `largest` bytes."""

    def make(recipe: "Recipe", folder: Path) -> None:
        from lowq_cli.run import pipeline

        pipeline.maker(model, device, *filter(None, [largest]))(recipe, folder)

    return make


def _recipes(file: str | None, flags: dict[str, Any], engine: str | None, asked: str) -> "list[Recipe]":
    """The recipe of the flags, or with --for the recipes to try, best first. Raises NotFoundError, UsageError.

    asked: the flag and value that chose `engine`.
    """
    from lowq_cli.plan import targets
    from lowq_cli.plan.recipe import make_recipe, read_recipe

    if engine is None:
        try:
            return [make_recipe(file, **flags)]
        except UsageError as e:
            raise UsageError(_by_flag(str(e), flags)) from None
    given = read_recipe(file) if file else {}
    return [make_recipe(file, **chosen) for chosen in targets.candidates(engine, flags, given, asked)]


def _by_flag(message: str, flags: dict[str, Any]) -> str:
    """The message with the flag in place of the recipe's field that it begins with, if that was given as a flag."""
    match = re.match(r"(\w+)(?:=|: )", message)
    if match is None or flags.get(match[1]) is None:
        return message
    return f"--{match[1].replace('_', '-')} {message[match.end() :]}"


def _show_result(
    result: "Result", recipe: "Recipe", engine: str | None, to: str | None, model: str, writes: bool, head: bool
) -> None:
    if result.worst:
        rows = [(name, scheme, f"{error:.4f}") for name, scheme, error in result.worst]
        console.table("largest relative errors", ("weight", "scheme", ">error"), rows)
    done = "was already there" if result.already_done else f"written in {console.duration(result.seconds)}"
    resumed = f", {result.resumed} tensors from the interrupted run" if result.resumed and not result.already_done else ""
    console.say(
        f"{console.size(result.bytes)} {done}{resumed}; {result.bpw:.2f} bits per weight, "
        f"peak memory {console.size(result.peak_rss_bytes)}"
    )
    console.out(result.out)
    from lowq_cli import state

    if engine and not to:
        from lowq_cli.plan import targets

        console.say(f"for {engine}: lowq export {state.as_argument(result.out)} --to {targets.get(engine).export}")
    if head:
        console.say(f"next: lowq generate MODEL --draft {state.as_argument(result.out)}, with the model that it drafts for")
    if to or head:  # the next step has been printed
        return
    if not engine and recipe.format == "lowq":
        _show_exports(result.out, model)
    if not writes:
        return
    first = "lowq eval --against MODEL" if recipe.in_blocks else "lowq tune"
    console.say(f"next: {first}, then lowq generate --prompt 'Hello'")


def _show_exports(out: str, model: str) -> None:
    """Print which other tools can load the checkpoint unchanged, and how to quantize for one that cannot."""
    from lowq_cli import state
    from lowq_cli.files.checkpoint import open_checkpoint
    from lowq_cli.interop.export_checks import exportable, reachable

    others = {"vLLM": "compressed-tensors", "llama.cpp": "gguf", "MLX": "mlx"}
    with (checkpoint := open_checkpoint(out)).source:
        held = exportable(checkpoint)
        missing = {engine: form for engine, form in others.items() if form not in held and reachable(checkpoint, form)}
    if held:
        more = f" (or {', '.join(held[1:])})" if held[1:] else ""
        console.say(f"other engines: lowq export {state.as_argument(out)} --to {held[0]}{more}")
    if missing:
        first, *rest = missing.values()
        more = f" (or {', '.join(rest)})" if rest else ""
        console.say(f"for {', '.join(missing)}: lowq quantize {state.as_argument(model)} --export {first}{more}")
