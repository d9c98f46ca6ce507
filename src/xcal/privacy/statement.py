"""What a run promises, to whom and under which assumptions; in words and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xcal.privacy.calibration import Plan
from xcal.privacy.groups import group_epsilon

RELATION = (
    "zero-out: two data sets are neighbours when one unit's data are replaced by a null unit that"
    " contributes zero to everything; the number of units is the same on both sides and public"
)
SERVER_SEES = (
    "after every round a client's weights, which are made of noisy releases only; its declared"
    " number of units; its noise multipliers, clipping norms, released signals, odometer and ledger"
    " head, all of them functions of releases and public constants; and that it took part"
)
NOT_PROTECTED = (
    "timing (durations follow the drawn batch's size)",
    "the number of units and who takes part",
    "validation and test images, which are treated as public",
    "what the machine's operator, its memory or its files give away",
    "the choice of hyper-parameters: the defaults were tuned on the evaluation sets",
)
ASSUMPTIONS = (
    "each step draws every unit independently with the stated rate, and the draw stays secret",
    "one unit is one image or one group as declared, and stands once at one client",
    "clients follow the protocol; the server may send any weights it likes",
    "floating point behaves as the reals up to the stated margins: clipping to C/(1 + 10⁻³) in"
    " single precision, releases rounded to a public grid",
)


@dataclass(frozen=True)
class Situation:
    """What a statement needs to know beside the plans."""

    method: str
    unit: str
    noise: str
    plans: dict[str, Plan]  # by client; empty without a guarantee
    shared_units: bool = False
    groups_split: bool = False
    group_name: str = "record"
    group_cap: int | None = None  # declared and enforced, for record-level runs
    epsilon_nominal: float | None = None
    server_plan: Plan | None = None  # a trusted server's, whose unit is the client
    preset: str | None = None  # whose settings lie beneath the experiment's own


CENTRAL_RELATION = (
    "zero-out of a whole client: two federations are neighbours when all that one client sends is"
    " replaced by zero; who takes part in which round is the same on both sides and public"
)
CENTRAL_NOT_PROTECTED = (
    "anything against the server, which is trusted and sees every update as it is",
    "who takes part and when, how long each takes, and how many units each declares",
    "validation and test images, which are treated as public",
    "the choice of hyper-parameters: the defaults were tuned on the evaluation sets",
)
CENTRAL_ASSUMPTIONS = (
    "the server clips every update, adds the noise and shows nobody anything else",
    "one client is one unit: what stands at two clients is protected only as two units are",
    "updates reach the server by a channel that nobody else reads",
)


def _central_promise(method: str, plan: Plan) -> str:
    return (
        f"At client level the sequence of released models is ({plan.epsilon:g},"
        f" {plan.delta:g})-differentially private for all that one client contributes (client),"
        " against other clients and anyone who receives a model. The server is trusted: it sees raw"
        f" updates, so against it {method} promises nothing, and at record level each client's own"
        " ledger records an infinite epsilon."
    )


def _central_worth(plan: Plan) -> str:
    """What a guarantee among few clients is worth, in numbers that the plan knows."""
    share = plan.sigma_ref / plan.units
    return (
        f"The mean is over {plan.units} clients a round. One of them moves it by at most S/"
        f"{plan.units}, and hides behind noise of {share:.3g} S on every coordinate, in each of"
        f" {plan.rounds} rounds; the mean itself is never longer than S. "
        + (
            "With so few clients either the noise drowns what is learnt or epsilon is so large that"
            " it promises little; this guarantee was made for thousands of clients."
            if plan.units < 100
            else "With more clients a round the same epsilon needs less noise on the mean."
        )
    )


def _nominal(situation: Situation) -> str:
    """What to think of the ε that a method without a guarantee was given."""
    if situation.epsilon_nominal is None:
        return ""
    return (
        f" Its noise was chosen for an epsilon of {situation.epsilon_nominal:g}, but not all that"
        " leaves a step carries that noise: the nominal epsilon bounds nothing."
    )


def _promise(situation: Situation) -> str:
    plans = list(situation.plans.values())
    if situation.server_plan is not None:
        return _central_promise(situation.method, situation.server_plan)
    if not plans:
        return (
            f"The method {situation.method} has no differential-privacy guarantee: epsilon is"
            " infinite. Whoever sees an update or the model may learn anything about the"
            " training images." + _nominal(situation)
        )
    plan = plans[0]
    unit = (
        "one image (record)"
        if plan.unit == "record"
        else f"all images of one {situation.group_name} (group)"
    )
    return (
        f"Each client's whole training, over all its rounds, is ({plan.epsilon:g},"
        f" {plan.delta:g})-differentially private for {unit}, against the server, other clients and"
        " anyone who receives the model, whatever was spent of it."
    )


def person_guarantees(situation: Situation) -> list[dict[str, Any]]:
    """What a record-level run is worth to a person with several images, worst client first.

    For the declared cap, or for a few examples where none is declared: the largest group that is
    really there is private and is not looked at.
    """
    if situation.unit != "record" or situation.group_name == "record" or not situation.plans:
        return []
    cap = situation.group_cap
    found = []
    for images in (cap,) if cap is not None else (2, 4, 12):
        values = [group_epsilon(plan, images) for plan in situation.plans.values()]
        worst = None if None in values else max(v for v in values if v is not None)
        found.append({"images": images, "epsilon": worst})
    return found


def _person_sentence(situation: Situation, found: dict[str, Any]) -> str:
    delta = next(iter(situation.plans.values())).delta
    who = f"a {situation.group_name} with {found['images']} images"
    if found["epsilon"] is None:
        return f"no guarantee for {who}"
    return f"for {who}: epsilon {found['epsilon']:.3g} at delta {delta:g}"


def _warnings(situation: Situation) -> list[str]:
    found = {w for plan in situation.plans.values() for w in plan.warnings}
    if situation.server_plan is not None:
        found |= {*situation.server_plan.warnings, _central_worth(situation.server_plan)}
    if (situation.plans or situation.server_plan) and situation.noise == "seeded":
        found.add(
            "Noise and draws come from a seed: this is a simulation, private against nobody who"
            " knows or guesses the seed; models of runs that share a seed must not be released"
            " together as private."
        )
    torn = situation.unit == "group" and situation.groups_split
    if situation.plans and (situation.shared_units or torn):
        found.add(
            "Some units stand at several clients: such a unit pays the sum of those clients' costs"
            " at one common order, which is more than the stated epsilon."
        )
    if situation.plans and situation.unit == "record" and situation.group_name != "record":
        found.add(
            f"The guarantee is per image; a {situation.group_name} with several images is protected"
            " only through group privacy, which weakens quickly ("
            + "; ".join(_person_sentence(situation, f) for f in person_guarantees(situation))
            + (
                f"; at most {situation.group_cap} images of one {situation.group_name} are used"
                if situation.group_cap is not None
                else "; no cap on images was declared"
            )
            + f"). unit = 'group' protects the {situation.group_name}."
        )
    if situation.groups_split and situation.group_name != "record":
        found.add(f"Images of one {situation.group_name} stand at several clients.")
    return sorted(found)


def _line(client: str, plan: Plan) -> dict[str, Any]:
    return {
        "client": client,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "order": plan.order,
        "budget": plan.budget,
        "units": plan.units,
        "sample_rate": plan.sample_rate,
        "steps": plan.steps,
    }


def _central_statement(situation: Situation, plan: Plan) -> dict[str, Any]:
    """Of a run whose guarantee is the trusted server's: no client has one of its own."""
    return {
        "method": situation.method,
        "promise": _promise(situation),
        "unit": plan.unit,
        "neighbouring_relation": CENTRAL_RELATION,
        "epsilon_nominal": situation.epsilon_nominal,
        "preset": situation.preset,
        "clients": [],
        "server": _line("server", plan),
        "persons": [],
        "sampling": "none that is secret: who takes part is known, so nothing is amplified; sums"
        " divided by the fixed number of clients a round",
        "noise": situation.noise,
        "accounting": "Rényi filter of one fixed order (Feldman and Zrnic 2021), costs by"
        " dp-accounting's Gaussian, one a round",
        "server_sees": "every update as it is",
        "assumptions": list(CENTRAL_ASSUMPTIONS),
        "not_protected": list(CENTRAL_NOT_PROTECTED),
        "warnings": _warnings(situation),
    }


