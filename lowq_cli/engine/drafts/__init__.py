"""Drafts: tokens that something cheaper than the model supposes, which the model then checks several at a time.

A step computes a text's newest token and up to MOST_DRAFTS drafts after it side by side (`verify`). After each of these rows
the model draws its own token by the ordinary sampler, whose random numbers depend on the seed and the token's position alone,
and a token goes out as long as the one before it was drafted right. So what goes out is always the model's own draw, whatever
was drafted: drafts change how fast a text comes, not which text.
"""

from typing import Any

from lowq_cli.engine.drafts.drafter import DeviceDrafter, DraftRows, Guess, HostDrafter
from lowq_packers.errors import UsageError

__all__ = ["NAMES", "DeviceDrafter", "DraftRows", "Guess", "HostDrafter", "make"]
NAMES = ("auto", "ngram", "none")


def check(draft: str) -> str:
    """The name of a way to draft, as it is. Raises UsageError for an unknown one."""
    if draft not in NAMES:
        raise UsageError(f"--draft {draft}: it can be {', '.join(NAMES)}")
    return draft


def make(draft: str, model: Any, tokenizer: Any) -> HostDrafter | None:
    """What drafts for one text of a model: by name, or None for nothing. Raises UsageError for an unknown name."""
    if check(draft) == "none":
        return None
    from lowq_cli.engine.drafts.ngram import NGram

    return NGram()
