"""What is looked at after every private step: was it charged, and did anything pass it by?"""

from __future__ import annotations

from xcal.dp.batch_invariance import Remembered, check_remembers_nothing
from xcal.dp.clipping.named import trainable
from xcal.dp.mechanism import UnchargedRelease
from xcal.methods.context import StepContext, digest_tensors


class StepGuard:
    """Ends a run whose step was not charged for, or in which something moved past the release.

    `own_method`: a method from elsewhere, whose weights are also compared with what the optimizer
    left; methods of this package are read and tested instead.
    """

    def __init__(self, context: StepContext, *, own_method: bool) -> None:
        self._bench = context
        self._remembered = Remembered(context.model)
        self._weights = self._digest() if own_method else None
        if own_method:
            context.optimizer.before_step = self._check_weights
            context.optimizer.after_step = self._moved

    def _digest(self) -> str:
        return digest_tensors(trainable(self._bench.model).items())

    def _moved(self) -> None:
        self._weights = self._digest()

    def _check_weights(self) -> None:
        if self._weights is not None and self._weights != self._digest():
            raise UnchargedRelease(
                f"A step of the method {self._bench.method!r} changed weights otherwise than by"
                " what it released: the run ends here, and nothing of this step leaves."
            )

    def check(self, step: int) -> None:
        """After a step that returned. Raises before anything of it can leave."""
        context = self._bench
        if context.account is None:
            return
        if context.charges != [step]:
            raise UnchargedRelease(
                f"Step {step} of the method {context.method!r} made {len(context.charges)} charges"
                " where one is due: the run ends here, and nothing of this step leaves."
            )
        self._check_untouched()

    def check_halted(self, step: int) -> None:
        """After a step that the budget refused: it may have been charged, and has moved nothing."""
        if len(self._bench.charges) > 1:
            raise UnchargedRelease(
                f"Step {step} of the method {self._bench.method!r} made several charges."
            )
        self._check_untouched()

    def _check_untouched(self) -> None:
        context = self._bench
        context.charges.clear()
        self._check_weights()
        check_remembers_nothing(context.model, self._remembered)
