"""The engine's side of the pipe of `engine_process`: the main function of the process that loads a model and computes."""

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from lowq_cli.serving.large_messages import receive
from lowq_cli.serving.request import Engine, Event, Mask, Request, Stats, failed
from lowq_packers.errors import LowqError, log_error, one_line

FRESH_S = 0.25  # max. age of Stats in seconds while no token comes
BEAT_S = 1.0  # max. seconds between two messages of a working engine process


class Made(NamedTuple):
    """The result of `make`: an engine not started yet, a function from recipes to masks, an object for the main process, and
    what ends the other processes of its masks."""

    engine: Engine
    mask: Callable[[str], Mask]
    facts: Any
    stop: Callable[[], None] = lambda: None


def compute(pipe: Connection, first: Callable[..., object] | None, before: tuple[Any, ...]) -> None:
    """Run the engine: the main function of its process."""
    here = EngineServer(pipe)
    try:
        if first is not None:
            first(*before)
        make, given = receive(pipe)
        here.send("began")
        here.run(make, given)
    except EOFError:  # a standby process that was not needed
        pass
    except Exception as e:  # any error: the main process raises it
        here.fail(e)
    os._exit(0)  # skips the teardown of torch's modules and CUDA's context, which takes 1.3 to 1.8 s


class EngineServer:
    """The engine's side of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.lock = threading.Lock()  # for sending and `numbers`: a request's first event may come before `submit` returns
        self.numbers: dict[int, int] = {}  # the engine's request number -> the main process's
        self.shown, self.started, self.spoke = Stats(), False, time.monotonic()
        self.unmasked: set[int] = set()  # the main process's numbers of requests whose masks are being made
        self.masker = ThreadPoolExecutor(1, "lowq-engine-masks")

    def run(self, make: Callable[..., Made], given: tuple[Any, ...]) -> None:
        """Make the engine, and serve the messages of the pipe until it is closed."""
        threading.Thread(target=self.beat, name="lowq-engine-beats", daemon=True).start()
        self.engine, self.mask, handle, stop = make(*given)
        e = self.engine
        self.send("made", handle, e.name, e.reason, e.limits, e.vocabulary)
        try:
            while True:
                came = self.pipe.poll(FRESH_S if self.started else None)
                if self.started:
                    self.refresh(came)
                if not came:
                    continue
                what, *rest = receive(self.pipe)
                if what == "stop":
                    e.stop(0)
                    self.send(None, None, e.measurements)
                    if rest[0]:
                        try:
                            self.send(None, e.keep(), e.measurements)
                        except Exception as why:  # such as too little memory for the copy: prompts are then prefilled again
                            log_error("blocks of the cache are not kept", why)
                    return
                getattr(self, what)(*rest)
        except (EOFError, ConnectionResetError):
            return
        finally:
            e.stop(0)
            stop()

    def start(self) -> None:
        """Do what Engine.start does."""
        self.engine.start(self.sink, lambda n, of: self.send("done", n, of))
        with self.lock:  # no beat comes after it
            self._send("started", self.engine.reason, self.engine.measurements)
            self.started = True

    def beat(self) -> None:
        """Send a sign of life each BEAT_S until the engine has started."""
        while not self.started:
            with self.lock:
                if not self.started:
                    self._send("beat")
            time.sleep(BEAT_S)

    def submit(self, number: int, request: Request, recipe: str | None) -> None:
        """Submit a request as Engine.submit does, but send a refusal as an event. A mask is made in another thread: the first
        takes seconds."""
        if recipe is None:
            self._submit(number, request)
        else:
            self.unmasked.add(number)
            self.masker.submit(self._submit_masked, number, request, recipe)

    def _submit_masked(self, number: int, request: Request, recipe: str) -> None:
        try:
            masked = replace(request, mask=self.mask(recipe))
        except Exception as e:  # an error of its grammar: only this request ends with it
            with self.lock:
                if number in self.unmasked:
                    self._tell([(number, failed(e))])
                self.unmasked.discard(number)
            return
        self._submit(number, masked)

    def _submit(self, number: int, request: Request) -> None:
        try:
            with self.lock:
                if request.mask is not None and number not in self.unmasked:
                    return  # cancelled
                self.unmasked.discard(number)
                self.numbers[self.engine.submit(request)] = number
        except Exception as e:  # an error of its settings: only this request ends with it
            self.tell([(number, failed(e))])

    def cancel(self, number: int) -> None:
        """Do what Engine.cancel does."""
        with self.lock:
            if number in self.unmasked:
                self.unmasked.discard(number)
                self._tell([(number, Event(finish_reason="cancelled"))])
            own_number = next((o for o, n in self.numbers.items() if n == number), None)
        if own_number is not None:
            self.engine.cancel(own_number)

    def refresh(self, busy: bool) -> None:
        """Send the engine's stats if they have changed, and a sign of life."""
        if time.monotonic() > self.spoke + BEAT_S or (not busy and self.engine.stats() != self.shown):
            self.tell([])

    def sink(self, batch: list[tuple[int, Event]]) -> None:
        """Send the engine's events of one step, under the main process's request numbers: the engine's Sink."""
        with self.lock:
            named = [(self.numbers[n], e) for n, e in batch]
            for n, e in batch:
                if e.finish_reason:
                    del self.numbers[n]
            self._tell(named)

    def tell(self, batch: list[tuple[int, Event]]) -> None:
        """Send events, under the main process's request numbers."""
        with self.lock:
            self._tell(batch)

    def _tell(self, batch: list[tuple[int, Event]]) -> None:
        """Send events together with the engine's stats; most events are just a token and are sent in a shorter form."""
        self.shown, self.spoke = self.engine.stats(), time.monotonic()
        self._send([(n, e.token if _plain(e) else e) for n, e in batch], self.shown, self.engine.closed)

    def send(self, *message: Any) -> None:
        """Send a message to the main process."""
        with self.lock:
            self._send(*message)

    def _send(self, *message: Any) -> None:
        with suppress(OSError):  # the main process is gone, which `run` will notice
            self.pipe.send(message)

    def fail(self, why: Exception) -> None:
        """Send the error that prevented the engine, with the traceback that LOWQ_DEBUG shows."""
        try:
            pickle.loads(pickle.dumps(why))
        except Exception as e:  # the class of `why` defines its pickling, which failed: send only its text
            log_error("an error that cannot be pickled", e)
            why = LowqError(f"{type(why).__name__}: {one_line(why)}")
        why.add_note(traceback.format_exc())
        self.send("failed", why)


def _plain(e: Event) -> bool:
    """Return whether an event has a token and nothing else."""
    return e.finish_reason is None and e.logprob is None and not e.cached and e.read is None
