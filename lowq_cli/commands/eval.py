"""lowq eval: perplexity of a checkpoint, how far it is from the model it was made from, and its answers to tasks."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowq_cli import completion, console
from lowq_cli.commands import AsJson, Device, JudgeText, JudgeTokens, KvCache, Threads, checkpoint_argument, option

if TYPE_CHECKING:
    from lowq_cli.evaluate.tasks import Score

EXAMPLES = """Examples:
  lowq eval --against demo
  lowq eval my-lowq --text book.txt --against my-model --max-ppl-increase 3
  lowq eval --act all
  lowq eval my-lowq --against my-lowq --kv 4   (what a cache in 4 bits costs)
  lowq eval my-lowq --tasks arc_easy,hellaswag --against my-model"""


BAR = "#"


def eval(
    ckpt: Annotated[str | None, checkpoint_argument("Checkpoint, model folder or hub id.")] = None,
    text: JudgeText = None,
    against: Annotated[str | None, option("Model to compare with, usually the original.", completion.models)] = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(min=0, help="Exit 6 if perplexity is more than this many percent above --against.")
    ] = None,
    max_tokens: JudgeTokens = None,
    layers: Annotated[bool, typer.Option("--layers", help="With --against: also the error of every decoder layer.")] = False,
    act: Annotated[
        str | None,
        typer.Option(
            help="Activations: none, int8, fp8, auto (see generate), or all to compare them.  [default: as the checkpoint says]"
        ),
    ] = None,
    kv: KvCache = "16",
    images: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Instead of a text: a folder of pictures, each with a text to predict (a.png, a.txt)."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="TASKS", help="Instead of a text: lm-eval's tasks by name, or YAML files; separated by commas."),
    ] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="With --tasks: examples before each question.  [default: the task's]")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: at most this many questions per task.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure perplexity on a text, in windows of 512 tokens; with --against also KL divergence and top-1 agreement.

    With --tasks: lm-eval's scores of the model's answers (pip install 'lm-eval<0.5').
    """
    from lowq_cli import state
    from lowq_cli.devices import wake
    from lowq_cli.files.source import check_there
    from lowq_packers.errors import QualityError, UsageError
    from lowq_packers.scheme import ACTS

    if max_ppl_increase is not None and against is None:
        raise UsageError("--max-ppl-increase compares with another model; add --against MODEL")
    if layers and against is None:
        raise UsageError("--layers compares the layers with another model's; add --against MODEL")
    if act not in (None, *ACTS, "auto", "all"):
        raise UsageError(f"--act {act} must be one of {', '.join(ACTS)}, auto, all")
    if act == "all" and against is not None:
        raise UsageError("--act all compares modes with each other; leave --against out")
    if act == "all" and kv != "16":
        raise UsageError("--act all compares activations in a cache of 16 bits; leave --kv out")
    if tasks is None and (fewshot is not None or limit is not None):
        raise UsageError(f"--{'fewshot' if limit is None else 'limit'} needs --tasks; name some tasks, or leave it out")
    if tasks is not None:
        others = {"text": text, "max-ppl-increase": max_ppl_increase, "max-tokens": max_tokens, "layers": layers or None}
        if given := [flag for flag, value in others.items() if value is not None]:
            raise UsageError(f"--{given[0]} measures on a text, --tasks asks questions; give one of them")
        if act == "all":
            raise UsageError("--act all compares perplexities; with --tasks name one of its modes")
        from lowq_cli.evaluate.task_names import check_names

        names = [t for t in tasks.split(",") if t]
        check_names(names)
    if images is not None:
        others = {"text": text, "max-tokens": max_tokens, "layers": layers or None, "act": act, "tasks": tasks}
        others["kv"] = None if kv == "16" else kv
        if given := [flag for flag, value in others.items() if value is not None]:
            raise UsageError(f"--images measures texts of pictures; leave --{given[0]} out")
    name = state.checkpoint_or_last(ckpt)
    check_there(name, against)
    wake(device)
    if tasks is not None:
        _tasks(name, against, names, fewshot, limit, device, act, kv, as_json)
        return

    with console.status("starting"):
        from lowq_cli.evaluate.perplexity import measure, measure_modes, read_text
        from lowq_kernels.decode.kv import check

    check(kv)
    contents = "" if images is not None else read_text(text)
    if act == "all":
        with console.progress("eval", 100) as advance:
            modes = measure_modes(name, contents, device, max_tokens, advance)
        if as_json:
            console.out_json({"model": name, "text": text, "modes": {mode: vars(r) for mode, r in modes.items()}})
        else:
            plain = modes["none"].ppl
            lines = [(mode, f"{r.ppl:.3f}", f"{100 * (r.ppl / plain - 1):+.2f}%") for mode, r in modes.items()]
            tokens = modes["none"].tokens
            console.table(f"{name}, {tokens} tokens", ("activations", ">perplexity", ">against none"), lines, on_stdout=True)
        return
    with console.progress("eval", 100) as advance:
        if images is not None:
            from lowq_cli.evaluate.pictures import measure_pictures

            report = measure_pictures(name, images, against, device, advance)
        else:
            report = measure(name, contents, against, device, max_tokens, advance, act, kv)
    increase = report.ppl_increase_pct
    errors = []
    if layers and against is not None:
        from lowq_cli.evaluate.layer_errors import layer_errors

        with console.status("comparing layers"):
            errors = layer_errors(name, against, contents, device)
    failure = None
    if increase is not None and max_ppl_increase is not None and not increase <= max_ppl_increase:
        failure = QualityError(
            f"perplexity {report.ppl:.3f} is {increase:.2f}% above {against} ({report.base_ppl:.3f}); "
            f"the limit is {max_ppl_increase:g}%; try more bits or a smaller group"
        )
    if as_json:
        from lowq_cli.hf.activations import act_from

        result: dict[str, Any] = {"model": name, "against": against, "text": text} if images is None else {"model": name}
        result |= {**vars(report), "act_from": act_from(act), "stride": report.window, "kv": kv, "ppl_increase_pct": increase}
        if layers:
            result["layers"] = [vars(e) for e in errors]
        if failure:
            result |= {"error": str(failure), "exit_code": failure.exit_code}
        console.out_json(result)
    else:
        rows = [
            ("perplexity", f"{report.ppl:.3f}", f"{report.tokens} tokens, windows of {report.window}, stride {report.window}")
        ]
        if increase is not None:
            rows += [
                ("perplexity of " + str(against), f"{report.base_ppl:.3f}", f"{increase:+.2f}%"),
                ("KL divergence", f"{report.kl:.5f}", "nats per token"),
                ("top-1 agreement", f"{100 * (report.top1_agreement or 0):.2f}%", "same likeliest next token"),
            ]
        console.table("", ("", ">value", ""), rows, on_stdout=True)
    if errors and not as_json:
        largest, table = max(max(e.output for e in errors), 1e-30), []
        for e in errors:
            weights = "" if e.weights is None else f"{e.weights:.4f}"
            table.append((e.index, weights, e.worst, f"{e.output:.6f}", BAR * round(30 * e.output / largest)))
        columns = ("layer", ">weights, relative", "largest of", ">output, squared relative", "")
        console.table("errors by layer, including those of earlier layers", columns, table, on_stdout=True, spare=("",))
    if failure:
        raise failure


