"""Drafts: tokens that something cheaper than the model supposes, which the model then checks several at a time.

A step computes a text's newest token and up to MOST_DRAFTS drafts after it side by side (`verify`). After each of these rows
the model draws its own token by the ordinary sampler, whose random numbers depend on the seed and the token's position alone,
and a token goes out as long as the one before it was drafted right. So what goes out is always the model's own draw, whatever
was drafted: drafts change how fast a text comes, not which text.
"""

from lowq_cli.engine.drafts.drafter import DeviceDrafter, DraftRows, Guess, HostDrafter

__all__ = ["DeviceDrafter", "DraftRows", "Guess", "HostDrafter"]
