"""Masks of grammars from a process of their own, which starts with the first request that needs one.

The library takes a second and 100 MB to prepare a tokenizer of 150,000 tokens, and no other thread of its process can run
Python meanwhile: in the engine's process all answers would stop. A server that is never asked for a form pays neither. A mask
takes 0.01 to 0.3 ms. The masks of all sequences of a pass are one message and one answer; a GPU computes the logits meanwhile.

A process that does not answer in time, such as a stopped one, is ended: its requests end with an error, and the next one that
needs a mask starts another process.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

import numpy as np

from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.serving import processes
from lowq_cli.serving.request import Mask, Words
from lowq_cli.serving.token_masks import Grammar, TokenMasks
from lowq_packers.errors import LowqError, UsageError, log_error, one_line
from lowq_packers.regular import read_text

ENDED = "the process that computes the masks of grammars has ended; ask again"
HUNG = "the process that computes the masks of grammars gave no answer for {} s and was ended; ask again"
STARTS_S = 60  # max. seconds of a start; with 150,000 tokens it took 10 on two cores with a load of 8
MAKES_S = 20  # max. seconds for the mask at the start of an answer; a schema of 2,000 properties takes 0.1
FILLS_S = 5  # max. seconds for the masks of a pass, for which the engine waits; 16 masks take 0.0007
ROW_S = 0.04  # more of them for each row: twice the library's own limit
TICK_S = 1.0  # they are counted in such steps, so that at most one of them passes while the machine is suspended


class Asked(NamedTuple):
    """A mask that is asked for. accepted: tokens sampled since it was last asked for. drafts: draft tokens after them."""

    number: int
    accepted: list[int]
    drafts: list[int]


class MaskProcess:
    """Makes masks from serialized grammars, in another process.

    Args:
        tokenizer: of the model. ends: tokens that end its answers. vocabulary: the number of logits.
    """

    def __init__(self, tokenizer: LoadedTokenizer, ends: Sequence[int], vocabulary: int) -> None:
        self.tokenizer, self.ends, self.vocabulary = tokenizer, list(ends), vocabulary
        self._running: _Running | None = None
        self._refusal = ""  # why the library refuses the tokenizer
        self._lock, self._stopped = threading.Lock(), False

    def mask(self, recipe: str) -> Mask:
        """The mask at the start of an answer; the first one waits for the process. Raises UsageError for a grammar that no
        answer can begin."""
        with self._lock:
            if self._refusal:
                raise UsageError(self._refusal)
            if self._stopped:
                raise LowqError("the server is stopping")
            if self._running is None or self._running.ended or not self._running.process.is_alive():
                file = self.tokenizer.unchanged_file()
                definition = self.tokenizer.definition() if file is None else None
                self._running = _Running(None if file is None else str(file), definition, self.vocabulary, self.ends)
                if refusal := self._running.refusal():
                    self._refusal = refusal
                    raise UsageError(refusal)
            return self._running.mask(recipe)

    def stop(self) -> None:
        """End the process. A mask that is being made then raises LowqError."""
        self._stopped = True
        if (running := self._running) is not None:
            running.process.kill()
            running.process.join()


@dataclass(eq=False)
class _Wait:
    """A call that waits for the process, and the seconds that are left to it."""

    left: float


class _Running:
    """The process. `mask` is called by one thread at a time; the rest by the engine's thread."""

    def __init__(self, file: str | None, definition: str | None, vocabulary: int, ends: list[int]) -> None:
        self._makes, makes = processes.context.Pipe()
        self._fills, fills = processes.context.Pipe()
        given = (makes, fills, file, definition, vocabulary, ends)
        self.process = processes.started(serve, given, "lowq-masks")
        makes.close()
        fills.close()
        self._number, self.ended = 0, ""  # ended: why it answers no more
        self._waits = list[_Wait]()
        threading.Thread(target=_watch, args=(self.process, self._waits), name="lowq-masks-watched", daemon=True).start()
        self._dropped, self._asked = list[int](), list[Asked]()
        self._answers: dict[int, bytes | str] = {}

    def refusal(self) -> str:
        """Wait until the process is ready; return why the library refuses the tokenizer, or ""."""
        with self._within(STARTS_S):
            return self._makes.recv()

    def mask(self, recipe: str) -> "RemoteMask":
        """Make a mask."""
        self._number += 1
        with self._within(MAKES_S):
            self._makes.send((self._number, recipe))
            why = self._makes.recv()
        if why:
            raise UsageError(why)
        return RemoteMask(self, self._number, recipe)

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """Wait for the process at most this long. Raises LowqError if it has ended."""
        call = _Wait(seconds)
        self._waits.append(call)
        try:
            yield
        except (EOFError, OSError):
            self.ended = self.ended or (HUNG.format(round(seconds)) if call.left <= 0 else ENDED)
            raise LowqError(self.ended) from None
        finally:
            self._waits.remove(call)

    def ask(self, mask: Asked) -> None:
        """Ask for a mask with the next message."""
        self._answers.pop(mask.number, None)
        self._asked.append(mask)

    def answer(self, number: int) -> bytes:
        """The words of a mask that was asked for, row by row as far as the drafts are taken. Raises UsageError, LowqError."""
        if number not in self._answers:
            asked, self._asked = self._asked, []
            dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
            with self._within(FILLS_S + ROW_S * sum(1 + len(one.drafts) for one in asked)):
                self._fills.send((asked, dropped))
                self._answers.update(zip((one.number for one in asked), self._fills.recv(), strict=True))
        words = self._answers.pop(number)
        if isinstance(words, str):
            raise UsageError(words)
        return words

    def drop(self, number: int) -> None:
        """Let go of a mask; called by any thread."""
        self._dropped.append(number)


