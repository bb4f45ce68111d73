"""Drafts: tokens guessed by something cheaper than the model, several of which the model checks in one step.

A step computes the rows of a sequence's newest token and of up to MOST_DRAFTS drafts after it (in `generate`: `draft_length`,
`verify`; in the server: serving/draft_budget.py, draft_passes.py). After each row the model draws a token with the ordinary
sampler, whose random numbers depend only on the seed and the token's position. A drawn token is output if all drafts before it
were right. So every output token is the model's draw: drafts change the speed of generation, not the text.
"""

from lowq_cli.engine.drafts.drafter import DeviceDrafter, DraftRows, Guess, HostDrafter

__all__ = ["DeviceDrafter", "DraftRows", "Guess", "HostDrafter"]
