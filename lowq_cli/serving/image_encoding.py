"""Encoding of requests' images: the vision tower runs concurrently with the engine's steps, one image at a time.

A sequence whose images are not encoded yet waits here, not in the scheduler's queue, so that the steps of others go on. On a
GPU the tower runs in a separate stream. Features are cached by the images' names (`engine.vision`).
"""

import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from lowq_cli.engine.vision import Sight, sight_of
from lowq_cli.hf.pictures import unpacked
from lowq_cli.serving.sequence import Sequence

Seen = Callable[[Sequence, Exception | None], None]


class Seeing:
    """The thread that encodes images with the vision tower; it starts with the first image.

    Args:
        model: a model, with or without image input. seen: called with each sequence that is ready, or with the error.
    """

    def __init__(self, model: Any, seen: Seen) -> None:
        self.model, self.seen = model, seen
        self._queue = queue.SimpleQueue[Sequence]()
        self._thread: threading.Thread | None = None

    def sight(self) -> Sight:
        """Return the model's vision tower. Raises UnsupportedError where the model takes no images."""
        return sight_of(self.model)

    def add(self, text: Sequence) -> None:
        """Queue a sequence with images."""
        self._queue.put(text)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lowq-tower", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        sight = self.sight()
        stream = torch.cuda.Stream(sight.device) if sight.device.type == "cuda" else None
        while True:
            text, why = self._queue.get(), None
            try:
                with torch.inference_mode(), torch.cuda.stream(stream) if stream else nullcontext():
                    if not text.done:
                        text.shown = sight.shown(text.request.prompt, [unpacked(p) for p in text.request.pictures])
                if stream is not None:
                    stream.synchronize()
            except Exception as e:  # this ends only this sequence; a lost GPU ends the engine at its next pass
                why = e
            self.seen(text, why)
