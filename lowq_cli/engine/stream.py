"""stream: a prompt in, text as it comes out, the numbers afterwards. The host's side of decoding, the same for every decoder.

On a GPU the host runs one step behind: it launches step i+1 before it looks at token i, so the device never waits for
detokenisation; the price is one wasted step after the end of a text.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from lowq_cli.engine.detokenize import Detokenizer
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.stopping import Stopper, check
from lowq_packers.errors import UnsupportedError, UsageError


class Decoder(Protocol):
    """Reads prompts, then gives the next token of every sequence, on the device.

    name, reason: what it is and why nothing faster was taken. ahead: whether `step` returns before the work is done.
    """

    name: str
    reason: str
    ahead: bool

    def start(self, prompts: list[list[int]], sampling: Sampling, room: int) -> torch.Tensor:
        """Read the prompts; at most `room` tokens will be asked for. The first new tokens, (B,)."""
        ...

    def step(self) -> torch.Tensor:
        """The next tokens, (B,)."""
        ...


class Generation:
    """Iterate for the text of the first sequence as it comes; afterwards the attributes tell the rest.

    texts, tokens, finish_reasons: one per sequence; a reason is "stop" (end of text), "length", "context" or
    "interrupted". ttft_s: from the call to the first token. prefill_tps: prompt tokens per second. decode_tps: tokens
    per second of all sequences together after the first ones; 0 where there was no second.
    """

    def __init__(self, decoder: Decoder, tokenizer: Any, prompts: list[list[int]], sampling: Sampling, room: int, **how: Any):
        self.decoder, self.prompts, self.sampling, self.room = decoder, prompts, sampling, room
        self.stop_ids: frozenset[int] = how["stop_ids"]
        self.limited_by: str = how["limited_by"]
        self.began: float = how["began"]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.texts = ["" for _ in prompts]
        self.finish_reasons = ["interrupted" for _ in prompts]
        self._open = set(range(len(prompts)))
        self._text = [Detokenizer(tokenizer, p) for p in prompts]
        self._stoppers = [Stopper(how["stop"]) for _ in prompts]
        self.ttft_s = self.prefill_s = self.decode_s = 0.0
        self.steps = 0

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.texts[0]

    @property
    def finish_reason(self) -> str:
        """The first sequence's reason for ending."""
        return self.finish_reasons[0]

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens read per second."""
        return sum(map(len, self.prompts)) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first of each sequence, all sequences together."""
        return (sum(map(len, self.tokens)) - len(self.prompts)) / self.decode_s if self.steps and self.decode_s else 0.0

    def __iter__(self) -> Iterator[str]:
        for i, piece in self.pieces():
            if i == 0 and piece:
                yield piece

    def pieces(self) -> Iterator[tuple[int, str]]:
        """(sequence, piece) as they come, every sequence."""
        for tokens in self._steps():
            for i in sorted(self._open):
                piece = self._take(i, tokens[i])
                self.texts[i] += piece
                yield i, piece
            if not self._open:
                return

    def _take(self, i: int, token: int) -> str:
        """Note a token of sequence i; the text it completes."""
        self.tokens[i].append(token)
        stopped = token in self.stop_ids
        ended = stopped or len(self.tokens[i]) == self.room
        piece = "" if stopped else self._text[i].push(token)
        piece, cut = self._stoppers[i].push(piece + self._text[i].flush() if ended else piece)
        if ended and not cut:
            piece += self._stoppers[i].flush()
        if ended or cut:
            self.finish_reasons[i] = "stop" if stopped or cut else self.limited_by
            self._open.discard(i)
        return piece

    def _steps(self) -> Iterator[list[int]]:
        """The tokens of each step, read one step behind the device where it works ahead."""
        if self.room == 0:
            self.finish_reasons = [self.limited_by for _ in self.prompts]
            return
        start = time.perf_counter()
        device = self.decoder.start(self.prompts, self.sampling, self.room)
        waiting = _Fetch(device)
        tokens = waiting.get()
        first = time.perf_counter()
        self.prefill_s, self.ttft_s = first - start, first - self.began
        ahead = _Fetch(self.decoder.step()) if self.decoder.ahead and self.room > 1 else None
        yield tokens
        for n in range(1, self.room):
            fetch = ahead or _Fetch(self.decoder.step())
            ahead = _Fetch(self.decoder.step()) if self.decoder.ahead and n + 1 < self.room else None
            tokens = fetch.get()
            self.steps, self.decode_s = n, time.perf_counter() - first
            yield tokens


