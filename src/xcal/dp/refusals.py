"""What a training loop can get wrong, by name."""

from __future__ import annotations

from xcal.errors import UserError

CODES = {
    "option": "an argument of Opacus that means something else here, or nothing",
    "network": "a network whose per-sample gradients cannot be kept apart (BatchNorm, for one)",
    "foreign-parameters": "an optimizer that holds parameters which are not the module's",
    "loader": "a data loader whose own sampling cannot be replaced by Poisson sampling, whose"
    " collate function does not make every row of its own item alone, or that is iterated over"
    " twice at once",
    "groups": "ids of units that do not fit the data set",
    "criterion": "a criterion that trains parameters of its own, mixes samples, remembers them, or"
    " whose reduction is another",
    "no-draw": "the network trained on, or the optimizer stepped, outside of a draw of the loader",
    "other-rows": "rows that were not drawn, are not in their place, or are combined with others",
    "reduced-loss": "a loss that is not one number per sample, or was averaged by hand",
    "foreign-loss": "a backward pass of a loss that is not the returned criterion's",
    "second-backward": "a second backward pass, or forward pass after it, for one draw",
    "no-backward": "a step before the backward pass",
    "changed-gradients": "gradients that were changed between backward pass and step",
    "not-zeroed": "gradients of an earlier draw that were not zeroed, or are being accumulated",
    "unwrapped-optimizer": "a step of the optimizer that was handed in instead of the returned one",
    "budget": "a step after the budget was spent",
    "counted": "a ledger whose site has sent exact counts of people whom the loop may train on",
    "resume": "a saved training that does not fit what it is resumed with",
}


class Refused(UserError):
    """A use that would not be private, or not what it seems. `code` is one of `CODES`.

    Raised before anything is released; the model is as it was.
    """

    def __init__(self, code: str, sentence: str) -> None:
        assert code in CODES
        super().__init__(sentence)
        self.code = code
