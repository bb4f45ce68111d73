"""The bundled model's engine, made in another process: that imports this file by name, so it lies on `pythonpath`."""

import os
import time

import torch

from lowq_cli.engine.open_model import ready
from lowq_cli.serving.engine_server import Made
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.request import Mask, allow
from lowq_packers.errors import UsageError

RUNNING, WAITING = 3, 4


class Multiples(Mask):
    """A mask that lets through multiples of a number, and breaks after a few tokens."""

    def __init__(self, recipe):
        self.recipe, self.left = recipe, 6

    def fill(self, words):
        for token in range(0, 8192, int(self.recipe)):
            allow(words, token)

    def accept(self, token):
        self.left -= 1
        if not self.left:
            raise UsageError("no rule fits")


def make():
    torch.set_num_threads(1)
    return Made(engine_of(ready("demo", "cpu")[0], WAITING, running=RUNNING), Multiples, {"pid": os.getpid()})


def gated(gate):
    """Masks are made only once a file is there."""

    def mask(recipe):
        while not os.path.exists(gate):
            time.sleep(0.01)
        return Multiples(recipe)

    return make()._replace(mask=mask)