def make_statement(situation: Situation) -> dict[str, Any]:
    """The statement as plain values."""
    private = bool(situation.plans)
    if situation.server_plan is not None:
        return _central_statement(situation, situation.server_plan)
    return {
        "method": situation.method,
        "promise": _promise(situation),
        "unit": situation.unit if private else None,
        "neighbouring_relation": RELATION if private else None,
        "epsilon_nominal": situation.epsilon_nominal,
        "preset": situation.preset,
        "clients": [_line(client, plan) for client, plan in situation.plans.items()],
        "server": None,
        "persons": person_guarantees(situation),
        "sampling": "Poisson, by unit; never truncated; sums divided by the expected batch"
        if private
        else None,
        "noise": situation.noise if private else None,
        "accounting": "Rényi filter of one fixed order (Feldman and Zrnic 2021), costs by"
        " dp-accounting's Poisson-subsampled Gaussian"
        if private
        else None,
        "server_sees": SERVER_SEES if private else "every update as it is",
        "assumptions": list(ASSUMPTIONS) if private else [],
        "not_protected": list(NOT_PROTECTED) if private else ["anything"],
        "warnings": _warnings(situation),
    }


def _paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 92, initial_indent=indent, subsequent_indent=" " * len(indent))


def _listed(title: str, items: Sequence[str]) -> list[str]:
    return [title, *(_paragraph(item, "  - ") for item in items), ""] if items else []


def statement_text(statement: dict[str, Any]) -> str:
    """The same in words, for a person."""
    lines = [f"Privacy statement: {statement['method']}", "", _paragraph(statement["promise"]), ""]
    for client in statement["clients"]:
        lines.append(
            f"  client {client['client']}: epsilon {client['epsilon']:g}, delta"
            f" {client['delta']:g}, order {client['order']:g}, {client['units']} units, rate"
            f" {client['sample_rate']:.5f}, {client['steps']} steps"
        )
    server = statement["server"]
    if server is not None:
        lines.append(
            f"  server, per client: epsilon {server['epsilon']:g}, delta {server['delta']:g}, order"
            f" {server['order']:g}, {server['units']} clients a round, {server['steps']} rounds"
        )
    if statement["clients"] or server is not None:
        lines.append("")
        for key, title in (
            ("neighbouring_relation", "Neighbours: "),
            ("sampling", "Sampling: "),
            ("noise", "Noise: "),
            ("accounting", "Accounting: "),
        ):
            lines.append(_paragraph(f"{title}{statement[key]}."))
    if statement.get("preset"):
        lines.append(
            _paragraph(
                f"Settings: preset {statement['preset']} beneath the experiment's own keys; how it"
                " was chosen is told in docs/recipes.md."
            )
        )
    lines += [_paragraph(f"The server sees {statement['server_sees']}."), ""]
    lines += _listed("Assumed:", statement["assumptions"])
    lines += _listed("Not protected:", statement["not_protected"])
    lines += _listed("Beware:", statement["warnings"])
    return "\n".join(lines).rstrip() + "\n"
