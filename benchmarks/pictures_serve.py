"""Part of pictures.py: users of lowq's engine who send pictures, and users who send texts beside them.

Each picture is another JPEG of 1,024 x 1,024 as a data URL, read by the server's own processes (`PictureReader`); an answer has
100 tokens. Users with texts send 300 tokens and get 200. The first token counts from the moment in which the request is sent.
"""

import asyncio
import base64
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pictures import IMAGES, NEW, Row, photo, prompt_of
from serve_load import percentiles

from lowq_cli.engine.model_record import owned
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.http.pictures import PictureReader
from lowq_cli.serving.request import Request

LOADS = ((1, 0), (16, 0), (0, 16), (4, 16))  # users with pictures, users with texts
PROMPT, TEXT_NEW = 300, 200
PICTURE, TEXT = "picture", "text"


class Users:
    """Users in a closed loop: each sends a request when the last one is answered."""

    def __init__(self, engine: Any, reader: PictureReader) -> None:
        self.engine, self.reader, self.pool, self.seed = engine, reader, ThreadPoolExecutor(32), 0
        self.events: queue.SimpleQueue[list[tuple[int, Any]]] = queue.SimpleQueue()
        self.lock, self.asked = threading.Lock(), list[Future[None]]()
        self.engine.start(self.events.put)

    def url(self) -> str:
        """The next picture."""
        self.seed += 1
        return "data:image/jpeg;base64," + base64.b64encode(photo(self.seed)).decode()

    def load(self, pictures: int, texts: int, count: int) -> Row:
        """Answer `count` requests of users with pictures (of those with texts, if there are no others); what the users saw."""
        urls = [self.url() for _ in range(count + 2 * pictures)] if pictures else []
        sent: dict[int, tuple[str, float]] = {}
        times: dict[int, list[float]] = defaultdict(list)
        counted, done, made = PICTURE if pictures else TEXT, 0, 0

        def ask(kind: str) -> None:
            now = time.perf_counter()
            if kind == PICTURE:
                images = asyncio.run(self.reader.read([("image_url", urls.pop())]))
                request = Request(tuple(prompt_of(images[0].rows)), NEW, pictures=images)
            else:
                self.seed += 1
                g = torch.Generator().manual_seed(self.seed)
                request = Request(tuple(torch.randint(100, 30000, (PROMPT,), generator=g).tolist()), TEXT_NEW)
            with self.lock:
                sent[self.engine.submit(request)] = kind, now

        began = time.perf_counter()
        for kind in [PICTURE] * pictures + [TEXT] * texts:
            self.asked.append(self.pool.submit(ask, kind))
        ended: dict[str, list[int]] = {PICTURE: [], TEXT: []}
        while done < count:
            events = self.events.get(timeout=60)
            with self.lock:  # a request's first event may be here before its number is
                events = [(n, e) for n, e in events if n in sent]
            for number, event in events:
                if event.finish_reason == "error":
                    raise RuntimeError(event.message)
                if event.token is not None:
                    times[number].append(time.perf_counter())
                    made += 1
                if event.finish_reason:
                    kind = sent[number][0]
                    ended[kind].append(number)
                    done += kind == counted
                    if urls or kind == TEXT:
                        self.asked.append(self.pool.submit(ask, kind))
        row: Row = {
            "pictures": pictures,
            "texts": texts,
            "answers": count,
            "tokens_per_s": made / (time.perf_counter() - began),
        }
        for kind, numbers in ended.items():
            if numbers:
                first = [times[n][0] - sent[n][1] for n in numbers]
                gaps = [b - a for n in numbers for a, b in zip(times[n], times[n][1:], strict=False)]
                row[kind] = {"answered": len(numbers), "first_ms": percentiles(first), "between_ms": percentiles(gaps)}
        self.drain(sent)
        return row

    def drain(self, sent: dict[int, tuple[str, float]]) -> None:
        """End what is still under way."""
        for one in self.asked:  # the picture of some may be read still
            one.result()
        self.asked.clear()
        for number in list(sent):
            self.engine.cancel(number)
        while self.engine.stats().running or self.engine.stats().waiting:
            time.sleep(0.01)
        while not self.events.empty():
            self.events.get()


def serve(model: Any, folder: Path, count: int, say: Callable[[Row], None]) -> None:
    """A row for each of LOADS."""
    owned(model).sight.load()
    engine, reader = engine_of(model, 256), PictureReader(str(folder), IMAGES)
    users = Users(engine, reader)
    users.load(4, 0, 12)  # processes are started
    for pictures, texts in LOADS:
        say(users.load(pictures, texts, count if pictures != 1 else 8))
    engine.stop(0)
    reader.stop()
