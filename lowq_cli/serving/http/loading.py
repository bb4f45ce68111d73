"""Loads a model in a separate process for a server: the code of that process, and of the server's side."""

import asyncio
import json
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowq_cli import console, hf, state
from lowq_cli.hf import chat_template
from lowq_cli.serving.catalog import Offer
from lowq_cli.serving.engine_process import ApartEngine, DiedIdle, Standby
from lowq_cli.serving.engine_server import Made
from lowq_cli.serving.host_memory import HostMemory, Kept, Lent
from lowq_cli.serving.http.metrics import Roofline
from lowq_cli.serving.measurements import Measurements
from lowq_cli.serving.request import Done
from lowq_packers.errors import LowqError, one_line
from lowq_packers.regular import MAX_CONFIG, read_regular

if TYPE_CHECKING:
    from lowq_cli.engine.tokenizer import LoadedTokenizer
    from lowq_cli.serving.http.served_model import Facts, Refused, ServedModel
    from lowq_packers.arch.parts import Images

MODULES = (  # imported by a standby process before the model is known
    *("lowq_cli.engine.open_model", "lowq_cli.engine.native_loader", "lowq_cli.engine.native", "lowq_cli.serving.continuous"),
    *("lowq_cli.serving.engines", "lowq_cli.interop.importer", "lowq_cli.serving.mask_process", "lowq_kernels.modules.linear"),
    *("lowq_cli.engine.generation_config", "lowq_cli.serving.http.served_model", "lowq_kernels.dispatch.measure", "tokenizers"),
)
ROOMY = 20 << 30  # min. bytes of a GPU on which a process stands by with a CUDA context: about 0.5 GB, 0.8 to 1.4 s to make
Make = Callable[[str, str, dict[str, Any], bool], Made]
KEYED = ("kv", "act", "deterministic", "draft")  # options that change cache contents; block names hold the adapter
SHARE = 0.25  # max. share of the memory of all models for the cache of one, in a server with several


@dataclass
class Loaded:
    """The facts of a model that the engine's process reports.

    device_bytes: total memory of its GPU, None on a CPU. folder: the folder of its image processor. images: how it takes
    images, None if it takes none.
    """

    tokenizer: "LoadedTokenizer"
    stop_ids: frozenset[int]
    roofline: Roofline
    facts: "Facts"
    device_bytes: int | None
    folder: str = ""
    images: "Images | None" = None


def get_ready(device: str) -> None:
    """Do what every load on this device begins with, in a process whose model is not known yet."""
    from lowq_cli.devices import pick_device, wake

    wake(device, ROOMY)
    for name in MODULES:
        import_module(name)
    import torch

    from lowq_cli.engine.parallel_read import GPU_THREADS, host_buffers
    from lowq_kernels.dispatch.registry import load_kernels

    chosen = pick_device(device)
    if chosen.type == "cuda":
        load_kernels(chosen.type)
        with suppress(ImportError):
            import_module("triton.experimental.gluon")  # Triton imports it at the first launch, in 0.17 s
        if torch.cuda.get_device_properties(chosen).total_memory >= ROOMY:
            host_buffers(GPU_THREADS, pinned=True)
            first = torch.zeros(1, dtype=torch.int64, device=chosen)
            for dtype in (torch.bfloat16, torch.float16):  # loads cuBLAS, and kernels of torch: 0.19 s
                ones = torch.ones(256, 512, dtype=dtype, device=chosen)
                torch.nn.functional.linear(torch.nn.functional.embedding(first, ones), ones)


