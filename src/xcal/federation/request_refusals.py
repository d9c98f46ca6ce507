"""Why a client refuses a request: fixed codes that a server understands and that tell no secret.

The sentence with the detail stays in the client's own refusal log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xcal.dp.account import NoiseTooLow
from xcal.dp.batch_invariance import DependentNetwork
from xcal.dp.ledger.ledger import LedgerExhausted
from xcal.dp.ledger.rows import LedgerBusy, LedgerOlder, LedgerRefusal
from xcal.dp.mechanism import UnchargedRelease
from xcal.errors import UserError
from xcal.federation.masks import MaskRefusal
from xcal.plugins import OwnCodeError

CODES: dict[str, str] = {
    "malformed": "the message cannot be read, or a field is missing, unknown or of another type",
    "too-large": "the message is larger than the client's policy allows",
    "other-version": "server and client are of versions that do not fit; both numbers are told",
    "wrong-client": "the request is addressed to another client",
    "key-not-allowed": "the request sets a key that no server may set, such as noise or a seed",
    "foreign-code": "the job brings code, or names a class that the client does not run",
    "experiment-invalid": "the request's keys are not an experiment this version accepts",
    "method-not-allowed": "the client's policy does not allow this method",
    "network-not-allowed": "the client's policy does not allow this network",
    "unit-not-allowed": "the request protects another unit than the client's policy asks for",
    "epsilon-run": "the run asks for more ε than the client's policy allows one run",
    "delta-run": "the run asks for more δ than the client's policy allows one run",
    "epsilon-total": "all runs together would exceed the client's highest ε",
    "delta-total": "all runs together would exceed the client's highest δ",
    "delta-too-large": "the run's δ is not below 1 divided by the client's declared units",
    "sigma-too-low": "a step would use less noise than the client's policy allows",
    "too-many-steps": "the run plans more steps than the client's policy allows",
    "batch-too-large": "a step would draw more units than the client's policy allows",
    "no-guarantee": "the method has no guarantee, and this client's ledger carries a limit",
    "plan-refused": "no plan exists for this target with this client's declared units",
    "statistics-not-allowed": "the client's policy answers no such question at this ε and δ",
    "weights-mismatch": "names, shapes or types of the weights are not those of the network",
    "weights-not-finite": "the weights received are not all finite",
    "frozen-mismatch": "the parts that do not train differ between server and client",
    "round-not-own": "the round is not one of the client's own by the request's schedule",
    "round-past": "the round lies before the last one answered",
    "round-other-weights": "the round was answered already, for other weights",
    "diverged": "training left the range of finite numbers",
    "uncharged": "a step of the method was not covered by what it was charged for",
    "network-dependent": "the network's answer to an image depends on others or on earlier ones",
    "masks": "the client takes no part in this masked sum: its roster, a site's key or an attempt",
    "ledger": "the client's ledger does not admit it, or cannot be used",
    "ledger-older": "the client's ledger lacks rows seen before: an older copy, or another ledger",
    "busy": "the client is still at work on another request",
    "data": "the client's data cannot be had at what the request asks for",
    "site": "the client's own files need its owner's attention",
    "internal": "something failed at the client; its owner finds the detail in the refusal log",
}

# Refusals of what a run asks for, which is fixed when it begins: resuming it changes nothing.
TERMS = frozenset(
    "epsilon-run delta-run epsilon-total delta-total delta-too-large sigma-too-low too-many-steps"
    " batch-too-large statistics-not-allowed method-not-allowed network-not-allowed"
    " unit-not-allowed no-guarantee".split()
)


class Refused(UserError):
    """A refusal: a fixed code for the server, a sentence for the client's owner."""

    def __init__(self, code: str, detail: str) -> None:
        if code not in CODES:
            raise ValueError(f"unknown refusal code {code!r}")
        super().__init__(detail)
        self.code = code


def paid_so_far(who: str, charges: int) -> str:
    """What code of the user's own that failed has cost until then."""
    paid = "nothing was charged or reserved"
    if charges:
        paid = f"{charges} step{'s' if charges > 1 else ''} of this run stay charged"
    return f"Nothing of it leaves, and at {who} {paid}: repair it, and resume the run."


# Errors that mean the same wherever they come from; the first that fits counts.
_MEANT: tuple[tuple[type[UserError], str], ...] = (
    (LedgerBusy, "busy"),
    (LedgerOlder, "ledger-older"),
    (LedgerRefusal, "ledger"),
    (NoiseTooLow, "sigma-too-low"),
    (UnchargedRelease, "uncharged"),
    (DependentNetwork, "network-dependent"),
    (MaskRefusal, "masks"),
)


@contextmanager
def naming(code: str) -> Iterator[None]:
    """Within: what a user could have caused becomes a refusal of this code, or of its own."""
    try:
        yield
    except Refused:
        raise
    except LedgerExhausted as error:
        raise Refused(f"{error.ran_out[0]}-total", str(error)) from error
    except OwnCodeError as error:
        # In training it is nothing that the ledger refuses.
        raise Refused("internal" if code == "ledger" else code, str(error)) from error
    except UserError as error:
        meant = next((own for kind, own in _MEANT if isinstance(error, kind)), code)
        raise Refused(meant, str(error)) from error