class _Fetch:
    """A copy of (B,) tokens on its way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.event = None
        self.host = tokens
        if tokens.is_cuda:
            self.host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.host.copy_(tokens, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def get(self) -> list[int]:
        """The tokens; waits for them alone, not for what was launched after."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    chat: bool = False,
    batch: int = 1,
    stop: str | Sequence[str] = (),
    decoder: Decoder | None = None,
) -> Generation:
    """A Generation: iterate for pieces of text, then read tokens, finish_reason, ttft_s, prefill_tps, decode_tps.

    Args:
        model, tokenizer: what `lowq.load` returns, or any causal transformers model and its tokenizer.
        prompt: a text, or its token ids; or several of either, decoded side by side.
        chat: put the text into the model's chat template as the user's message.
        batch: continue each prompt this many times, side by side.
        stop: a text, or several, that end a sequence where they come up; they are no part of it.
        decoder: how to decode; None takes the fastest that can (`lowq_cli.engine.choose`).
    Raises:
        UsageError: no token to start from, a prompt that fills the context, a setting out of range.
        UnsupportedError: an encoder-decoder model.
    """
    began = time.perf_counter()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{model.config.model_type} is an encoder-decoder model; lowq generates with causal models")
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens={max_new_tokens} must not be negative")
    if batch < 1:
        raise UsageError(f"batch={batch} must be at least 1")
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    stops = check([stop] if isinstance(stop, str) else stop)
    given = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
    prompts = [encode(tokenizer, p, chat) if isinstance(p, str) else list(p) for p in given for _ in range(batch)]  # type: ignore[call-overload]
    if not prompts:
        raise UsageError("there is no prompt")
    longest = max(map(len, prompts))
    limit = check_length(model, longest)
    room = max_new_tokens if limit is None else min(max_new_tokens, limit - longest)
    if decoder is None:
        from lowq_cli.engine.choose import choose

        decoder = choose(model)
    limited_by = "length" if room == max_new_tokens else "context"
    how = {"stop_ids": stop_ids(model, tokenizer), "limited_by": limited_by, "began": began, "stop": stops}
    return Generation(decoder, tokenizer, prompts, sampling, room, **how)


def encode(tokenizer: Any, text: str, chat: bool = False) -> list[int]:
    """Token ids of a prompt. Raises UsageError for a missing chat template, a text without any token, and half characters."""
    check_characters(text)
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("this model has no chat template; leave --chat out and give the text as it should go on")
        message = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        ids = tokenizer(text)["input_ids"]
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UsageError("the prompt is empty and this model has no token to start a text with; give some text")
        ids = [start]
    return list(ids)


def check_characters(text: str) -> None:
    """Raise UsageError for bytes that are not UTF-8, from a terminal or a pipe, and for half a surrogate pair from JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("the prompt is not UTF-8 text; convert it, or check the locale") from None


def check_length(model: Any, tokens: int) -> int | None:
    """The model's context limit. Raises UsageError for a prompt of so many tokens that leaves no room in it."""
    limit = context_limit(model)
    if limit is not None and tokens >= limit:
        raise UsageError(f"the prompt has {tokens} tokens and the model's context ends at {limit}; shorten the prompt")
    return limit


def context_limit(model: Any) -> int | None:
    """The most tokens a text may have, from the model's config; None where the config names no limit."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text: generation_config's, else the config's, else the tokenizer's."""
    sources = (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer)
    found = next((e for s in sources if (e := getattr(s, "eos_token_id", None)) is not None), ())
    return frozenset([found] if isinstance(found, int) else found)
