"""PrivacyEngine: the calls of Opacus' ghost clipping over a ledger that is charged beforehand."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from xcal.dp.account import Account
from xcal.dp.accounting import epsilon_rdp
from xcal.dp.calibration import (
    Calibration,
    Plan,
    calibrate,
    calibrate_fixed,
    check_target,
)
from xcal.dp.checks import (
    FORMAT,
    check_options,
    check_parts,
    load_saved,
    steps_within,
)
from xcal.dp.ledger.ledger import Ledger, create
from xcal.dp.ledger.reading import ledger_path
from xcal.dp.ledger.rows import OWN_LOOP, Head, Release, RunTerms, Terms
from xcal.dp.ledger_in_memory import MemoryLedger
from xcal.dp.loader import PrivateLoader
from xcal.dp.mechanism import Mechanism
from xcal.dp.noise import NoiseSource, SecureNoise, SeededNoise
from xcal.dp.pld import epsilon_pld
from xcal.dp.promise import Promise, promise_text
from xcal.dp.refusals import Refused
from xcal.dp.rehearsal import rehearse
from xcal.dp.sampling import UnitTable
from xcal.dp.steps import PrivateSteps, Records
from xcal.dp.wrappers import PrivateCriterion, PrivateModule, PrivateOptimizer
from xcal.durable import sync_folder
from xcal.errors import UserError

_ACCOUNTANTS = ("prv", "rdp")
PolicyCheck = Callable[[Ledger, RunTerms, Plan], None]
"""Raises where a training's plan is not allowed; asked with its ledger open, before any charge."""
_MOST_PLANNED = 10**7
_UNBOUNDED = 2**62  # steps of a training that was given no budget
_LONGEST_NAME = 100
_Parts = tuple[
    nn.Module,
    torch.optim.Optimizer,
    Callable[..., Tensor] | None,
    DataLoader[Any],
    Sequence[Any] | NDArray[Any] | Tensor | None,
]


class Private(NamedTuple):
    """What takes the place of a loop's own objects, in Opacus' order."""

    module: PrivateModule
    optimizer: PrivateOptimizer
    criterion: PrivateCriterion
    data_loader: PrivateLoader


@dataclass(frozen=True)
class _Terms:
    """All that fixes a private training, and that a resumed one must have again."""

    run: RunTerms
    rate: float
    sigma: float
    clip: float
    units: int
    records: int
    per_epoch: int
    divisor: float
    reduction: str
    noise: str
    seed: int | None


def _plan(terms: _Terms) -> Plan | None:
    """The training as the plan of one client; None where it has no budget."""
    run = terms.run
    if run.epsilon is None or run.delta is None:
        return None
    assert run.order is not None and run.budget is not None
    return Plan(
        method=run.method,
        unit=run.unit,
        epsilon=run.epsilon,
        delta=run.delta,
        units=terms.units,
        batch=max(1, round(terms.units * terms.rate)),
        rounds=1,
        local_epochs=1,
        steps=run.steps,
        sample_rate=terms.rate,
        order=run.order,
        budget=run.budget,
        sigma_static=terms.sigma,
        sigma_ref=terms.sigma,
        sigma_min=terms.sigma,
        sigma_max=terms.sigma,
        sigma_signal=None,
        signal_price=0.0,
        accountant=run.accountant,
    )


