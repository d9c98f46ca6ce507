"""Everything that a client sends: field by field, and what pays for it or why it is public.

`docs/messages.md` is made from this table; a test compares it with the messages' own fields and
with the log of a real run, so that nothing is sent that is not explained here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Field:
    """One field of a client's messages."""

    name: str  # as `messages.fields_of` names it
    message: str  # reply, refusal, disclosure, introduction, several of them, or all
    what: str
    kind: Literal["charged", "function of releases", "public", "no guarantee"]
    why: str  # the event that pays for it, or the reason why it is public or leaves without

    def is_in(self, kind: str) -> bool:
        """Whether messages of this kind have it."""
        return self.message == "all" or kind in self.message.split(", ")


CHARGED = "the ledger's charge of every step: the noisy gradient sum that each update is made of"
TABLE = "a charge of its own before it is drawn: one Gaussian over all tables of the message"
SIGNAL = "the ledger's charge of every step that releases a signal, jointly with its gradient"

INVENTORY: tuple[Field, ...] = (
    Field("format", "all", "version of the message format", "public", "a constant of the program"),
    Field("version", "all", "version of the program", "public", "a constant of the program"),
    Field(
        "kind",
        "all",
        "reply, refusal, disclosure or introduction",
        "public",
        "which of them this is",
    ),
    Field("client", "all", "the client's name", "public", "known since it joined"),
    Field(
        "run", "reply, disclosure, introduction", "the run's name", "public", "repeats the request"
    ),
    Field("round", "reply", "the round", "public", "repeats the request"),
    Field(
        "trained",
        "reply",
        "whether weights follow",
        "function of releases",
        "follows from the filter, whose costs depend on earlier releases only",
    ),
    Field("weights", "reply", "the model after the client's steps", "charged", CHARGED),
    Field(
        "numbers",
        "reply",
        "under masks, in place of weights: the rounded gradient sum (and count) with the client's"
        " share of the noise, masked",
        "charged",
        "the ledger's charge of the attempt; alone it is uniformly random to who has not all parts",
    ),
    Field(
        "masked.context",
        "reply",
        "which attempt the numbers are for",
        "public",
        "a digest of what the request says",
    ),
    Field(
        "masked.signature",
        "reply",
        "the client's signature of attempt and numbers",
        "public",
        "a function of what is sent",
    ),
    Field("report.client", "reply", "the client's name", "public", "known since it joined"),
    Field(
        "report.units",
        "reply",
        "number of units n",
        "public",
        "declared in `site.toml`, whatever the data hold; where it is counted instead, the same for"
        " zero-out neighbors, since a null unit is a unit",
    ),
    Field(
        "report.steps",
        "reply",
        "steps made in all rounds",
        "function of releases",
        "planned from public numbers; fewer only where the filter halted",
    ),
    Field(
        "report.halted",
        "reply",
        "whether the budget is exhausted",
        "function of releases",
        "the filter's decision, from costs that depend on earlier releases only",
    ),
    Field("report.order", "reply", "the filter's order", "public", "follows from the plan"),
    Field(
        "report.epsilon_spent",
        "reply",
        "odometer at the fixed order",
        "function of releases",
        "the sum of charged costs, which depend on earlier releases only",
    ),
    Field(
        "report.epsilon_paper",
        "reply",
        "ε by the paper's own accounting",
        "function of releases",
        "computed from the multipliers used, which depend on earlier releases only",
    ),
    Field(
        "report.share_spent",
        "reply",
        "Σρ/R",
        "function of releases",
        "the sum of charged costs over the plan's budget",
    ),
    Field(
        "report.mean_sigma",
        "reply",
        "mean noise multiplier of the round",
        "function of releases",
        "multipliers depend on earlier releases only",
    ),
    Field("report.mean_signal", "reply", "mean released signal", "charged", SIGNAL),
    Field(
        "report.ledger_rows",
        "reply",
        "rows of the client's ledger",
        "function of releases",
        "one row a run and a charged step, also of the population's other runs",
    ),
    Field(
        "report.ledger_hash",
        "reply",
        "hash of the ledger's last row",
        "function of releases",
        "a hash over public terms and charges; under seeded noise also over digests keyed by a"
        " secret of the client's",
    ),
    Field("report.noise", "reply", "secure or seeded", "public", "how the client is set up"),
    Field(
        "report.add_remove",
        "reply",
        "whether adding or removing one unit is covered too",
        "public",
        "how the client is set up: `units` in `site.toml`, and no cap on images",
    ),
    Field("trace.round", "reply", "the round of each step", "public", "repeats the request"),
    Field("trace.step", "reply", "the number of each step", "public", "counts the steps"),
    Field(
        "trace.sigma",
        "reply",
        "the multiplier of each step",
        "function of releases",
        "chosen from earlier releases only; xcal-paper: from this step's charged signal too",
    ),
    Field("trace.signal", "reply", "the signal of each step that released one", "charged", SIGNAL),
    Field(
        "trace.share_spent",
        "reply",
        "Σρ/R after each step",
        "function of releases",
        "the sum of charged costs over the plan's budget",
    ),
    Field(
        "trace.clip",
        "reply",
        "the clipping norm of each step, where it follows the data",
        "function of releases",
        "chosen from counts or gradients released, and charged, before the step",
    ),
    Field(
        "tables.classes",
        "disclosure",
        "units of each class among the training images, with noise; only where the policy allows"
        " statistics",
        "charged",
        TABLE,
    ),
    Field(
        "tables.confusion",
        "disclosure",
        "held-out units by true and predicted class, with noise; only where the policy sends"
        " evaluations",
        "charged",
        TABLE,
    ),
    Field(
        "tables.calibration",
        "disclosure",
        "confidence less truth in five bins of confidence, summed over held-out units, with noise",
        "charged",
        TABLE,
    ),
    Field("noise", "disclosure", "the deviation of that noise", "public", "follows from ε and δ"),
    Field("epsilon", "disclosure", "what the tables cost", "public", "the request, or the policy"),
    Field("delta", "disclosure", "what the tables cost", "public", "the request, or the policy"),
    Field(
        "counts",
        "disclosure",
        "held-out people by true and predicted class, exactly, each count below `floor` as null;"
        " only where the policy sends them",
        "no guarantee",
        "the owner's word (`evaluation_floor`): of people on whom nothing is trained, written down"
        " before it leaves; the certificate names it",
    ),
    Field("floor", "disclosure", "the lowest count that is sent", "public", "the policy"),
    Field(
        "units",
        "introduction",
        "number of units n",
        "public",
        "as `report.units`: sums are planned by the site that has most",
    ),
    Field(
        "identity",
        "introduction",
        "the public key that the client signs with",
        "public",
        "as other sites know it from its owner",
    ),
    Field(
        "key", "introduction", "the run's public key of its masks", "public", "made of randomness"
    ),
    Field(
        "signature",
        "introduction",
        "the client's signature of run, roster and key",
        "public",
        "a function of what is public",
    ),
    Field(
        "code",
        "refusal",
        "why it was refused, one of a fixed list",
        "public",
        "follows from the request, the policy, the ledger's totals and the declared units; `data`,"
        " `site`, `busy` and `internal` tell that something failed at the client and not what",
    ),
)


HEAD = """# What a client sends

Made from `src/xcal/federation/inventory.py` by `python docs/make_messages.py`; a test compares it
with the fields of the messages and with the log of a real run. Only `counts`, which no owner sends
unless they say so, has no guarantee. A client's owner can withhold every
`report.` and `trace.` field but `client`, `units`, `halted`, `noise` and `add_remove` (`report` in
`policy.toml`); a withheld field is sent as null. With `message_log = true` in `site.toml` a client
writes names and sizes of all that it sends to `messages.jsonl`.

| field | in | what it is | kind | what pays for it, or why it is public |
|---|---|---|---|---|
"""
FOOT = """
That a message came, when, and how long it took is seen by whoever watches the line: timing is not
covered by the guarantee, as the statement of every run says. The size of a reply follows from the
network and the number of steps, both public.
"""


def markdown() -> str:
    """`docs/messages.md`."""
    rows = (f"| `{f.name}` | {f.message} | {f.what} | {f.kind} | {f.why} |\n" for f in INVENTORY)
    return HEAD + "".join(rows) + FOOT
