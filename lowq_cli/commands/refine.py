"""lowq refine: better codes and scales inside another tool's quantized file, given the model it was made from."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import completion, console
from lowq_cli.commands import AsJson, Device, option
from lowq_packers.errors import UsageError

if TYPE_CHECKING:
    from lowq_cli.interop.exported import Exported
    from lowq_cli.run.refine import Refined

EXAMPLES = """Examples:
  lowq refine my-model-gptq --model my-model
  lowq refine my-model-Q4_K_M.gguf --model my-model --out better.gguf
  lowq refine my-model-w4a16 --model my-model --calib book.txt"""


def refine(
    ckpt: Annotated[
        str, typer.Argument(metavar="CKPT", help="Another tool's checkpoint: GPTQ, GGUF, compressed-tensors, MLX, ...")
    ],
    model: Annotated[str, option("The model it was made from.", completion.models)] = "",
    calib: Annotated[
        str | None,
        option("Text: self, .txt, .jsonl or bundled.  [default: self, unless that is more work]", None, "self|FILE|DIR"),
    ] = None,
    calib_tokens: Annotated[int | None, option("How many tokens of it to read.  [default: 65536]")] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Folder (gguf: file) to write.  [default: ./CKPT-refined]")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Choose better codes and scales in another tool's file: GPTQ, AWQ, GGUF, MLX, NVFP4, MXFP4; format and schemes stay."""
    from lowq_cli import state
    from lowq_cli.files.source import check_there

    if not model:
        raise UsageError("refine needs the model that the file was made from; add --model MODEL")
    check_there(ckpt, model)
    done = improved(ckpt, model, out, device, calib=calib, calib_tokens=calib_tokens)
    if as_json:
        console.out_json({**vars(done.exported), "better": done.better})
    else:
        console.out(done.exported.out)
        there = " (was already there)" if done.exported.already_done else ""
        console.say(
            f"{done.better} of {done.matrices} weights have a smaller error now; {console.size(done.exported.bytes)}, "
            f"{done.exported.format} as before{there}"
        )
        console.say(f"next: lowq eval {state.as_argument(done.exported.out)} --against {state.as_argument(model)}")


def improved(ckpt: str, model: str, out: str | None, device: str, **text: Any) -> "Refined":
    """Improve a file behind progress bars. text: the fields of a recipe that choose the calibration text."""
    from lowq_cli.devices import wake
    from lowq_cli.plan.recipe import make_recipe
    from lowq_cli.run_report import STEPS, follow_calibration

    recipe = make_recipe(method="gptq", group="channel", dtype="float32", lm_head="keep", **text)
    wake(device)
    with console.status("starting"):
        from lowq_cli.run.refine import Refining

        refining = Refining(ckpt, model, recipe, out, device)
    try:
        follow_calibration(refining.run())
        with console.progress("export", STEPS) as advance:
            return refining.export(lambda percent, name: advance(STEPS * percent // 100, name))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to continue") from None


def calibrated(model: str, kind: str, out: str | None, device: str, text: dict[str, Any]) -> "Exported":
    """Write a model as a GGUF file in a mixture of types: by least squares in the cache first, then improved on a text."""
    from dataclasses import replace

    from lowq_cli.interop.exporter import mixture_path
    from lowq_cli.run.refine import least_squares

    with console.progress("export", 100) as advance:
        start = least_squares(model, kind, lambda percent, name: advance(percent, name))
    done = improved(start.out, model, out or str(mixture_path(model, kind)), device, **text).exported
    return replace(done, notes=start.notes)
