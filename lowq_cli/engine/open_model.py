"""Open a checkpoint for decoding: use its tuning table, load its model, set the number of threads."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from lowq_cli import console, ranks
from lowq_cli.engine.model_record import owned, tuned_by
from lowq_cli.engine.tokenizer import FastTokenizer, LoadedTokenizer, WrappedTokenizer
from lowq_cli.engine.tokenizer_file import read_tokenizer
from lowq_cli.files.source import Source
from lowq_cli.models import CausalModel
from lowq_packers.arch.config import NotPlain

STEPS = 100  # steps of a progress bar
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def ready(
    folder: str | os.PathLike[str], device: str = "auto", notice: Callable[[str], None] = console.warn
) -> tuple[CausalModel, LoadedTokenizer]:
    """(model, tokenizer) of a folder, hub id or "demo", loaded by `native_loader.read` if it can, otherwise by transformers.

    Raises as `lowq_cli.loading.load`.
    """
    from lowq_cli.devices import pick_device
    from lowq_cli.engine import native_loader
    from lowq_cli.files.source import open_source
    from lowq_cli.interop.importer import runnable
    from lowq_kernels.dispatch import tuning

    chosen = pick_device(device)
    if chosen.type == "cpu":
        torch.set_num_threads(threads())
        # set before torch's first allocation: with 2 MB pages a token of a 1B model in 4 bits takes 36 ms instead of 39
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with open_source(runnable(folder)) as source:
        if chosen.type == "cpu":
            build_kernels(notice)  # takes up to minutes: after the mistakes that opening a source finds
        if source.folder is not None:
            tuning.use(source.folder, chosen, notice)  # before loading: the table also selects the layout of each shape
        try:
            if ranks.world() > 1:
                raise NotPlain("several processes share it")
            model: CausalModel = native_loader.read(source, chosen)
            mapped = tuple(source.mapped_files.values())
        except NotPlain:
            from lowq_cli.hf.load import load_model

            model = load_model(source, chosen)
            mapped = source.all_mapped() if chosen.type == "cpu" else ()
        if source.folder is not None:
            tuned_by(model, str(source.folder))
            owned(model).folder, owned(model).mapped = str(source.folder), mapped
        return model, tokenizer(source)


def build_kernels(notice: Callable[[str], None] = console.warn) -> None:
    """Compile the CPU kernels if necessary, with progress; print the reason if they cannot be used."""
    from lowq_kernels.products.cpu import building, native

    if why := native.why_built():
        damaged = "" if why == native.NONE else f" ({why})"
        usual = f"it usually takes {building.USUAL_SECONDS[building.cores()]}, longer where other programs run"
        console.say(f"compiling lowq's CPU kernels, once on this machine{damaged}; {usual}")
        with console.progress("compile", STEPS) as advance:
            native.built(lambda share: advance(round(STEPS * share), ""))
    if (refusal := native.why_not()) and refusal != native.SWITCHED_OFF:
        notice(f"lowq's own CPU kernels are not in use, so that decoding is several times slower: {refusal}")


def tokenizer(source: Source) -> LoadedTokenizer:
    """The tokenizer of a model's checkpoint. Raises as `hf.tokenizer.load_tokenizer`."""
    try:
        if source.folder is None:
            raise NotPlain("no folder")
        return read_tokenizer(source.folder, str(source.config.get("model_type")))
    except NotPlain:
        from lowq_cli.hf.tokenizer import is_its_backend, load_tokenizer

        loaded = load_tokenizer(source)
        if not is_its_backend(loaded):
            return WrappedTokenizer(loaded)
        where = f"the tokenizer of {source.name}"
        return FastTokenizer(loaded.backend_tokenizer, loaded.special_tokens_map, loaded.chat_template, where)


def threads(quota_file: Path = CGROUP_QUOTA) -> int:
    """The number of threads to compute with: torch's default, but at most the CPUs that this process may use at once.

    A container often sees more processors than its CPU quota allows; threads beyond the quota only wait for each other.
    """
    allowed = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return allowed
    if hasattr(os, "sched_getaffinity"):
        allowed = min(allowed, len(os.sched_getaffinity(0)))
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):  # the file is missing or says "max": no quota
        return max(1, allowed)
