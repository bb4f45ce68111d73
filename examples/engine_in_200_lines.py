"""An engine with continuous batching and a paged cache, over the plan of a model: what `lowq serve` does, without its speed.

`lowq_cli.engine.plan.Plan` is a model as a flat list of operations. It computes one pass: rows of many sequences, first those
that add one token, then the tokens of new prompts. This file decides who owns which cache block, who runs and who waits. The
real engine (lowq_cli/serving) adds shared prefixes, chunks of prompts, CUDA graphs, windows, recurrent states and drafts.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

import lowq
from lowq_cli.engine.batch import Batch, KeyValues
from lowq_cli.engine.plan import Plan, plan_of
from lowq_kernels.decode.kv import zeros
from lowq_kernels.decode.reference import Packed
from lowq_packers.arch.parts import Pages

BLOCK = 64  # tokens in a cache block: what the attention kernels read at once
NULL = 0  # the block that belongs to no sequence


@dataclass(eq=False)
class Sequence:
    """One request: its prompt, the tokens so far, and the cache blocks that hold their keys and values."""

    prompt: list[int]
    most: int  # new tokens
    temperature: float = 0.0
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens whose keys and values the cache holds once the last one has been read."""
        return len(self.prompt) + len(self.tokens)

    @property
    def blocks_needed(self) -> int:
        """Blocks of the whole answer. They are taken at once, so a running sequence never has to wait for one."""
        return -(-(len(self.prompt) + self.most) // BLOCK)


class BlockPool:
    """Numbers of free cache blocks."""

    def __init__(self, blocks: int) -> None:
        self.free = deque(range(1, blocks))  # all but the null block

    def take(self, sequence: Sequence) -> bool:
        """Give a sequence its blocks, if there are enough."""
        if len(self.free) < sequence.blocks_needed:
            return False
        sequence.blocks = [self.free.popleft() for _ in range(sequence.blocks_needed)]
        return True

    def give_back(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self.free.extend(sequence.blocks)
        sequence.blocks = []


class Engine:
    """Requests in, tokens out.

    Args:
        model: any model whose layers all keep keys and values (`lowq.load`). end: the token that ends an answer.
        blocks: of the cache. running: sequences in a pass at most. context: tokens of a sequence at most.
    """

    def __init__(self, model: torch.nn.Module, end: int | None, blocks: int = 64, running: int = 8, context: int = 512) -> None:
        self.plan: Plan = plan_of(model)
        if not all(isinstance(spec, Pages) and spec.v_dim for spec in self.plan.states):
            raise NotImplementedError("a layer of this model keeps something other than keys and values")
        self.end, self.blocks, self.most_running, self.context = end, blocks, running, context
        self.pool, self.waiting, self.running = BlockPool(blocks), deque[Sequence](), list[Sequence]()
        self.angles = self.plan.angles(context, self.plan.device)  # cos and sin of the rotary embedding, by position
        self.passes = 0
        self.cache = [
            [zeros("16", (blocks, spec.heads, BLOCK, d), self.plan.dtype, self.plan.device) for d in (spec.k_dim, spec.v_dim)]
            for spec in self.plan.states
        ]

    def submit(self, prompt: list[int], most: int, temperature: float = 0.0) -> Sequence:
        """Put a request at the end of the queue."""
        sequence = Sequence(prompt, most, temperature)
        if not prompt or len(prompt) + most > self.context or sequence.blocks_needed > self.blocks - 1:
            raise ValueError(f"{len(prompt)} + {most} tokens do not fit")
        self.waiting.append(sequence)
        return sequence

    def run(self) -> Iterator[tuple[Sequence, int]]:
        """Passes until no sequence waits or runs: (sequence, its next token) as they come."""
        while self.waiting or self.running:
            stepping, new = list(self.running), self._admit()
            for sequence, token in zip(stepping + new, self._pass(stepping, new), strict=True):
                sequence.tokens.append(token)
                yield sequence, token
                if token == self.end or len(sequence.tokens) == sequence.most:
                    self.running.remove(sequence)
                    self.pool.give_back(sequence)

    def _admit(self) -> list[Sequence]:
        """Sequences that join the running ones in the next pass: the first of the queue, as long as there is room."""
        new = []
        while self.waiting and len(self.running) < self.most_running and self.pool.take(self.waiting[0]):
            new.append(self.waiting.popleft())
            self.running.append(new[-1])
        return new

    @torch.inference_mode()
    def _pass(self, stepping: list[Sequence], new: list[Sequence]) -> list[int]:
        """One pass of the model; the next token of each sequence, in this order."""
        device, b = self.plan.device, len(stepping)
        prompts = [token for sequence in new for token in sequence.prompt]
        ids = torch.tensor([sequence.tokens[-1] for sequence in stepping] + prompts, device=device)
        table = self._table(stepping + new)
        batch = Batch(
            ops=self.plan.ops,
            ids=ids,
            steps=b,
            pos=torch.tensor([s.length - 1 for s in stepping] + [0 for _ in new], dtype=torch.int32, device=device),
            angles=self.angles,
            given=self._packed(new, b, table) if new else None,
        )
        state = [KeyValues(k, v, table) for k, v in self.cache]
        hidden = self.plan.hidden(self.plan.embed(ids), batch, state)
        ends = torch.tensor([len(s.prompt) for s in new], dtype=torch.int64).cumsum(0) + b - 1  # the last row of each prompt
        rows = torch.cat([torch.arange(b), ends]).to(device)
        logits = self.plan.capped(self.plan.logits(hidden[rows])).float()
        self.passes += 1
        return [self._sample(row, s.temperature) for row, s in zip(logits, stepping + new, strict=True)]

    def _table(self, sequences: list[Sequence]) -> torch.Tensor:
        """(rows, most) int32: the block that holds tokens 64 j .. 64 j + 63 of each sequence. One column is always null."""
        width = -(-self.context // BLOCK) + 1
        rows = [s.blocks + [NULL] * (width - len(s.blocks)) for s in sequences]
        return torch.tensor(rows, dtype=torch.int32, device=self.plan.device)

    def _packed(self, new: list[Sequence], first_row: int, table: torch.Tensor) -> Packed:
        """Prompts one after another, in tiles that attention takes at once: each tile is of one sequence."""
        rows, positions, tiles = list[int](), list[int](), list[tuple[int, int]]()
        for i, sequence in enumerate(new):
            begin, n = len(rows), len(sequence.prompt)
            rows += [first_row + i] * n
            positions += range(n)
            tiles += [(t, min(t + self.plan.tile, begin + n)) for t in range(begin, begin + n, self.plan.tile)]
        there = (torch.tensor(t, dtype=torch.int32, device=self.plan.device) for t in (rows, positions, tiles))
        return Packed(table, *there)

    @staticmethod
    def _sample(logits: torch.Tensor, temperature: float) -> int:
        """The likeliest token, or one drawn by its probability."""
        if not temperature:
            return int(logits.argmax())
        return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1))


def main() -> None:
    model, tokenizer = lowq.load("demo", device="cpu")
    engine = Engine(model, tokenizer.eos_token_id, blocks=8, running=3)
    prompts = ["Once upon a time", "The ship", "It was a dark night, and the rain", "She said that", "The old man"]
    asked = [engine.submit(tokenizer(text).input_ids, most=4 + 4 * i) for i, text in enumerate(prompts)]
    tokens = sum(1 for _ in engine.run())
    for text, sequence in zip(prompts, asked, strict=True):
        print(f"{text}|{tokenizer.decode(sequence.tokens)}")
    print(f"{tokens} tokens of {len(asked)} requests in {engine.passes} passes")

    for text, sequence in zip(prompts, asked, strict=True):  # each is the text that the model writes alone
        alone = lowq.stream(model, tokenizer, text, max_new_tokens=sequence.most)
        list(alone)
        assert alone.tokens[0] == sequence.tokens


if __name__ == "__main__":
    main()
