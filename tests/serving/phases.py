"""Models without torch, whose processes stand still in a phase that a test names: in the process, and in the test beside it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from counting import Counting
from saying import byte_tokenizer

from lowq_cli.serving.catalog import Offer
from lowq_cli.serving.engine_server import Made
from lowq_cli.serving.http import loading
from lowq_cli.serving.http.served_model import Facts


class Pausing(Counting):
    """Counts, but stands still in one phase; `gate` is its folder, where `phase` names it and `pid` says that it stands."""

    def __init__(self, gate):
        super().__init__()
        self.gate = Path(gate)
        self.stand("making")

    def stand(self, phase):
        here = self.gate / "phase"
        if here.exists() and here.read_text() == phase:
            here.unlink()
            (self.gate / "pid.new").write_text(str(os.getpid()))
            (self.gate / "pid.new").rename(self.gate / "pid")
            while True:
                time.sleep(60)

    def start(self, sink, done):
        self.stand("starting")
        super().start(sink, done)

    def submit(self, request):
        self.stand("answering")
        return super().submit(request)

    def stop(self, seconds):
        self.stand("stopping")
        super().stop(seconds)

    def keep(self):
        self.stand("keeping")


def get_ready(device):
    """In the place of `loading.get_ready`: nothing to import."""


def load(model, device, how, quiet):
    """In the place of `loading.load`, in the engine's process."""
    return Made(Pausing(model), None, loading.Loaded(byte_tokenizer(), frozenset(), loading.Roofline(), Facts(), None))


@dataclass
class Gate:
    """One model of the test: its folder, and the phase in which its next process shall stand still."""

    folder: Path

    def offer(self, **how):
        self.folder.mkdir(exist_ok=True)
        return Offer(self.folder.name, str(self.folder), **how)

    def stand(self, phase):
        (self.folder / "pid").unlink(missing_ok=True)
        (self.folder / "phase").write_text(phase)

    @property
    def standing(self):
        """The process that stands still; None while it does not yet."""
        pid = self.folder / "pid"
        return int(pid.read_text()) if pid.exists() else None