def _tasks(
    name: str, against: str | None, tasks: list[str], fewshot: int | None, limit: int | None, device: str, act: str | None,
    kv: str, as_json: bool
) -> None:  # fmt: skip
    """Print the plan, ask each model, and print lm-eval's scores."""
    import time

    with console.status("reading the tasks"):
        from lowq_cli.evaluate.tasks import load_tasks
        from lowq_kernels.decode.kv import check

        check(kv)
        loaded = load_tasks(tasks, fewshot, limit)
    console.table("plan", ("task", "asks for", ">questions", ">examples before each"), loaded.rows)
    began = time.perf_counter()
    scores, used = _scores(name, loaded, limit, device, act, kv)
    models = [scores]
    if against is not None:
        models.append(_scores(against, loaded, limit, device, None, "16")[0])
    seconds = time.perf_counter() - began
    if as_json:
        from importlib.metadata import version

        result: dict[str, Any] = {"model": name, "tasks": [vars(s) for s in models[0]]}
        result |= {} if against is None else {"against": against, "tasks_of_against": [vars(s) for s in models[1]]}
        result |= {**used, "kv": kv, "limit": limit, "lm_eval": version("lm_eval"), "seconds": round(seconds, 3)}
        console.out_json(result)
        return
    columns: tuple[str, ...] = ("task", "metric", ">value", ">stderr", ">questions", ">examples")
    rows = [
        (s.task, s.metric, f"{s.value:.4f}", "" if s.stderr is None else f"{s.stderr:.4f}", str(s.questions), str(s.fewshot))
        for s in models[0]
    ]
    if against is not None:
        columns = (*columns, f">{against}", ">difference")
        rows = [
            (*row, f"{t.value:.4f}", f"{s.value - t.value:+.4f}") for row, s, t in zip(rows, *models, strict=True)
        ]  # fmt: skip
    console.table(f"{name}, {console.duration(seconds)}", columns, rows, on_stdout=True)


def _scores(
    name: str, loaded: Any, limit: int | None, device: str, act: str | None, kv: str
) -> "tuple[list[Score], dict[str, str]]":
    """One model's, loaded as for perplexity, and `act_facts`."""
    from lowq_cli.engine.open_model import ready
    from lowq_cli.evaluate.eight_bits import apply_act
    from lowq_cli.evaluate.tasks import Judge, scores
    from lowq_cli.hf.activations import act_facts
    from lowq_cli.serving.offline import answers

    with console.status(f"loading {name}"):
        model, tokenizer = ready(name, device)
        apply_act(model, tokenizer, act, console.say)
    return scores(loaded, Judge(model, tokenizer, answers, console.progress, kv), limit), act_facts(model, act)
