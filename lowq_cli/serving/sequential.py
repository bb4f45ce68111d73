"""The engine for models that ContinuousEngine cannot serve: one request after another, on the decoder of `generate`."""

import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lowq_cli import memory
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.prompts import context_limit
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.mapped_file import OverwrittenError
from lowq_cli.serving.fairness import Turns
from lowq_cli.serving.prompt_queries import PromptReader
from lowq_cli.serving.request import Busy, Done, Draw, Event, Limits, Request, Sink, Stats, check, check_unstarted, failed
from lowq_cli.serving.sampler_reference import Picker
from lowq_kernels.decode.kv import PLAIN, slot_bytes
from lowq_packers.errors import UnsupportedError, device_lost, one_line

FIRST_ROOM = 512  # tokens that a new cache has room for in addition to the prompt; doubled whenever an answer outgrows it
NO_LIMIT = 32768  # max. tokens of a sequence if the model's config names no limit
SHARE = 0.5  # fraction of the free memory that one sequence's cache may take
WHOLE_S = 3600.0  # seconds that a CPU may take for a prompt, which is one step: it does not hang as a GPU can
GREEDY = Sampling()


class _Cancelled(Exception):  # control flow: no client is left to get an error
    """The running request was cancelled."""


@dataclass
class _Queued:
    """A waiting request, in the form that `fairness.Turns` takes; steps are tokens."""

    number: int
    request: Request
    since: int
    waited: int = 0
    first: bool = False


