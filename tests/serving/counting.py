"""An engine that counts, for tests of what is around one: without torch its process is there in half a second."""

import os
import threading
import time
from dataclasses import replace

from saying import byte_tokenizer

from lowq_cli.serving.engine_server import Made
from lowq_cli.serving.http import loading
from lowq_cli.serving.http.served_model import Facts
from lowq_cli.serving.request import Event, Limits, Stats
from lowq_packers.errors import DoesNotFitError


class Counting:
    """Answers a request with 1, 2, 3, ..., one a millisecond."""

    name, reason, closed, vocabulary = "counting", "", "", 320
    limits = Limits(512, 8, 4, 4096, 0)
    measurements = None

    def __init__(self, fault=None):
        self.fault, self.open, self.number, self.ending, self.made = fault, {}, 0, False, 0

    def start(self, sink, done):
        if self.fault == "start":
            done(1, 2)
            raise MemoryError("while recording passes")
        self.sink = sink
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while self.open or not self.ending:
            time.sleep(0.001)
            events = []
            for number, (i, last) in list(self.open.items()):
                self.open[number] = i + 1, last
                events.append((number, Event(i, finish_reason="length" if i == last else None)))
                if i == last:
                    del self.open[number]
            self.made += len(events)
            if events:
                self.sink(events)

    def submit(self, request):
        self.number += 1
        self.open[self.number] = 1, request.max_tokens
        return self.number

    def cancel(self, number):
        if self.open.pop(number, None):
            self.sink([(number, Event(finish_reason="cancelled"))])

    def stats(self):
        return Stats(running=len(self.open), new_tokens=self.made)

    def stop(self, seconds):
        for number in list(self.open):
            self.cancel(number)
        self.ending = True


def make(fault=None):
    if fault == "memory":
        raise DoesNotFitError("a cache of 3 GB does not fit")
    if fault == "strange":
        raise type("Strange", (Exception,), {})("only here\nknown")
    if fault == "gone":
        os._exit(3)
    return Made(Counting(fault), None, {"pid": os.getpid()})


class Measuring(Counting):
    """Times a pass after it has started."""

    def stop(self, seconds):
        super().stop(seconds)
        self.measurements = replace(self.measurements, passes={(1, 1, False): 0.001})


def load(model, device, how, quiet):
    """In the place of `loading.load`, in the engine's process: each load measures one byte more than the one before."""
    engine = Measuring()
    engine.measurements = replace(how["earlier"], beside=how["earlier"].beside + 1, key=model.encode())
    return Made(engine, None, loading.Loaded(byte_tokenizer(), frozenset(), loading.Roofline(), Facts(), None))
