"""Pictures of requests on their way to the engine: the tower computes beside its steps, one picture at a time.

A text whose pictures have not been seen waits here, not in the scheduler's queue, so that the steps of others go on. On a GPU
the tower has a stream of its own. Features are kept by the pictures' names (`engine.vision`).
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
    """The thread that shows pictures to the tower, started for the first of them.

    Args:
        model: that takes pictures, or not. seen: told of each text that can be computed now, or why it cannot.
    """

    def __init__(self, model: Any, seen: Seen) -> None:
        self.model, self.seen = model, seen
        self._queue = queue.SimpleQueue[Sequence]()
        self._thread: threading.Thread | None = None

    def sight(self) -> Sight:
        """The model's. Raises UnsupportedError where it takes no pictures."""
        return sight_of(self.model)

    def add(self, text: Sequence) -> None:
        """A text with pictures."""
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
            except Exception as e:  # this text's alone, which ends; a lost GPU ends the engine at its next pass
                why = e
            self.seen(text, why)