def load(model: str, device: str, how: dict[str, Any], quiet: bool) -> Made:
    """Load the model and make its engine, in the engine's process.

    how: the arguments of ContinuousEngine (`host` without its key); `act`, as in `apply_act`; and `memory`: bytes for all
    models of a server, 0 for the whole device; the cache takes SHARE of them. Without `memory` the cache takes what is free.
    """
    console.quiet = quiet
    hf.leave_out()
    with console.status(f"loading {model}"):
        import torch

        from lowq_cli.engine.drafts.drafter_choice import served
        from lowq_cli.engine.generation_config import checked, published
        from lowq_cli.engine.model_record import file_facts, owned
        from lowq_cli.engine.open_model import ready
        from lowq_cli.engine.prompts import context_limit, stop_ids
        from lowq_cli.hf.activations import act_facts
        from lowq_cli.running import model_path
        from lowq_cli.serving import engines
        from lowq_cli.serving.continuous import MOST_RUNNING, why_not
        from lowq_cli.serving.http.metrics import roofline
        from lowq_cli.serving.http.rules import mask_of
        from lowq_cli.serving.http.served_model import Facts
        from lowq_cli.serving.mask_process import MaskProcess
        from lowq_kernels.decode.kv import check

        check(how["kv"])
        files = file_facts(model_path(model))  # before it is read, so that a later change shows
        loaded, tokenizer = ready(model, device, console.warn)
        if how.get("act") is not None:
            from lowq_cli.evaluate.eight_bits import apply_act

            apply_act(loaded, tokenizer, how["act"], console.say)
        acts = act_facts(loaded, how.get("act"))
        draw = checked(published(loaded))
        share = roofline(loaded, MOST_RUNNING)  # before the cache takes the memory for the measurement
        total = torch.cuda.mem_get_info(loaded.device)[1] if loaded.device.type == "cuda" else None
        adapters, refused = _adapted(loaded, how.get("lora") or {})
        how = {**how, "lora": {name: how["lora"][name] for name in adapters}}
        images = _sees(loaded)
        how = {**how, **keyed(how, model, owned(loaded).folder)}
        if why_not(loaded) is None:
            how = {**how, "draft": served(how.get("draft", "none"), loaded, tokenizer)}
        engine = engines.engine_of(loaded, **_bounded(how, total))
        ends = stop_ids(loaded, tokenizer)
        weight_bytes = sum(p.nbytes for p in {t.data_ptr(): t for t in (*loaded.parameters(), *loaded.buffers())}.values())
    masks = MaskProcess(tokenizer, sorted(ends), engine.vocabulary)
    mask = partial(mask_of, tokenizer=tokenizer, form=masks.mask)
    drafts = getattr(engine, "drafts_by", "none (its engine takes none)")
    known = (context_limit(loaded), draw, pooling_of(model), drafts, adapters, acts["act"], acts["act_from"], refused, files)
    facts = Facts(weight_bytes, str(loaded.device), how["kv"], *known)
    return Made(engine, mask, Loaded(tokenizer, ends, share, facts, total, owned(loaded).folder, images), masks.stop)


def _sees(loaded: Any) -> "Images | None":
    """How a model takes images; None if it takes none. On a GPU the tower is loaded before the cache takes the memory."""
    from lowq_cli.engine.plan import plan_of, why_not

    images: Images | None = plan_of(loaded).model.images if why_not(loaded) is None else None
    if images is not None and loaded.device.type == "cuda":
        from lowq_cli.engine.vision import sight_of

        try:
            sight_of(loaded).load()
        except LowqError as e:
            console.warn(f"pictures are not taken: {e}")
            return None
    return images


def _adapted(model: Any, folders: Mapping[str, str]) -> "tuple[tuple[str, ...], dict[str, Refused]]":
    """Add LoRA adapters to a model; the names of those that it takes, and the others."""
    if not folders:
        return (), {}
    from lowq_cli.engine import plan as plans
    from lowq_cli.engine.lora import adapt, placed
    from lowq_cli.files.adapter import Adapter, read_adapter
    from lowq_cli.serving.http.served_model import Refused

    if reason := plans.why_not(model):
        why = f"adapters need lowq's own decoder, which does not support this model: {reason}"
        return (), {name: Refused.of(folder, why) for name, folder in folders.items()}
    plan, taken, refused = plans.plan_of(model), list[Adapter](), dict[str, Refused]()
    for name, folder in folders.items():
        files = Refused.of(folder)  # before it is read, so that a later change shows
        try:
            adapter = read_adapter(folder, name)
            placed(plan, replace(adapter, name=f"{name} ({folder})"))
            taken.append(adapter)
        except (LowqError, OSError) as e:
            refused[name] = replace(files, why=one_line(e))
    if taken:
        adapt(plan, taken)
    return tuple(a.name for a in taken), refused


