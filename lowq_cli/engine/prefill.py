"""What a batch of prompts still has to be read of, given what a cache holds, and in which passes; on the host alone."""

import sys
from collections.abc import Sequence

from lowq_cli.engine.hf_eager import CHUNK
from lowq_cli.engine.pictures import end_of_pass
from lowq_packers.errors import UnsupportedError


def reusable(held: Sequence[list[int]], prompts: Sequence[list[int]], read: Sequence[list[int]] = ()) -> int:
    """The number of leading tokens of all prompts that a cache holds, of which `held` are the tokens of each sequence.

    read: the prompts read last, where the model's recurrent states are known only after these whole prompts.
    """
    if not held:
        return 0
    known = min(shared(h, p) for h, p in zip(held, prompts, strict=True))
    if not read:
        return known
    whole = len(read[0])  # the answer after a prompt is read again
    return whole if known >= whole and all(len(p) == whole for p in read) else 0


def shared(held: list[int], prompt: list[int]) -> int:
    """The number of leading tokens that both share, without the prompt's last: that is always read, for its logits."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), most)


def prompt_passes(
    batch: int, known: int, longest: int, piece: int = sys.maxsize, whole: Sequence[tuple[int, int]] = (), most: int = CHUNK
) -> list[tuple[slice, slice]]:
    """(sequences, tokens) of each pass over prompts, from token `known` on. A pass has up to `most` tokens, and whole
    prompts if they fit.

    piece: max. tokens per sequence and pass. whole: (first token, end) of runs that must stay in one pass. Raises
    UnsupportedError where a run does not fit into a pass.
    """
    at_once = max(1, most // (longest - known))
    groups = [slice(b, min(b + at_once, batch)) for b in range(0, batch, at_once)]
    step, cuts, t = min(most, piece), list[slice](), known
    while t < longest:
        end = end_of_pass(t, min(t + step, longest), whole)
        if end <= t:
            raise UnsupportedError(f"a picture is longer than the {step} tokens that are read at once; make it smaller")
        cuts.append(slice(t, end))
        t = end
    return [(g, cut) for g in groups for cut in cuts]
