"""How many prompt tokens come with each token that is sampled, and how many a pass takes so that most passes have some.

Where over half of all passes have prompt tokens, the usual wait for a token is that for such a pass, and the longest waits
cannot be far above it. So a pass takes what comes in one, over FULL; or more where more waits than that.
"""

# Share of all passes that prefill prompts which come faster than passes of SLACK steps carry. Below a half the usual wait for a
# token is that for a step, and the p99 is 6 times the median; at 0.8 first tokens wait longer (benchmarks/notes/serving.md).
FULL = 0.65
DRAIN = 7  # passes in which all waiting prompt tokens are prefilled, where that takes larger passes
MOST = 2.5  # max. size of such a larger pass, in times the prompt tokens that come during one
WINDOW = 3000  # sampled tokens over which the prompt tokens that come with each are averaged: two answers of each of 12 users


class PromptRate:
    """Attributes: taken, prompt tokens of passes since the last step; prompts, sampled: averages over passes that step."""

    def __init__(self) -> None:
        self.taken = self.prompts = self.sampled = 0.0

    def stepped(self, running: int, share: float) -> None:
        """Record a pass that steps `running` sequences. share: weight of it, small where few of all sequences run."""
        keep = max(0.0, 1 - running * share / WINDOW)
        self.prompts = keep * self.prompts + share * self.taken
        self.sampled = keep * self.sampled + share * running
        self.taken = 0.0

    def tokens(self, running: int, waiting: int) -> float:
        """Return the prompt tokens of a pass that steps `running` sequences while so many prompt tokens wait."""
        come = self.prompts / max(self.sampled, 1.0) * running
        return max(come / FULL, min(waiting / DRAIN, MOST * come))