class PrivacyEngine:
    """Makes a torch training loop differentially private, and stops it when its budget is spent.

    A script moves over from Opacus' ghost clipping by changing the import: names, arguments and
    the order of what is returned are the same.

    Guarantee: whatever the loop does with the objects that `make_private_with_epsilon` returns,
    gradients reach the optimizer only as sums of clipped unit gradients plus noise, each charged
    before its batch was drawn, and all of them together are (ε, δ)-DP for one unit under zero-out
    neighbors; `statement` names what this rests on. With a ledger the charge is durable: a killed
    and restarted training cannot spend it twice.

    Args:
        accountant: "prv" or "pld" adds up by privacy-loss distributions, "rdp" by Rényi divergence.
        secure_mode: True: noise and draws from the operating system's randomness. False: from a
            seed that torch's global generator gives. None: secure, unless a seed or a
            `noise_generator` is given.
        ledger: the ledger that every step is charged to: its folder, as `xcal ledger create` makes
            it, or its file. Where none stands yet one is made whose lifetime limit is this
            training's target. None: in memory, enforced all the same.
        seed: for experiments that must come out the same again; no protection against who knows it.
        policy: what the owner of the data allows, as `xcal.policy` reads it from a `policy.toml`;
            asked before anything is charged. It needs a ledger that stands already.
        max_physical_batch_size: items that go through the network at once. A larger draw does in
            parts, with the same sum and one more forward pass; None: never.

    Raises:
        Refused: for an accountant that is not known, a seed in secure mode, or a policy without a
            ledger.

    Example:
        >>> import torch, xcal
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.randn(64, 5), torch.randint(0, 2, (64,)))
        >>> model = torch.nn.Linear(5, 2)
        >>> engine = xcal.PrivacyEngine(seed=0)
        >>> model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     criterion=torch.nn.CrossEntropyLoss(), data_loader=DataLoader(data, batch_size=8),
        ...     target_epsilon=3.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0)
        >>> for epoch in range(2):
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         criterion(model(x), y).backward()
        ...         optimizer.step()
        >>> engine.steps, engine.get_epsilon(1e-3) <= 3.0
        (16, True)
    """

    def __init__(
        self,
        *,
        accountant: str = "prv",
        secure_mode: bool | None = None,
        ledger: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        policy: PolicyCheck | None = None,
        max_physical_batch_size: int | None = 256,
    ) -> None:
        if max_physical_batch_size is not None and not (
            isinstance(max_physical_batch_size, int) and max_physical_batch_size >= 1
        ):
            raise Refused(
                "option",
                f"max_physical_batch_size is {max_physical_batch_size}: give a whole number of at"
                " least 1, or None.",
            )
        self._at_once = max_physical_batch_size
        if accountant not in (*_ACCOUNTANTS, "pld"):
            raise Refused(
                "option", f"The accountant {accountant!r} is not known: choose 'prv' or 'rdp'."
            )
        if secure_mode and seed is not None:
            raise Refused("option", "A seed is prohibited in secure_mode: leave one of them out.")
        if policy is not None and ledger is None:
            raise Refused("option", "A policy limits what a ledger has recorded: give the ledger.")
        self._accountant, self._secure, self._seed = accountant, secure_mode, seed
        self._policy = policy
        self._path = None if ledger is None else ledger_path(Path(ledger))
        self._ledger: Ledger | None = None
        self._terms: _Terms | None = None
        self._steps: PrivateSteps | None = None
        self._made: Private | None = None

    def __enter__(self) -> PrivacyEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the ledger, so that another training may charge it. Safe to call twice."""
        if self._ledger is not None and not isinstance(self._ledger, MemoryLedger):
            self._ledger.close()
        self._ledger = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[..., Tensor] | None = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        groups: Sequence[Any] | NDArray[Any] | Tensor | None = None,
        loss_reduction: str = "mean",
        noise_generator: torch.Generator | None = None,
        run: str | None = None,
        **options: Any,
    ) -> Private:
        """Private module, optimizer, criterion and loader at a given noise multiplier.

        With `target_epsilon` and `target_delta` the loader ends where one more step would pass
        them; without, nothing stops the training and `get_epsilon` says what it has come to.

        Args:
            module: the network; every parameter that requires a gradient is trained privately.
            optimizer: any torch optimizer of the module's parameters.
            criterion: a torch loss (default: cross-entropy), or a function of outputs and targets
                that gives one number per sample.
            data_loader: an ordinary loader. Each unit is drawn with probability 1/len(data_loader),
                independently, in its place.
            noise_multiplier: the noise's deviation over `max_grad_norm`.
            max_grad_norm: the norm that every unit's gradient is clipped to.
            target_epsilon, target_delta: the budget; a ledger needs one.
            groups: one id for every item of the data set. All items of one id are one unit, with
                one gradient: that of their mean loss.
            loss_reduction: "mean" divides the noisy sum by the expected number of units in a batch,
                as Opacus does; "sum" does not.
            noise_generator: a seed for noise and draws is taken from it, for experiments.
            run: the training's name in the ledger. A name that the ledger knows goes on with that
                training: same plan, and what it has charged stays charged.
            **options: Opacus' others, at the only value that is supported.

        Returns:
            (module, optimizer, criterion, data_loader), to be used in place of what was given.

        Raises:
            Refused: with a code that names what cannot be made private; nothing was charged.
            UserError: where the ledger is busy, damaged, or has no room for the target.

        Guarantee: as the class says, for (target_epsilon, target_delta).
        """
        known = isinstance(noise_multiplier, Real)
        if not (known and math.isfinite(noise_multiplier) and noise_multiplier > 0):
            raise Refused(
                "option",
                f"noise_multiplier is {noise_multiplier!r}: without noise nothing is private; give"
                " a positive number, or train without this engine.",
            )
        if (target_epsilon is None) != (target_delta is None):
            raise Refused("option", "Give target_epsilon and target_delta together, or neither.")
        if self._path is not None and target_epsilon is None:
            raise Refused(
                "option",
                f"The ledger {self._path} needs a budget to hold this training to: give"
                " target_epsilon and target_delta.",
            )

        def planned(rate: float, _: int) -> tuple[Calibration, int] | None:
            if target_epsilon is None or target_delta is None:
                return None
            return steps_within(rate, noise_multiplier, target_epsilon, target_delta)

        parts = module, optimizer, criterion, data_loader, groups
        how = max_grad_norm, loss_reduction, noise_generator, options
        target = target_epsilon, target_delta
        return self._make(parts, how, target, run, planned, noise_multiplier)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[..., Tensor] | None = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        groups: Sequence[Any] | NDArray[Any] | Tensor | None = None,
        loss_reduction: str = "mean",
        noise_generator: torch.Generator | None = None,
        run: str | None = None,
        rounds: int = 1,
        **options: Any,
    ) -> Private:
        """The same, with the least noise that `epochs` epochs may have within the target.

        In a federation, where every round is an engine of its own, often in a process of its own,
        give `run` and `rounds`: the noise is that of all rounds together, each engine goes on where
        the ledger says that the last one stopped, and after the planned steps loaders are empty.

        Args:
            module, optimizer, criterion, data_loader: the plain objects of a training loop.
            target_epsilon, target_delta: what all steps together may cost one unit.
            epochs: how many times the loader will be iterated over, in each round; it then ends for
                good.
            max_grad_norm: the norm that every unit's gradient is clipped to.
            groups, loss_reduction, noise_generator, run, options: as for `make_private`.
            rounds: how many engines share the target. A round that takes more steps than its part,
                or is done again after a crash, leaves fewer to the later ones.

        Returns:
            (module, optimizer, criterion, data_loader), to be used in place of what was given.

        Raises:
            Refused, UserError: as `make_private`; also for a target that no noise reaches.

        Guarantee: as the class says, for (target_epsilon, target_delta), wherever the loop stops.
        """
        check_target(target_epsilon, target_delta)
        if not (isinstance(epochs, int) and epochs >= 1):
            raise Refused("option", f"epochs is {epochs}: give a whole number of at least 1.")
        if not (isinstance(rounds, int) and rounds >= 1):
            raise Refused("option", f"rounds is {rounds}: give a whole number of at least 1.")
        if rounds > 1 and run is None:
            raise Refused(
                "option",
                "Rounds find one another in the ledger by the training's name: give run.",
            )

        def planned(rate: float, per_epoch: int) -> tuple[Calibration, int] | None:
            steps = rounds * epochs * per_epoch
            if steps > _MOST_PLANNED:
                raise Refused(
                    "option",
                    f"epochs is {epochs} and rounds is {rounds}: {steps:,} steps in all, more than"
                    f" can be planned for ({_MOST_PLANNED:,}).",
                )
            find = calibrate if self._accountant == "rdp" else calibrate_fixed
            return find(target_epsilon, target_delta, rate, steps), steps

        parts = module, optimizer, criterion, data_loader, groups
        how = max_grad_norm, loss_reduction, noise_generator, options
        return self._make(parts, how, (target_epsilon, target_delta), run, planned)

    def _make(
        self,
        parts: _Parts,
        how: tuple[float, str, torch.Generator | None, dict[str, Any]],
        target: tuple[float | None, float | None],
        name: str | None,
        planned: Callable[[float, int], tuple[Calibration, int] | None],
        sigma: float | None = None,
    ) -> Private:
        """All refusals first; then the plan, the ledger and the four objects."""
        module, optimizer, criterion, data_loader, groups = parts
        clip, reduction, generator, options = how
        epsilon, delta = target
        if self._terms is not None:
            raise Refused(
                "option",
                "This PrivacyEngine has a training already: make another one for the next, with the"
                " same ledger if it is on the same data.",
            )
        check_options(options, clip, reduction)
        if name is not None:
            if self._path is None:
                raise Refused("option", "A named run goes on in a ledger: give the engine one.")
            if not (isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.strip()):
                raise Refused(
                    "option",
                    f"run is {name!r}: give a name of at most {_LONGEST_NAME} characters.",
                )
        criterion = nn.CrossEntropyLoss(reduction=reduction) if criterion is None else criterion
        table = check_parts(module, optimizer, criterion, data_loader, groups, reduction)
        seed = self._seed_from(generator)
        if seed is not None and self._path is not None and not self._path.exists():
            raise Refused(
                "option",
                "A new ledger protects real people, and a seed protects nobody: leave out seed and"
                " noise_generator, or the ledger.",
            )
        per_epoch = len(data_loader)
        rate = 1 / per_epoch
        found = planned(rate, per_epoch)
        if found is None:
            assert sigma is not None
            plan, steps = Calibration(sigma, 8.0, 1.0, "pld"), _UNBOUNDED
        else:
            plan, steps = found
        unit = "record" if groups is None else "group"
        fixed = plan.accountant == "pld"
        run = RunTerms(
            run=secrets.token_hex(8) if name is None else name,
            method=OWN_LOOP,
            unit=unit,
            epsilon=epsilon,
            delta=delta,
            order=plan.order,
            budget=plan.budget,
            steps=steps,
            noise="secure" if seed is None else "seeded",
            accountant=plan.accountant,
            rate=rate if fixed else None,
            sigma=plan.sigma if fixed else None,
        )
        terms = _Terms(
            run=run,
            rate=rate,
            sigma=plan.sigma,
            clip=float(clip),
            units=table.n_units,
            records=table.n_images,
            per_epoch=per_epoch,
            divisor=float(max(1, int(table.n_units * rate))) if reduction == "mean" else 1.0,
            reduction=reduction,
            noise=run.noise,
            seed=seed,
        )
        return self._start(terms, module, optimizer, criterion, data_loader, table, None, 0)

    def _seed_from(self, generator: torch.Generator | None) -> int | None:
        if generator is None and self._secure is not False:
            return self._seed
        if self._secure:
            raise Refused("option", "A noise_generator is prohibited in secure_mode.")
        if self._seed is not None:
            return self._seed
        return int(torch.randint(2**62, (), generator=generator))

    def _start(
        self,
        terms: _Terms,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[..., Tensor],
        data_loader: DataLoader[Any],
        table: UnitTable,
        head: Head | None,
        done: int,
    ) -> Private:
        run = terms.run
        release = Release("gradient", terms.sigma * terms.clip, terms.clip)
        mechanism = Mechanism(terms.rate, release.noise / release.sensitivity, (release,))
        rehearse(module, criterion, terms.reduction, data_loader, run, mechanism)
        if self._path is None:
            self._ledger = MemoryLedger(Terms("in memory", run.unit, None, None, simulated=True))
        else:
            if head is None and self._policy is None and not self._path.exists():
                name = self._path.absolute().parent.name or "data"
                create(self._path, Terms(name, run.unit, run.epsilon, run.delta))
            self._ledger = Ledger(self._path, expected=head)
        noise: NoiseSource = SecureNoise() if terms.seed is None else SeededNoise(terms.seed)
        try:
            if self._path is not None and self._ledger.exact:
                raise Refused(
                    "counted",
                    f"Exact counts of held-out people have left the site of {self._path}, and"
                    " nobody knows whether they are in this data set: train in rounds of the"
                    " federation, or with a ledger of other people.",
                )
            if self._policy is not None:
                plan = _plan(terms)
                assert plan is not None  # a ledger needs a budget
                self._policy(self._ledger, run, plan)
            account = Account(self._ledger, run, replayable=False)
        except BaseException:
            self.close()
            raise
        steps = PrivateSteps(
            module,
            account,
            mechanism,
            Records(table),
            noise,
            by_group=run.unit == "group",
            per_epoch=terms.per_epoch,
            divisor=terms.divisor,
            at_once=self._at_once,
        )
        self._terms, self._steps = terms, steps
        self._made = Private(
            PrivateModule(module, steps),
            PrivateOptimizer(optimizer, steps),
            PrivateCriterion(criterion, terms.reduction, steps),
            PrivateLoader(data_loader, steps, done),
        )
        return self._made

    @property
    def steps(self) -> int:
        """Steps charged so far, in all rounds of this training."""
        return 0 if self._steps is None else self._steps.charged

    @property
    def steps_left(self) -> int | None:
        """Steps that the budget still covers, of those planned; None where no budget was set.

        Raises:
            Refused: before `make_private`.
        """
        terms = self._known()
        assert self._steps is not None
        if terms.run.epsilon is None:
            return None
        return 0 if self._steps.stopped else max(0, terms.run.steps - self.steps)

    @property
    def noise_multiplier(self) -> float:
        """The noise's deviation over `max_grad_norm`."""
        return self._known().sigma

    def _known(self) -> _Terms:
        if self._terms is None:
            raise Refused("option", "This PrivacyEngine has no training yet: call make_private.")
        return self._terms

    def get_epsilon(self, delta: float) -> float:
        """What the steps charged so far cost one unit, at `delta`.

        Args:
            delta: any δ; at the target's own the result never passes the target's ε.

        Returns:
            ε of that many steps, if their number was not chosen by what the data showed; for a
            number that was, the target holds, wherever the training stopped.

        Raises:
            Refused: before `make_private`.
            UserError: for a δ that is not between 0 and 1.
        """
        terms = self._known()
        check_target(1.0, delta)
        if not self.steps:
            return 0.0
        found = epsilon_rdp(terms.rate, terms.sigma, self.steps, delta)
        if found < 200:  # beyond, loss distributions cost memory and promise as little
            found = min(found, epsilon_pld(terms.rate, terms.sigma, self.steps, delta))
        run = terms.run
        if run.epsilon is not None and run.delta is not None and delta >= run.delta:
            found = min(found, run.epsilon)
        return found

    def statement(self) -> str:
        """The promise in words: unit, neighbors, mechanism, assumptions, what is not protected.

        Raises:
            Refused: before `make_private`.
        """
        terms = self._known()
        run = terms.run
        plan = _plan(terms)
        delta = run.delta if run.delta is not None else 1e-5
        return promise_text(
            Promise(
                plan,
                run.unit,
                terms.units,
                terms.rate,
                terms.sigma,
                terms.clip,
                terms.noise,
                None if self._path is None else str(self._path),
                self.steps,
                self.get_epsilon(delta),
                delta,
            )
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write network, optimizer, position and what was spent into one file, atomically.

        Args:
            path: the file, replaced if it exists. It holds released values, settings and, for an
                experiment, the seed. A draw that was not stepped yet is lost, and stays paid.

        Raises:
            Refused: before `make_private`.
        """
        terms = self._known()
        assert self._steps is not None and self._made is not None and self._ledger is not None
        head = None if self._path is None else asdict(self._ledger.head)
        saved = {
            "format": FORMAT,
            "terms": asdict(terms),
            "charged": self._steps.charged,
            "taken": self._steps.taken,
            "ledger": None if self._path is None else str(self._path.absolute()),
            "head": head,
            "module": self._made.module._module.state_dict(),
            "optimizer": self._made.optimizer.state_dict(),
        }
        target = Path(path)
        scratch = target.with_name(target.name + ".new")
        try:
            with open(scratch, "wb") as file:
                torch.save(saved, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, target)
            sync_folder(target.absolute().parent)
        except OSError as error:
            raise UserError(
                f"{target} cannot be written: is its folder there, and the disk not full?"
            ) from error

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[..., Tensor] | None = None,
        data_loader: DataLoader[Any],
        groups: Sequence[Any] | NDArray[Any] | Tensor | None = None,
        ledger: str | os.PathLike[str] | None = None,
        policy: PolicyCheck | None = None,
        max_physical_batch_size: int | None = 256,
    ) -> tuple[PrivacyEngine, Private]:
        """Go on with a saved training: same plan, same budget, at the place where it was saved.

        Args:
            path: what `save` wrote.
            module, optimizer, criterion, data_loader, groups: as they were given at the beginning;
                network and optimizer get the saved state.
            ledger: where the ledger lies now, if it was moved.
            policy: as for the engine; it is asked again.
            max_physical_batch_size: as for the engine.

        Returns:
            The engine, and its (module, optimizer, criterion, data_loader).

        Raises:
            Refused: where the file, the data's size or the units do not fit the saved training.
            UserError: where the ledger is older than the saved training, busy or damaged.

        Guarantee: steps that the ledger has charged stay charged, whether they were saved or not: a
        training that is resumed, once or often, never makes more than the planned number of steps.
        Without a ledger what was spent is what the file says, and resuming one file twice is two
        trainings.
        """
        saved = load_saved(Path(path))
        fields = saved["terms"]
        terms = _Terms(**{**fields, "run": RunTerms(**fields["run"])})
        reduction = terms.reduction
        criterion = nn.CrossEntropyLoss(reduction=reduction) if criterion is None else criterion
        table = check_parts(module, optimizer, criterion, data_loader, groups, reduction)
        now = ("record" if groups is None else "group", table.n_units, table.n_images)
        then = (terms.run.unit, terms.units, terms.records)
        if (*now, len(data_loader)) != (*then, terms.per_epoch):
            raise Refused(
                "resume",
                f"The training in {path} has the unit {then[0]!r}, {then[1]} units, {then[2]}"
                f" records and {terms.per_epoch} steps an epoch, and is resumed with {now[0]!r},"
                f" {now[1]}, {now[2]} and {len(data_loader)}: give it what it was begun with.",
            )
        if (saved["ledger"] is None) != (saved["head"] is None):
            raise Refused("resume", f"{path} is damaged: it does not say which ledger it charged.")
        if saved["ledger"] is None and ledger is not None:
            raise Refused("resume", f"The training in {path} was begun without a ledger.")
        try:
            module.load_state_dict(saved["module"])
            optimizer.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise Refused(
                "resume", f"Network or optimizer are not those of the training in {path}: {error}"
            ) from None
        where = ledger if ledger is not None else saved["ledger"]
        engine = cls(ledger=where, policy=policy, max_physical_batch_size=max_physical_batch_size)
        head = None if saved["head"] is None else Head(**saved["head"])
        done = saved["taken"] % terms.per_epoch
        made = engine._start(terms, module, optimizer, criterion, data_loader, table, head, done)
        assert engine._steps is not None
        engine._steps.restore(saved["charged"] if head is None else 0, saved["taken"])
        return engine, made