def _watch(process: BaseProcess, waits: list[_Wait]) -> None:
    """Kill the process where a call has waited for too long: the main function of a thread."""
    while not wait([process.sentinel], TICK_S):
        for call in list(waits):
            call.left -= TICK_S
            if call.left <= 0:
                process.kill()


class RemoteMask(Mask):
    """The mask of one request in the other process."""

    takes_drafts = True

    def __init__(self, running: _Running, number: int, recipe: str) -> None:
        self.recipe, self._running, self._number = recipe, running, number
        self._accepted, self._asked = list[int](), False
        finalize(self, running.drop, number)

    def ask(self, drafts: Sequence[int] = ()) -> None:
        """Do what `Mask.ask` does."""
        self._running.ask(Asked(self._number, self._accepted, list(drafts)))
        self._accepted, self._asked = [], True

    def fill(self, words: Words) -> None:
        """Do what `Mask.fill` does."""
        self.fill_drafts(words[None], ())

    def fill_drafts(self, words: Words, drafts: Sequence[int]) -> int:
        """Do what `Mask.fill_drafts` does."""
        if not self._asked:
            self.ask(drafts)
        self._asked = False
        rows = np.frombuffer(self._running.answer(self._number), np.int32).reshape(-1, words.shape[1])
        words[: len(rows)] = rows
        return len(rows) - 1

    def accept(self, token: int) -> None:
        """Do what `Mask.accept` does."""
        self._accepted.append(token)


def serve(
    makes: Connection, fills: Connection, file: str | None, definition: str | None, vocabulary: int, ends: list[int]
) -> None:
    """Make masks and fill them until the engine's process ends: the main function of the process."""
    masks: dict[int, Grammar] = {}
    with suppress(EOFError, OSError):
        try:
            forms = TokenMasks(definition if file is None else read_text(Path(file)), vocabulary, ends)
        except UsageError as e:
            makes.send(one_line(e))
            return
        makes.send("")
        threading.Thread(target=_make, args=(makes, forms, masks), name="lowq-masks-made", daemon=True).start()
        while True:
            asked, dropped = fills.recv()
            for number in dropped:
                masks.pop(number, None)
            fills.send([_filled(masks[one.number], one, -(-vocabulary // 32)) for one in asked])
    os._exit(0)


def _make(makes: Connection, forms: TokenMasks, masks: dict[int, Grammar]) -> None:
    """Make masks, next to the thread that fills them: the library lets it run while it parses a grammar."""
    with suppress(EOFError, OSError):
        while True:
            number, recipe = makes.recv()
            try:
                masks[number] = forms.mask(recipe)
            except Exception as e:  # an error of this grammar: its request ends with it
                if not isinstance(e, LowqError):
                    log_error("a grammar cannot be used", e)
                makes.send(one_line(e))
                continue
            makes.send("")
    os._exit(0)


def _filled(mask: Grammar, asked: Asked, words_per_row: int) -> bytes | str:
    """The words of the next tokens and of those after each draft that is taken, or why there are none."""
    for token in asked.accepted:
        mask.accept(token)
    words = np.zeros((1 + len(asked.drafts), words_per_row), np.int32)
    try:
        taken = mask.fill_drafts(words, asked.drafts)
    except Exception as e:  # an error of this grammar, such as the library's own limit: its request ends with it
        if not isinstance(e, LowqError):
            log_error("a mask cannot be computed", e)
        return one_line(e)
    return words[: 1 + taken].tobytes()