class SequentialEngine:
    """An engine that computes one request at a time, while the others wait for their turn."""

    name = "one after another"
    measurements = None

    def __init__(
        self,
        model: Any,
        waiting: int,
        reason: str = "",
        kv: str = PLAIN,
        cache_bytes: int | None = None,
        room: int = FIRST_ROOM,
    ) -> None:
        self.model, self.reason, self.room = model, reason, room
        self.decoder: Any = decoder_of(model, kv)
        self._reader, self._check_files = PromptReader(model, kv), owned(model).check_files
        self.vocabulary = model.get_output_embeddings().weight.shape[0]
        self.limits = _limits(model, waiting, kv, cache_bytes)
        self._changed = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._cancelled: set[int] = set()
        self._running: int | None = None
        self._number = 0
        self.closed: str = "the server has not started yet"
        self._stats: dict[str, Any] = {"prompt_tokens": 0, "new_tokens": 0, "steps": 0}
        self._busy_s = 0.0
        self._thread: threading.Thread | None = None

    def start(self, sink: Sink, done: Done = lambda n, of: None) -> None:
        """Start the engine's thread."""
        check_unstarted(self._thread)
        self._sink, self.closed = sink, ""
        self._thread = threading.Thread(target=self._work, name="lowq-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> int:
        """Queue a request and return its number."""
        check(request, self.limits.longest, self.vocabulary)
        if request.pictures:
            raise UnsupportedError(f"pictures need lowq's own decoder, which does not support this model: {self.reason}")
        with self._changed:
            if self.closed:
                raise UnsupportedError(self.closed)
            if len(self._queue) >= self.limits.waiting:
                raise Busy(f"{len(self._queue)} requests wait already; try again later")
            self._number += 1
            self._queue.append(_Queued(self._number, request, self._stats["steps"]))
            self._changed.notify()
            return self._number

    def cancel(self, number: int) -> None:
        """Cancel a request before its next token."""
        with self._changed:
            waiting = next((queued for queued in self._queue if queued.number == number), None)
            if waiting is not None:
                self._queue.remove(waiting)
                self._sink([(number, Event(finish_reason="cancelled"))])
            elif number == self._running:
                self._cancelled.add(number)

    def stats(self) -> Stats:
        """Return the engine's current counts."""
        return Stats(running=int(self._running is not None), waiting=len(self._queue), busy_s=self._busy_s, **self._stats)

    def keep(self) -> None:
        """Return None: this engine leaves nothing for a later one."""

    def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for open requests to finish, then cancel the rest and stop the thread."""
        until = time.monotonic() + seconds
        with self._changed:
            self.closed = self.closed or "the server is stopping"
            while (self._queue or self._running is not None) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            left_over = [self._running, *(queued.number for queued in self._queue)]
        for number in left_over:
            self.cancel(number or 0)
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def _work(self) -> None:
        """Compute requests until the engine is stopped: the main function of its thread."""
        while True:
            with self._changed:
                while not self._queue and not self.closed:
                    self._changed.wait()
                if not self._queue:
                    return
                queued = Turns(self._queue, self._stats["steps"]).next(self._queue)
                self._queue.remove(queued)
                self._running, request = queued.number, queued.request
            began = time.monotonic()
            try:
                self._answer(self._running, request)
            except _Cancelled:
                self._sink([(self._running, Event(finish_reason="cancelled"))])
            except Exception as e:  # any error of one request: the others are answered all the same
                error = self._cause(e)
                self._sink([(self._running, failed(error))])
                if device_lost(error) or isinstance(error, OverwrittenError):
                    self._end(f"the engine has stopped: {one_line(error)}")
            self._busy_s += time.monotonic() - began
            with self._changed:
                self._cancelled.discard(self._running)
                self._running = None
                self._changed.notify_all()

    def _cause(self, e: Exception) -> Exception:
        """The error itself, or that of a file that was written over: then logits may be infinite."""
        try:
            self._check_files()
        except OverwrittenError as overwritten:
            return overwritten
        return e

    def _end(self, why: str) -> None:
        """Take no more requests, and end the waiting ones with an error."""
        with self._changed:
            self.closed, numbers = why, [queued.number for queued in self._queue]
            self._queue.clear()
        self._sink([(n, Event(finish_reason="error", message=why)) for n in numbers])

    @torch.inference_mode()
    def _answer(self, number: int, request: Request) -> None:
        """Compute one request, with one event per token."""
        if request.read is not None:
            read = self._reader(request.prompt, request.read)
            self._check_files()
            self._sink([(number, Event(finish_reason="stop", read=read))])
            self._reader.release()
            return
        prompt, draw, tokens, picker = list(request.prompt), request.draw, list[int](), None
        if draw != Draw() or request.mask is not None:
            picker = Picker(draw, request.mask, prompt, self.vocabulary, self.model.device)
        self._stats["prompt_tokens"] += len(prompt)
        until, finish = 0, None
        while finish is None:
            self._go_on(number)
            if len(tokens) == until:
                until = min(request.max_tokens, len(tokens) + max(self.room, len(tokens)))
                token = self.decoder.start([prompt + tokens], GREEDY, until - len(tokens), partial(self._go_on, number))
            else:
                token = self.decoder.step()
            if picker is not None:
                token = picker.pick(self.decoder.sampler.logits)
                self.decoder.sampler.token.copy_(token)
            tokens.append(int(token))
            if request.mask is not None:
                request.mask.accept(tokens[-1])
            self._stats["new_tokens"] += 1
            self._stats["steps"] += 1
            if tokens[-1] in request.stop_ids:
                finish = "stop"
            elif len(tokens) == request.max_tokens:
                finish = "length"
            logprob, top = (None, ()) if picker is None else picker.logprobs()
            self._check_files()
            self._sink([(number, Event(tokens[-1], logprob, top, finish))])

    def _go_on(self, number: int) -> None:
        """Raise _Cancelled if the request was cancelled."""
        if number in self._cancelled:
            raise _Cancelled


def _limits(model: Any, waiting: int, kv: str, cache_bytes: int | None) -> Limits:
    """Return the engine's limits; the longest sequence follows from the model, free memory and `cache_bytes`."""
    config = vars(model.config.get_text_config())
    longest = context_limit(model) or NO_LIMIT
    queries = config.get("num_attention_heads") or 1
    size = config.get("head_dim") or config.get("hidden_size", 0) // queries
    heads = config.get("num_key_value_heads") or queries
    each = 2 * config.get("num_hidden_layers", 0) * heads * (slot_bytes(kv, size, model.dtype) if size else 0)
    free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else memory.available_memory()
    rooms = [] if free is None else [int(SHARE * free)]
    rooms += [] if cache_bytes is None else [cache_bytes]
    if each and rooms:
        longest = max(1, min(longest, min(rooms) // each))
    limits = Limits(longest, 1, waiting, longest, longest * each)
    return limits if model.device.type == "cuda" else replace(limits, stuck_s=WHOLE_S)
