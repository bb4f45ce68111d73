"""lowq refine: better codes and scales inside another tool's quantized file, given the model it was made from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import completion, console
from lowq_cli.commands import AsJson, Device, option
from lowq_cli.run_output import STEPS, budget_line, follow_calibration
from lowq_packers.errors import UsageError

if TYPE_CHECKING:
    from lowq_cli.plan.recipe import Recipe
    from lowq_cli.run.mixture import MixturePlan
    from lowq_cli.run.refine import Refined
    from lowq_cli.run.refine_plan import RefinePlan

EXAMPLES = """Examples:
  lowq refine my-model-gptq --model my-model
  lowq refine my-model-Q4_K_M.gguf --model my-model --out better.gguf
  lowq refine my-model-w4a16 --model my-model --calib book.txt"""


def refine(
    ckpt: Annotated[
        str,
        typer.Argument(
            metavar="CKPT",
            help="Another tool's checkpoint: GPTQ, GGUF, compressed-tensors, MLX, ...",
            autocompletion=completion.quantized,
        ),
    ],
    model: Annotated[str, option("The model it was made from.", completion.originals)] = "",
    calib: Annotated[
        str | None,
        option("Text: self, .txt, .jsonl or bundled.  [default: self, unless that is more work]", None, "self|FILE|DIR"),
    ] = None,
    calib_tokens: Annotated[int | None, option("How many tokens of it to read.  [default: 65536]")] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Folder (gguf: file) to write.  [default: ./CKPT-refined]")
    ] = None,
    device: Device = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Choose better codes and scales in another tool's file: GPTQ, AWQ, GGUF, MLX, NVFP4, MXFP4; format and schemes stay."""
    from lowq_cli import state
    from lowq_cli.files.source import check_there

    if not model:
        raise UsageError("refine needs the model that the file was made from; add --model MODEL")
    check_there(ckpt, model)
    done = improved(ckpt, model, out, device, dry_run, as_json, calib=calib, calib_tokens=calib_tokens)
    if done is None:
        return
    state.remember(Path(done.exported.out), source=model)
    if as_json:
        numbers = {name: getattr(done, name) for name in ("better", "before", "after")}
        console.out_json({**vars(done.exported), **numbers})
    else:
        console.out(done.exported.out)
        show_numbers(done)
        there = " (was already there)" if done.exported.already_done else ""
        console.say(f"{console.size(done.exported.bytes)}, {done.exported.format} as before{there}")
        console.say(
            f"next: lowq compare {state.as_argument(model)} {state.as_argument(ckpt)} {state.as_argument(done.exported.out)}   "
            "(the KL divergence before and after, on another text)"
        )


def improved(
    ckpt: str, model: str, out: str | None, device: str, dry_run: bool, as_json: bool, **text: Any
) -> "Refined | None":
    """Improve a file behind progress bars; None after a dry run. text: the fields of a recipe that choose the text."""
    from lowq_cli.devices import wake

    recipe = recipe_of(text)
    wake(device)
    with console.status("starting"):
        from lowq_cli.run.refine import Refining
        from lowq_cli.run.refine_plan import refine_plan

        refining = Refining(ckpt, model, recipe, out, device)
    if dry_run:
        with refining.prepared() as (prepared, plan):
            found = refine_plan(prepared, plan, refining.file, refining.out)
        if as_json:
            console.out_json({**vars(found), "out": str(found.out), "budget": found.budget.to_json()})
        else:
            _show_plan(ckpt, found, console.out_line, on_stdout=True)
            console.say("dry run: nothing was written")
        return None
    with resumable():
        follow_calibration(refining.run(lambda plan: _show_plan(ckpt, plan, console.say)))
        with console.progress("export", STEPS) as advance:
            return refining.export(lambda percent, name: advance(STEPS * percent // 100, name))


def recipe_of(text: dict[str, Any]) -> "Recipe":
    """The recipe whose calibration text the options choose."""
    from lowq_cli.plan.recipe import make_recipe

    return make_recipe(method="gptq", group="channel", dtype="float32", lm_head="keep", **text)


@contextmanager
def resumable() -> Iterator[None]:
    """Have Ctrl-C say how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to continue") from None


def _show_plan(ckpt: str, plan: "RefinePlan", say: Callable[[str], None], on_stdout: bool = False) -> None:
    """Print what is improved, what is read, how long it takes, and what is written."""
    rows = [(kind, count, f"{weights / 1e6:,.1f} M") for kind, count, weights in plan.rows]
    columns = ("scheme", ">matrices", ">weights")
    console.table(f"{ckpt} -> {plan.out}: what is improved", columns, rows, on_stdout=on_stdout)
    say(f"{plan.kept} other tensors stay as they are; {console.size(plan.nbytes)} before and after, in the same format")
    say(f"reads {plan.model}; {plan.text}")
    say(budget_line(plan.device, plan.budget))


def show_numbers(done: "Refined") -> None:
    """Print the error before and after."""
    console.say(
        f"{done.better} of {done.matrices} matrices have a smaller error now; error of their outputs on the text, "
        f"mean of all: {done.before:.3g} -> {done.after:.3g}"
    )


def calibrated(
    model: str, kind: str, out: str | None, device: str, text: dict[str, Any], dry_run: bool, as_json: bool
) -> "Refined | None":
    """Write a model as a GGUF file in a mixture of types, calibrated on a text; prints the plan. None after a dry run."""
    from lowq_cli.devices import wake

    wake(device)
    with console.status("starting"):
        from lowq_cli.run.mixture import CalibratedMixture

        mixture = CalibratedMixture(model, kind, recipe_of(text), out, device)
    if dry_run:
        with mixture.prepared() as prepared:
            _show_mixture(mixture.plan(prepared), console.say if as_json else console.out_line)
        return None
    with resumable():
        follow_calibration(mixture.text(lambda plan: _show_mixture(plan, console.say)))
        if not mixture.done:
            with console.progress("least squares", 100) as advance:
                mixture.start(advance)
            follow_calibration(mixture.improve())
        with console.progress("export", 100) as advance:
            return mixture.export(advance)


def _show_mixture(plan: "MixturePlan", say: Callable[[str], None]) -> None:
    say(plan.text)
    say(budget_line(plan.device, plan.budget))
    say(f"meanwhile the file lies in {plan.copies} twice ({console.size(2 * plan.nbytes)}), which is removed at the end")