def keyed(how: Mapping[str, Any], model: str, folder: str) -> dict[str, Any]:
    """The host memory and the measurements in `how` with keys of this model's files and options; their contents are dropped
    if they were kept under different keys."""
    from lowq_cli.engine.model_record import file_facts

    lent: Lent | None = how.get("host")
    earlier: Measurements | None = how.get("earlier")
    if lent is None and earlier is None:
        return {}
    files = file_facts(folder), file_facts(str(state.user_path(str(how.get("draft", "")))))

    def key(names: Collection[str]) -> bytes:
        options = sorted((n, str(v)) for n, v in how.items() if n in names)
        return blake2b(repr((model, files, options)).encode(), digest_size=32).digest()

    of_cache, of_passes = key(KEYED), key(how.keys() - {"host", "earlier", "later"})
    if lent is not None:
        lent = replace(lent, key=of_cache, kept=lent.kept if lent.kept is not None and lent.kept.key == of_cache else None)
    if earlier is not None and earlier.key != of_passes:
        earlier = Measurements(of_passes)
    return {"host": lent, "earlier": earlier}


def pooling_of(model: str) -> str:
    """The pooling that an embedding model's folder names (in sentence-transformers' file); otherwise "last", the last token's
    hidden state, the usual choice for decoders."""
    path = state.user_path(model) / "1_Pooling" / "config.json"
    if not path.is_file():
        return "last"
    config = json.loads(read_regular(path, MAX_CONFIG))
    modes = {"pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean"}
    return next((way for mode, way in modes.items() if isinstance(config, dict) and config.get(mode) is True), "last")


def _bounded(how: Mapping[str, Any], total: int | None) -> dict[str, Any]:
    """The engine's arguments; `memory` becomes the limit of the cache if cache_tokens sets none."""
    options = {name: value for name, value in how.items() if name != "act"}
    memory = options.pop("memory", None)
    options.pop("lora", None)
    if memory is not None and (memory or total) and options.get("cache_tokens") is None:
        options["cache_bytes"] = int(SHARE * (memory or total or 0))
    return options


class Loader:
    """Begins to load models, one after another, each in a process; a standby process is started ahead of the next one.

    Args:
        device, how: arguments of `load` for all models of the server. host: the host memory that engines borrow from.
        make: makes an engine in its process, as `load` does. first: what a standby process runs, given the device.
    """

    def __init__(
        self,
        device: str,
        how: Mapping[str, Any],
        host: HostMemory | None = None,
        make: Make = load,
        first: Callable[[str], None] = get_ready,
    ) -> None:
        self.device, self.how, self.host, self.make, self.first = device, how, host, make, first
        self.measurements: dict[str, Measurements] = {}  # by model
        self.standby: Standby | None = None
        self.latest: LoadingModel | None = None
        self.stopped, self.lock = False, threading.Lock()  # held while a process starts, so that `stop` ends that one too

    def begin(self, offer: Offer) -> "LoadingModel":
        """Begin to load a model. Raises LowqError after `stop`."""
        with self.lock:
            if self.stopped:
                raise LowqError("the server is stopping")
            standby, self.standby = self._alive(), None
            given = (offer, self.device, self.how, True, standby, self.host, self.measurements)
            self.latest = LoadingModel(*given, starts=True, make=self.make)
            return self.latest

    def prepare(self) -> None:
        """Start the standby process if there is none; after `stop`, do nothing."""
        with self.lock:
            if not self.stopped:
                self.standby = self._alive() or Standby(self.first, self.device)

    def _alive(self) -> Standby | None:
        """The standby process; None if there is none, or it has died."""
        if self.standby is not None and not self.standby.process.is_alive():
            self.standby.stop()
            self.standby = None
        return self.standby

    def stop(self) -> None:
        """End the standby process, and that of the model that was loaded last: the server may have ended before it knew it."""
        with self.lock:
            self.stopped = True
            for one in (self.standby, self.latest):
                if one is not None:
                    one.stop()


