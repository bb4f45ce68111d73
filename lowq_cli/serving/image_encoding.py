"""Encoding of requests' images: the vision tower runs concurrently with the engine's steps.

A sequence whose images are not encoded yet waits here, not in the scheduler's queue, so that the steps of others go on; images
of one size that wait run together. On a GPU the tower runs in a separate stream, and the next images are sent to the device
while it is at work. Features are cached by the images' names (`engine.vision`).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch

from lowq_cli.engine.recorded_tower import TOGETHER
from lowq_cli.engine.vision import Sight, sight_of
from lowq_cli.hf.pictures import Picture, unpacked
from lowq_cli.serving.sequence import Sequence

Seen = Callable[[Sequence, Exception | None], None]
LOOKED_AT = 8  # max. waiting sequences whose images may run with those of the first


class Seeing:
    """The thread that encodes images with the vision tower; it starts with the first image.

    Args:
        model: a model, with or without image input. seen: called with each sequence that is ready, or with the error.
    """

    def __init__(self, model: Any, seen: Seen) -> None:
        self.model, self.seen = model, seen
        self._waiting, self._changed = deque[Sequence](), threading.Condition()
        self._thread: threading.Thread | None = None

    def sight(self) -> Sight:
        """Return the model's vision tower. Raises UnsupportedError where the model takes no images."""
        return sight_of(self.model)

    def add(self, text: Sequence) -> None:
        """Queue a sequence with images."""
        with self._changed:
            self._waiting.append(text)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lowq-tower", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        sight, flight = self.sight(), None
        stream = torch.cuda.Stream(sight.device) if sight.device.type == "cuda" else None
        while True:
            text, others = self._next(wait=flight is None)
            launched = None if text is None else self._launch(text, others, sight, stream)
            if flight is not None:
                self._finish(*flight)
            flight = launched
            if flight is not None and flight[1] is None:
                self._finish(*flight)
                flight = None

    def _next(self, wait: bool) -> tuple[Sequence | None, list[Sequence]]:
        """The first waiting sequence and some of those behind it."""
        with self._changed:
            while wait and not self._waiting:
                self._changed.wait()
            text = self._waiting.popleft() if self._waiting else None
            return text, [*islice(self._waiting, LOOKED_AT)]

    def _launch(
        self, text: Sequence, others: list[Sequence], sight: Sight, stream: torch.cuda.Stream | None
    ) -> tuple[Sequence, torch.cuda.Event | None, Exception | None]:
        """Encode a sequence's images; returns it, the end of this work on a GPU, and the error if it failed."""
        try:
            with torch.inference_mode(), torch.cuda.stream(stream) if stream else nullcontext():
                if not text.done:
                    pictures = [unpacked(p) for p in text.request.pictures]
                    text.shown = sight.shown(text.request.prompt, pictures, _alike(text, others))
                return text, None if stream is None else stream.record_event(), None
        except Exception as e:  # this ends only this sequence; a lost GPU ends the engine at its next pass
            return text, None, e

    def _finish(self, text: Sequence, end: torch.cuda.Event | None, why: Exception | None) -> None:
        try:
            if end is not None:
                end.synchronize()
        except Exception as e:  # of the work that was launched; as above
            why = e
        self.seen(text, why)


def _alike(text: Sequence, others: list[Sequence]) -> Iterator[Picture]:
    """The images of other sequences that may run with those of a sequence."""
    shapes = {(p.rows, p.grid, p.tiles) for p in text.request.pictures if 2 * p.rows <= TOGETHER}
    for other in others:
        for p in other.request.pictures:
            if (p.rows, p.grid, p.tiles) in shapes and not other.done:
                yield unpacked(p)
