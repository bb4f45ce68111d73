"""Makes the model pool of `serve` and `batch` from their arguments, with the default model loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowq_cli import console, memory, state
from lowq_cli.files.source import check_there
from lowq_cli.serving import catalog
from lowq_cli.serving.catalog import Offer
from lowq_cli.serving.host_memory import HostMemory
from lowq_cli.serving.http.loading import Loaded, Loader, LoadingModel
from lowq_packers.errors import DoesNotFitError, NotFoundError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from lowq_cli.serving.http.model_pool import ModelPool
    from lowq_cli.serving.http.served_model import ServedModel


@dataclass(frozen=True)
class Arguments:
    """The models and limits that the command line names; fields have the names of `serve`'s options."""

    ckpt: str | None
    models: tuple[str, ...]
    config: str | None
    memory: str | None
    keep_alive: str | None
    name: str | None
    lora: Mapping[str, str] = field(default_factory=dict)
    kv_host: str | None = None

    def __post_init__(self) -> None:
        """A folder or file stays one: once it is gone, its relative path must not be taken for a hub id and fetched."""
        if self.ckpt not in (None, "demo") and (path := state.user_path(self.ckpt)).exists():
            object.__setattr__(self, "ckpt", str(path.absolute()))

    @property
    def one(self) -> bool:
        """Whether the server has one model, which stays loaded as long as it runs."""
        return self.ckpt is not None and not (self.models or self.config)

    def read(self) -> "Offers":
        """The offered models. Raises UsageError, NotFoundError."""
        file = catalog.read_config(Path(self.config)) if self.config else catalog.Config()
        first = None
        if self.ckpt is not None:
            check_there(self.ckpt)
            how = {"lora": self.lora} if self.lora else {}
            first = catalog.Offer(self.name or catalog.given_name(self.ckpt), self.ckpt, how, pin=self.one)
        elif self.name:
            raise UsageError("--name names one model; give the model, or names in a --config FILE.toml")
        offers = {first.name: first} if first and self.one else catalog.gather(file, self.models, first)
        default = file.default or (first.name if first else self._last(offers))
        default = next((n for n, o in offers.items() if default in o.aliases), default)
        if default not in offers:
            raise NotFoundError(
                f"default = {default} is not one of the models: {', '.join(offers)}"
                if default
                else "no model here; run: lowq quantize demo, or name a folder of models with --models DIR"
            )
        memory = catalog.size(self.memory, "--memory") if self.memory else file.memory
        alive = catalog.seconds(self.keep_alive, "--keep-alive") if self.keep_alive else file.keep_alive
        host = catalog.size(self.kv_host, "--kv-host") if self.kv_host else file.kv_host
        return Offers(offers, default, memory, float("inf") if alive is None else alive, host)

    def _last(self, offers: dict[str, Offer]) -> str:
        """The checkpoint that commands take by default, or the first one if there is no default."""
        here = {offer.folder.absolute(): name for name, offer in offers.items()}
        records = [k for k in state.known() if k.checkpoint.absolute() in here]
        if not records or self.models or self.config:
            return next(iter(offers), "")
        mine = [k for k in records if k.where == str(Path.cwd())]
        return here[(mine or records)[-1].checkpoint.absolute()]


@dataclass(frozen=True)
class Offers:
    """Models by name, the default's name, max. bytes of all loaded ones (None: all memory), seconds until an idle one is
    unloaded, bytes of host memory for cache blocks (None: none)."""

    models: dict[str, Offer]
    default: str
    memory: int | None
    keep_alive: float
    kv_host: int | None = None


class Opening:
    """The default model while it is loaded, then the pool.

    Args:
        arguments: the arguments. offers: the models that they name. device, how: arguments of `loading.load`.
    """

    def __init__(self, arguments: Arguments, offers: Offers, device: str, how: Mapping[str, Any]) -> None:
        self.arguments, self.offers = arguments, offers
        how = {**how} if arguments.one else {**how, "memory": offers.memory or 0}
        self.host = _host_memory(offers)
        self.loader = Loader(device, how, self.host)
        learnt = None if arguments.one else self.loader.measurements
        self._begin: Callable[[str], LoadingModel] = lambda name: LoadingModel(
            offers.models[name], device, how, console.quiet, host=self.host, measurements=learnt
        )
        self.first = self._begin(offers.default)

    def pool(self, say: Callable[[str], None]) -> "ModelPool":
        """The pool with the default model loaded and its engine not started. Raises what loading raises."""
        from lowq_cli.serving.http.model_pool import ModelPool  # imported while the process loads the model

        model = self._made(say)
        offers = self.offers
        bound = None if self.arguments.one else offers.memory or _room(self.loaded, offers.kv_host or 0)
        pool = ModelPool(offers.models, offers.default, self.loader.begin, bound, offers.keep_alive, only=self.arguments.one)
        pool.reports.host = self.host
        pool.loads.say = say
        pool.adopt(model)
        if not self.arguments.one:  # a server of one model loads no other
            pool.loads.prepare = self.loader.prepare
        pool.loads.check = lambda offer: check_there(offer.path)
        pool.refresh = dict if self.arguments.one else lambda: self.arguments.read().models
        return pool

    def _made(self, say: Callable[[str], None]) -> "ServedModel":
        """The default model, or the first other one that loads, which is then the default. Raises the default's error if none
        does, or the user named a model."""
        others = [] if self.arguments.ckpt else [n for n in self.offers.models if n != self.offers.default]
        name, error = self.offers.default, None
        while True:
            try:
                return self.first.made()
            except (NotFoundError, UnsupportedError, DoesNotFitError) as e:
                error = error or e
                if not others:
                    raise error from None
                say(f"{name} is not loaded: {e}")
                name = others.pop(0)
                self.offers, self.first = replace(self.offers, default=name), self._begin(name)

    @property
    def loaded(self) -> Loaded:
        """The facts of the default model, after `pool` was called."""
        assert self.first.loaded is not None
        return self.first.loaded

    def stop(self) -> None:
        """End the processes that this object started."""
        self.first.stop()
        self.loader.stop()
        if self.host is not None:
            self.host.close()


def _host_memory(offers: Offers) -> HostMemory | None:
    """The host memory that `--kv-host` requests. Raises UsageError if that is more than is free."""
    if offers.kv_host is None:
        return None
    free = memory.available_memory()
    if free is not None and offers.kv_host > free:
        has = f"{console.size(offers.kv_host)} is more than the {console.size(free)} that are free"
        raise UsageError(f"--kv-host (or kv_host in the file): {has}; name a smaller size")
    return HostMemory(offers.kv_host, len(offers.models))


def _room(loaded: Loaded, reserved: int) -> int | None:
    """The default limit of bytes for all models together: most of the device's memory; on a CPU most of the free memory after
    `reserved` bytes are subtracted."""
    if loaded.device_bytes is not None:
        return int(0.95 * loaded.device_bytes)
    free = memory.available_memory()
    return None if free is None else int(0.8 * max(0, free - reserved)) + loaded.facts.weight_bytes