class LoadingModel:
    """A model that is being loaded in a separate process.

    Args:
        offer: the model. device, how: arguments of `load` for all models of the server; and `urls`: whether images at http and
            https URLs are fetched. measurements: those of earlier loads by model, to which those of this load are added.
        starts: a request waits: the engine starts as soon as it is made, while this process reads its facts, and records its
            passes later. make: as of `Loader`.
    """

    def __init__(
        self,
        offer: Offer,
        device: str,
        how: Mapping[str, Any],
        quiet: bool,
        standby: Standby | None = None,
        host: HostMemory | None = None,
        measurements: dict[str, Measurements] | None = None,
        starts: bool = False,
        make: Make = load,
    ) -> None:
        self.offer, self.host, self.measurements, how = offer, host, measurements, {**how, **offer.how}
        how["earlier"] = None if measurements is None else measurements.get(offer.name, Measurements())
        how["later"] = starts
        self.urls = bool(how.pop("urls", False))
        self.lent = how["host"] = None if host is None else host.lend(offer.name)
        self.given = make, offer.path, device, how, quiet
        self.starts = starts
        chat_template.begin(offer.path)
        try:
            self.engine = ApartEngine(*self.given, standby=standby, starts=starts)
        except BaseException:  # such as too many processes or threads
            self._return(None if self.lent is None else self.lent.kept)
            raise
        self.loaded: Loaded | None = None
        self.stopped, self.lock = False, threading.Lock()

    def made(self) -> "ServedModel":
        """The model with its engine not started yet. Raises what loading raises."""
        from lowq_cli.serving.http.pictures import PictureReader  # imported while the process loads the model
        from lowq_cli.serving.http.served_model import ServedModel

        try:
            try:
                self.loaded = loaded = self._made()
            except LowqError as e:
                raise self.offer.named(e) from e.__cause__
            draw = {**loaded.facts.published, **self.offer.draw}
            given = (self.engine, loaded.tokenizer, self.offer.name, loaded.stop_ids, draw, loaded.roofline)
            pictures = PictureReader(loaded.folder, loaded.images, self.urls) if loaded.images else None
            return ServedModel(*given, facts=loaded.facts, pictures=pictures, end=self.stop)
        except BaseException:
            self.stop()
            raise

    def _made(self) -> Loaded:
        """What the process reports. If it ended before it knew of the model, the model is loaded in a new one."""
        try:
            made: Loaded = self.engine.made()
        except DiedIdle:
            with self.lock:
                self.engine.stop(0)
                if self.stopped:
                    raise
                self.engine = ApartEngine(*self.given, starts=self.starts)
            made = self.engine.made()
        return made

    def finish(self, loop: asyncio.AbstractEventLoop, done: Done) -> "ServedModel":
        """Start the engine and return the model. Raises what loading raises."""
        model = self.made()
        try:
            model.hub.start(loop, done)
        except BaseException:
            self.stop()
            raise
        return model

    def stop(self, keep: bool = False) -> None:
        """End the process. keep: keep the cache's blocks in host memory, as far as there is room."""
        with self.lock:
            self.stopped = True
        self.engine.stop(0, keep and self.lent is not None)
        if self.measurements is not None and self.engine.measurements is not None:
            self.measurements[self.offer.name] = self.engine.measurements
        self._return(self.engine.kept)

    def _return(self, kept: Kept | None) -> None:
        """Give the host memory back. kept: its contents, None: nothing of use."""
        if self.host is not None and self.lent is not None:
            self.host.take_back(self.offer.name, self.lent, kept)
