"""The cache space of sequences over all groups of layers: blocks of pages, slots of recurrent state, and its snapshots.

A prefix of n whole blocks of tokens can be reused where each group without a window still has its n blocks, each group with
a window has the blocks that the next token attends to, and, if there are recurrent layers, a snapshot was taken after exactly
these tokens.

A snapshot is taken at three places: at the end of the last whole block of a prompt, so that the next turn of a conversation, or
the same prompt, continues from there; where a prompt diverges from the pages of an older sequence, because a prefix that two
prompts share is likely to come again; and after every SNAPSHOT_BLOCKS blocks of a running sequence.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import partial

from lowq_cli.serving.block_pool import Name, name_after
from lowq_cli.serving.cache_groups import REWIND, Group, PageGroup
from lowq_cli.serving.host_blocks import HostBlocks, Swap
from lowq_cli.serving.sequence import Sequence, Table
from lowq_cli.serving.state_slots import StateSlots

# Blocks of tokens between two snapshots of a running sequence. A snapshot reads and writes one state: 75 MB for the 36 gated
# delta layers of Qwen3-Next-80B, or 45 us at the bandwidth of an H100. With 4 blocks, 128 running sequences need one such copy
# every second step, under 1% of its time, and a conversation that continues computes at most 255 of its tokens again, fewer
# than one pass takes. A sequence's newest snapshot replaces the one before, so that a long answer evicts few other snapshots.
SNAPSHOT_BLOCKS = 4


@dataclass(frozen=True)
class Match:
    """A prefix in the cache: its tokens; its blocks by page group, 0 for blocks that no token needs any more; its snapshot, 0
    for none. A block or snapshot in host memory is given as minus its place there. pages: tokens of the longest prefix whose
    pages are in the cache, with or without a snapshot."""

    tokens: int
    blocks: list[list[int]]
    snapshot: int = 0
    pages: int = 0


class CacheManager:
    """The host's bookkeeping of a cache.

    Args:
        groups: the groups of layers, at most one of them recurrent. blocks: number of blocks of each paged group's pool, in
            order, including the null block. size: tokens per block. piece: max. tokens of one sequence in a pass.
        slots: max. sequences with a recurrent state at once. snapshots: additional slots for snapshots. copies: slots for
            states after the rows of drafts.
        host: places in host memory of each paged group, then of snapshots; () for none.
        shared: whether sequences share equal prefixes; otherwise blocks have no names, and no snapshots are taken.
    Attributes:
        swaps: copies to and from host memory, to run in order before the next pass and before `zero` and `copies`.
        zero: slots to fill with zeros before the next pass. copies: slots (from, to) to copy before it; no slot is in both.
        unwritten: slots of snapshots that the pass being planned writes. brought: tokens restored from host memory so far.
    """

    def __init__(
        self,
        groups: list[Group],
        blocks: list[int],
        size: int,
        piece: int,
        slots: int = 0,
        snapshots: int = 0,
        shared: bool = True,
        copies: int = 0,
        host: Several[int] = (),
    ) -> None:
        paged, recurrent = [g for g in groups if not g.recurrent], sum(g.recurrent for g in groups)
        if len(paged) != len(blocks) or recurrent > 1 or bool(slots) != bool(recurrent):
            raise ValueError(f"{groups} need a number of blocks each, or slots, not {blocks} and {slots}")
        self.size, self.shared = size, shared
        places = [*host, *[0] * (len(paged) + 1 - len(host))]
        self.pages = [PageGroup(g, n, size, piece, h) for g, n, h in zip(paged, blocks, places[:-1], strict=True)]
        self.states = StateSlots(slots, snapshots if shared else 0, copies) if recurrent else None
        self.host_states, self.swaps, self.brought = HostBlocks(places[-1] if recurrent else 0), list[Swap](), 0
        self.unwritten: set[int] = set()
        for i, group in enumerate(self.pages):
            group.pool.evicted = partial(self._store, i)
        if self.states is not None:
            self.states.evicted = partial(self._store, len(self.pages))
        self.zero: list[int] = []
        self.copies: list[tuple[int, int]] = []

    @property
    def blocks(self) -> int:
        """Total blocks of all groups, without the null blocks."""
        return sum(g.pool.blocks - 1 for g in self.pages)

    @property
    def used(self) -> int:
        """Blocks of all groups that sequences hold now."""
        return self.blocks - sum(g.pool.free for g in self.pages)

    def match(self, seq: Sequence) -> Match:
        """Return the longest prefix of a waiting sequence that the cache can supply; at least one token is left to compute."""
        blocks_of: list[list[int]] = [[] for _ in self.pages]
        runs = [0] * len(self.pages)  # length of the run of cached blocks that ends at the n-th
        best = pages = 0
        for n in range(1, (len(seq.tokens) - 1) // self.size + 1 if self.shared else 1):
            name, whole = self.name_of(seq, n), True
            for i, group in enumerate(self.pages):
                blocks_of[i].append(group.find(name))
                runs[i] = runs[i] + 1 if blocks_of[i][-1] else 0
                whole &= runs[i] > 0 or group.window > 0
            if not whole:
                break
            if all(runs[i] >= n - group.first(n * self.size) for i, group in enumerate(self.pages)):
                pages = n
                best = n if self.states is None or self._snapshot_of(name) else best
        blocks = []
        for group, row in zip(self.pages, blocks_of, strict=True):
            first = group.first(best * self.size)
            blocks.append([0] * min(first, best) + row[first:best])
        snapshot = self._snapshot_of(self.name_of(seq, best)) if self.states is not None and best else 0
        return Match(best * self.size, blocks, snapshot, pages * self.size)

    def common(self, seq: Sequence, other: Sequence, least: int) -> int:
        """Return the tokens, in whole blocks, of the common prefix of two sequences if they are more than `least`, else 0.

        At least one token of `seq` is left over.
        """
        low, high = least // self.size, min(len(seq.tokens) - 1, len(other.tokens)) // self.size
        if not self.shared or low >= high or self.name_of(seq, low + 1) != self.name_of(other, low + 1):
            return 0
        low += 1
        while low < high:
            n = (low + high + 1) // 2
            low, high = (n, high) if self.name_of(seq, n) == self.name_of(other, n) else (low, n - 1)
        return low * self.size

    def mark(self, seq: Sequence, tokens: int) -> None:
        """Request a snapshot after the first `tokens` tokens of a prompt being prefilled, if it has a recurrent state."""
        if self.states is not None and self.states.snapshots:
            seq.marks = sorted({*seq.marks, tokens})

    def fits(self, seq: Sequence, match: Match, spare: int) -> bool:
        """Return whether a sequence can be admitted with `spare` blocks of each pool left over."""
        if self.states is not None and not self.states.free:
            return False
        for group, blocks in zip(self.pages, match.blocks, strict=True):
            first = group.first(match.tokens)
            needed = max(0, group.end(len(seq.tokens) + 1, first) - len(blocks)) + sum(b < 0 for b in blocks)
            if group.pool.free - group.pool.idle(blocks) < needed + spare:
                return False
        return True

    def admit(self, seq: Sequence, match: Match) -> None:
        """Give a sequence the blocks of `match`, and room for its prompt and the first token of its answer.

        A group with a window gets room only for the tokens that one pass may compute.
        """
        seq.computed, seq.named = match.tokens, match.tokens // self.size
        rows = [self._bring(seq, i, blocks) for i, blocks in enumerate(match.blocks)]
        seq.tables = [Table(b, g.first(match.tokens)) for g, b in zip(self.pages, rows, strict=True)]
        self.brought += self.size * max((sum(b < 0 for b in blocks) for blocks in match.blocks), default=0)
        self.grow(seq, match.tokens + 1, len(seq.tokens) + 1)
        if self.states is None:
            return
        seq.slot = self.states.take()
        if match.snapshot < 0:
            name = seq.names[seq.named - 1]
            place = self.host_states.take(name)
            self.swaps.append(Swap(len(self.pages), False, seq.slot, place))
            self.host_states.keep(name, place)
        elif match.snapshot:
            self.states.use(seq.names[seq.named - 1])
            self.copies.append((match.snapshot, seq.slot))
        else:
            self.zero.append(seq.slot)
        if self.states.snapshots:
            last = (len(seq.tokens) - 1) // self.size * self.size
            seq.marks = sorted(m for m in {match.pages, last} if m > match.tokens)

    def grow(self, seq: Sequence, least: int, most: int) -> bool:
        """Take blocks for up to `most` tokens, as windows and pools allow; return whether `least` tokens have blocks."""
        for group, table in zip(self.pages, seq.tables, strict=True):
            end = group.end(most, table.first)
            while len(table.blocks) < end:
                block = group.pool.take(table.blocks[-1] if table.blocks else 0)
                if block is None:
                    break
                table.blocks.append(block)
        return all(len(t.blocks) * self.size >= least for t in seq.tables)

    def trim(self, seq: Sequence) -> None:
        """Give back blocks before the windows of all tokens still to be computed, even after a rewind by REWIND tokens."""
        for group, table in zip(self.pages, seq.tables, strict=True):
            first = group.first(max(0, seq.computed - REWIND))
            if first > table.first:
                group.pool.give_back(table.blocks[table.first : first])
                table.blocks[table.first : first] = [0] * (first - table.first)
                table.first = first

    def piece_end(self, seq: Sequence, end: int) -> int:
        """Return where a piece of a prompt has to end, at most at `end`: where its blocks end or a snapshot is due."""
        assert self.states is not None or not seq.marks
        while seq.marks and self.states is not None and self.states.find(self.name_of(seq, seq.marks[0] // self.size)):
            seq.marks.pop(0)  # another sequence has taken this snapshot in the meantime
        return seq.whole_end(min([end, *seq.marks[:1], *(len(t.blocks) * self.size for t in seq.tables)]))

    def snapshot(self, seq: Sequence, running: bool) -> int:
        """Return the slot to copy a sequence's state to after the pass that computes its tokens so far; 0: no snapshot."""
        if self.states is None or not self.states.snapshots:
            return 0
        if running:
            if seq.computed % (SNAPSHOT_BLOCKS * self.size):
                return 0
            if seq.snapshot is not None:
                self.states.retire(seq.snapshot)
        elif seq.computed not in seq.marks:
            return 0
        else:
            seq.marks.remove(seq.computed)
        snapshot = self.states.reserve()
        if snapshot:
            self.unwritten.add(snapshot)
            seq.pending.append((seq.computed, snapshot))
        return snapshot

    def name(self, seq: Sequence) -> None:
        """Name the blocks and snapshots of a sequence whose tokens the host has all read, so that others can share them."""
        full = min(seq.computed, len(seq.tokens)) // self.size if self.shared else 0
        for n in range(seq.named + 1, full + 1):
            for group, table in zip(self.pages, seq.tables, strict=True):
                if table.blocks[n - 1]:
                    group.pool.name(table.blocks[n - 1], self.name_of(seq, n))
        seq.named = max(seq.named, full)
        while seq.pending and seq.pending[0][0] <= len(seq.tokens):
            assert self.states is not None
            tokens, snapshot = seq.pending.pop(0)
            name = self.name_of(seq, tokens // self.size)
            seq.snapshot = name if tokens > seq.prompt else seq.snapshot
            self.states.name(snapshot, name)

    def most_drafts(self, n: int) -> int:
        """Return how many of n rows of a draft have a free slot for their recurrent state, without evicting a snapshot."""
        return n if self.states is None else min(n, self.states.free_copies)

    def draft(self, seq: Sequence, n: int) -> list[int] | None:
        """Make room for n more rows of a sequence, and return the slots for its recurrent state after each of its rows in this
        pass but the last; None where there is no room."""
        if not self.grow(seq, seq.computed + n, seq.computed + n):
            return None
        slots: list[int] = []
        if self.states is not None:
            while len(slots) < n and (slot := self.states.copy()):
                slots.append(slot)
            if len(slots) < n:
                for slot in slots:
                    self.states.drop_copy(slot)
                return None
            while seq.pending and seq.pending[-1][0] >= seq.computed:  # after the pass, its state will include the draft
                self.states.drop(seq.pending.pop()[1])
            seq.drafts = list(zip(range(seq.computed, seq.computed + n), slots, strict=True))
        return slots

    def rewind(self, seq: Sequence, length: int) -> None:
        """Rewind a running sequence to `length` computed tokens.

        Gives back its blocks after them, and puts into `copies` the copy of its recurrent state from the draft's slot, which
        runs before the next pass. Keys and values after `length` in the last block stay there and are overwritten. Raises
        ValueError, with nothing changed, where its blocks or its state are no longer there.
        """
        restored = [slot for tokens, slot in seq.drafts if tokens == length]
        behind = [g for g, t in zip(self.pages, seq.tables, strict=True) if g.first(length) < t.first]
        if behind or (length < seq.computed and self.states is not None and not restored):
            raise ValueError(f"text {seq.number} of {seq.computed} tokens cannot be taken back to {length}: more than a draft")
        for group, table in zip(self.pages, seq.tables, strict=True):
            keep = -(-length // self.size)
            group.pool.give_back(table.blocks[keep:])
            del table.blocks[keep:]
            table.sent = min(table.sent, keep)
        if self.states is None:
            return
        if length < seq.computed:
            self.copies.append((restored[0], seq.slot))
        for tokens, slot in seq.drafts:
            at_end = tokens <= length and tokens % (SNAPSHOT_BLOCKS * self.size) == 0
            if at_end and self.states.keep_copy(slot):
                seq.pending.append((tokens, slot))
            else:
                self.states.drop_copy(slot)
        seq.drafts, seq.computed = [], length

    def release(self, seq: Sequence) -> None:
        """Free everything a sequence holds; results still in flight for it will be ignored."""
        for group, table in zip(self.pages, seq.tables, strict=bool(seq.tables)):
            group.pool.give_back(table.blocks)
        if self.states is not None and seq.slot:
            for _, snapshot in seq.pending:
                self.states.drop(snapshot)
            for _, copy in seq.drafts:
                self.states.drop_copy(copy)
            self.copies = [copy for copy in self.copies if copy[1] != seq.slot]
            self.states.give_back(seq.slot)
        seq.tables, seq.slot, seq.computed, seq.named = [], 0, 0, 0
        seq.marks, seq.pending, seq.drafts, seq.drafting = [], [], [], False

    def store_all(self) -> None:
        """Copy all named blocks and snapshots to host memory, as far as there is room; for use when no sequence is left."""
        if self.states is not None:
            for name, slot in self.states.unretired()[-self.host_states.places or None :]:
                self._store(len(self.pages), name, slot)
        for i, group in enumerate(self.pages):
            for name, block in group.pool.unheld()[-group.host.places or None :]:
                self._store(i, name, block)

    @property
    def host_blocks(self) -> list[HostBlocks]:
        """The places in host memory of each group of pages, then of snapshots."""
        return [*(g.host for g in self.pages), self.host_states]

    def in_host(self) -> list[int]:
        """Return the number of used places in host memory of each group of pages, then of snapshots."""
        return [host.used for host in self.host_blocks]

    def records(self) -> tuple[list[tuple[Name, int]], ...]:
        """Return the names and places in host memory of each group of pages, then of snapshots."""
        return tuple(host.record() for host in self.host_blocks)

    def restore(self, records: Several[list[tuple[Name, int]]]) -> None:
        """Start from the `records` of another CacheManager."""
        for host, record in zip(self.host_blocks, records, strict=True):
            host.restore(record)

    def _store(self, group: int, name: Name, block: int) -> None:
        """Copy a block or snapshot that is evicted from the device to host memory."""
        states = group == len(self.pages)
        if states and block in self.unwritten:
            return
        place = (self.host_states if states else self.pages[group].host).put(name)
        if place:
            self.swaps.append(Swap(group, True, block, place))

    def _bring(self, seq: Sequence, index: int, blocks: Several[int]) -> list[int]:
        """Return a match's blocks in one group, now held by the sequence; those in host memory are copied to the device."""
        group, row = self.pages[index], list(blocks)
        group.pool.hold(b for b in row if b > 0)
        away = [(i, self.name_of(seq, i + 1)) for i, b in enumerate(row) if b < 0]
        places = [group.host.take(name) for _, name in away]  # taken first, so that blocks evicted below go to other places
        for i, name in away:
            block = group.pool.take(row[i - 1] if i else 0)
            assert block is not None
            group.pool.name(block, name)
            row[i] = block
        for (i, _), place in zip(away, places, strict=True):
            self.swaps.append(Swap(index, False, row[i], place))
            group.host.give_back(place)
        return row

    def _snapshot_of(self, name: Name) -> int:
        """Return the slot of the snapshot of this name; minus its place if it is only in host memory; 0 if there is none."""
        assert self.states is not None
        return self.states.find(name) or -self.host_states.find(name)

    def name_of(self, seq: Sequence, n: int) -> Name:
        """Return the name of a sequence's first n blocks of tokens."""
        names = seq.names
        while len(names) < n:
            at = len(names) * self.size
            names.append(name_after(names[-1] if names else seq.start, seq.spelled(at, at + self.size)))
        return names[n - 1]
