"""How often the guesses of a drafter on the device are right, by their place in a round of guesses."""

from collections.abc import Sequence

FADE = 0.95  # counts are multiplied by this at each round
BEFORE, WEIGHT = 0.75, 4.0  # assumed share of right guesses before any was checked, and the guesses that it counts as


class Rates:
    """Counts how often guesses were right, by their place in a round of guesses. before: initial chances.

    Attributes:
        chances: the chance of each guess to be right if those before it were.
    """

    def __init__(self, before: Sequence[float]) -> None:
        self.begin(before)

    def begin(self, before: Sequence[float]) -> None:
        """Reset the counts to the chances `before`."""
        self.right, self.tried = [WEIGHT * chance for chance in before], [WEIGHT] * len(before)
        self.chances = list(before)

    def note(self, checked: int, accepted: int) -> None:
        """Record that `checked` guesses were checked, and that the first `accepted` were right."""
        for i in range(min(accepted + 1, checked)):
            self.right[i], self.tried[i] = FADE * self.right[i] + (i < accepted), FADE * self.tried[i] + 1
            self.chances[i] = self.right[i] / self.tried[i]
