"""A ledger by its path, for whoever only wants to look, or to make one."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from xcal.dp.calibration import check_target
from xcal.dp.ledger import ledger as ledgers
from xcal.dp.ledger.analysis import Analysis, analyse
from xcal.dp.ledger.rows import Terms, Verification, read_rows, terms_of, verify


def ledger_path(path: Path) -> Path:
    """A ledger's own file, or the folder that `xcal ledger create` makes for one."""
    return path if path.suffix == ".sqlite" or path.is_file() else path / "ledger.sqlite"


@dataclass(frozen=True)
class Spent:
    """What a ledger's runs come to, beside what they may come to; ε and δ of None: no limit.

    `epsilon`, `delta`: of all runs, each by its whole target from its first step on, so that they
    hold wherever the runs stop; ε is infinite where a run had no guarantee. `steps`: those charged.
    """

    epsilon: float
    delta: float
    epsilon_limit: float | None
    delta_limit: float | None
    steps: int


class Ledger:
    """A ledger that is read without being locked, also while a training charges it.

    Args:
        path: the folder that `xcal ledger create` makes, or the ledger's file.

    Raises:
        UserError: where there is no ledger, or it cannot be read.

    Guarantee: reading changes nothing; `verify` recomputes every charge and the chain of rows.

    Example:
        >>> import tempfile, xcal
        >>> folder = tempfile.mkdtemp()
        >>> ledger = xcal.Ledger.create(
        ...     folder, population="ward-7", unit="record", epsilon=8.0, delta=1e-3
        ... )
        >>> ledger.verify().ok, ledger.spent().epsilon, ledger.spent().epsilon_limit
        (True, 0.0, 8.0)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = ledger_path(Path(path))
        self.terms: Terms = terms_of(read_rows(self.path))

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        population: str,
        unit: str,
        epsilon: float,
        delta: float,
    ) -> Ledger:
        """Make a ledger that carries a limit for life; one that stands there is never replaced.

        Args:
            path: a folder, or a file that ends in `.sqlite`.
            population: whose data these are: a name, for good.
            unit: "record" or "group": what every training that is charged to it must protect.
            epsilon, delta: what all trainings together may come to.

        Returns:
            The ledger, to look at; `xcal.PrivacyEngine(ledger=path)` charges it.

        Raises:
            UserError: where one stands already, or the limits are none.

        Guarantee: whatever is charged to it later, by whichever engine or run, comes to no more
        than (epsilon, delta); what would, is refused before it happens.
        """
        check_target(epsilon, delta)
        ledgers.create(ledger_path(Path(path)), Terms(population, unit, epsilon, delta))
        return cls(path)

    def verify(self) -> Verification:
        """Read it from end to end: chain, head, every cost and every limit, computed again.

        Returns:
            `ok`, and otherwise the first row that is wrong and what is wrong with it.

        Guarantee: rows that were changed, reordered or left out in the middle are found; of rows
        cut off at the end, the head file beside it tells.
        """
        return verify(self.path)

    def spent(self) -> Spent:
        """What all its runs come to, as it stands now.

        Returns:
            ε and δ of the runs, beside the limits, and the number of steps charged.
        """
        runs = self.runs()
        return Spent(
            math.fsum(math.inf if r.epsilon is None else r.epsilon for r in runs),
            math.fsum(r.delta or 0.0 for r in runs),
            self.terms.epsilon,
            self.terms.delta,
            sum(r.charges for r in runs),
        )

    def runs(self) -> list[Analysis]:
        """Its runs: target, planned and charged steps, whether they have halted."""
        return analyse(read_rows(self.path), pld=False)
