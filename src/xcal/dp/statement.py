"""What a run promises, to whom and under which assumptions; in words and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xcal.dp.calibration import Plan
from xcal.dp.group_privacy import group_epsilon
from xcal.dp.opening import in_terms_of_tests, what_can_be_learnt, worth

RELATION = (
    "zero-out: two data sets of a client are neighbors when one unit's data are replaced by a null"
    " unit that contributes zero to everything; the number of units is the same on both sides and"
    " public"
)
COUNTED = (
    "it is counted from the data, or the images were dealt out at random, so that adding or"
    " removing a unit, which would change either, is not covered"
)
DECLARED = (
    "it is declared and filled up with null units, so that adding or removing one unit is covered"
    " too, as long as there are no more than declared"
)
SERVER_SEES = (
    "after every round a client's weights, which are made of noisy releases only; its number of"
    " units, declared or counted; its noise multipliers, clipping norms, released signals, odometer"
    " and ledger head, all of them functions of releases and public constants; and that it took"
    " part"
)
NOT_PROTECTED = (
    "timing (durations follow the drawn batch's size)",
    "the number of units and who takes part",
    "what the machine's operator, its memory or its files give away",
    "people whom a site holds out to measure the model: where its owner says so, exact counts of"
    " them are sent (ε = ∞ for them)",
    "the choice of hyper-parameters: the defaults were tuned on the evaluation sets",
)
ASSUMPTIONS = (
    "each step draws every unit independently with the stated rate, and the draw stays secret",
    "one unit is one image or one group as declared, and stands once at one client",
    "clients follow the protocol; the server may send any weights it likes",
    "floating point behaves as the reals up to the stated margins: clipping to C/(1 + 10⁻³) in"
    " single precision, releases rounded to a public grid",
)
# In place of the last of them where noise is discrete.
EXACT = (
    "clipped sums, up to where they are rounded to whole numbers, are those of the reals up to the"
    " stated margin: clipping to C/(1 + 10⁻³) in single precision; from there on all is exact, and"
    " what rounding adds is charged"
)


# Who vouches for what where code of the user's own takes part, by the experiment's key.
PLUGINS = {
    "method": "its guarantee rests on its author's word that each step charges for all it releases;"
    " this software enforces that no step without a charge reaches the model",
    "network": "that it treats every image by itself is checked on made-up images only, and else"
    " its author's word",
    "loss": "that it judges every image by itself is checked on made-up logits only, and else its"
    " author's word",
    "data": "who is one unit, and that nothing about an image was computed from others, is its"
    " author's word",
}


@dataclass(frozen=True)
class Measured:
    """The images that a run is measured on, which no guarantee covers."""

    data: str
    validation: int
    test: int
    agreed_by: str | None = None  # who said that they are public
    lead: bool = False  # the data set of whoever leads a run with clients elsewhere


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
    add_remove: frozenset[str] = frozenset()  # clients where a unit may also come or go
    plugins: Mapping[str, str] = field(default_factory=dict)  # by the experiment's key
    measured: Measured | None = None
    shared_groups: bool = False  # whether a group stands in training and in validation or test
    groups_declared: bool = False  # by hand: no two images show one person
    sites: int = 0  # that share their noise under masks, and
    honest: int | None = None  # how many of them that counts on; None: every site's is its own
    discrete: bool = False  # whether noise is in whole numbers, on sums rounded before it


MASKED_SEES = (
    "in every attempt at a round one masked vector of each site, uniformly random to whoever does"
    " not have its keys; the sum of all of them, which is the noisy sum of clipped gradients and,"
    " where C adapts, of how many were within C; each site's number of units, noise"
    " multiplier, odometer and ledger head; and who takes part"
)


def _masked_assumptions(situation: Situation) -> list[str]:
    others = situation.sites - (situation.honest or 0)
    return [
        f"of the {situation.sites} sites at least {situation.honest} add their share of the noise"
        " and keep it and their masks secret: a server that colludes with at most"
        f" {others} of them is covered, with more it sees less noise than charged",
        "the masks are computational: X25519, HKDF-SHA256, AES-256 and Ed25519 are as strong as"
        " believed, and each site knows the others by their right keys",
        "a site missing in an attempt is counted as an honest one, and the others' shares grow",
        "nobody stands at two of the sites: in one sum that costs more than twice, and no site's"
        " ledger knows",
    ]


CENTRAL_RELATION = (
    "zero-out of a whole client: two federations are neighbors when all that one client sends is"
    " replaced by zero; who takes part in which round is the same on both sides and public"
)
CENTRAL_NOT_PROTECTED = (
    "anything against the server, which is trusted and sees every update as it is",
    "who takes part and when, how long each takes, and how many units each declares",
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
    only = f", the only one that is used of a {_person(situation)}" if _cap(situation) == 1 else ""
    unit = (
        f"one image (record){only}"
        if plan.unit == "record"
        else f"all images of one {situation.group_name} (group)"
    )
    whom = "the server, other clients and anyone who receives the model"
    rests = ""
    if situation.honest is not None:
        others = situation.sites - situation.honest
        whom = f"the server, up to {others} of the other clients together with it, and anyone else"
        rests = (
            f" Clients share their noise under masks: this rests on {situation.honest} honest ones"
            f" of {situation.sites} and on computational assumptions, and one client's own noise"
            " alone would not give it."
        )
    return (
        f"Each client's whole training, over all its rounds, is ({plan.epsilon:g},"
        f" {plan.delta:g})-differentially private for {unit}, against {whom},"
        f" whatever was spent of it.{rests} " + in_terms_of_tests(plan.epsilon, plan.delta)
    )


def _person(situation: Situation) -> str:
    return "person" if situation.group_name == "record" else situation.group_name


def _who_is_protected(situation: Situation) -> str:
    """The first sentence. Per image: what that means for a person comes first."""
    person = _person(situation)
    if situation.unit == "group":
        declared = "; that no two images show one person was declared by the data's owner"
        return (
            f"Protected is every {person}: all images of one {person} together, at the site that"
            f" holds them{declared if situation.groups_declared else ''}."
        )
    cap = _cap(situation)
    if cap == 1:
        return f"Protected is every {person}, of whom at most 1 image is used."
    told: list[str] = []
    for case in person_guarantees(situation):
        images, promised = case["images"], case["epsilon"]
        if promised is None:  # nor with more
            no = "not at all" if told else "is not protected at all"
            told.append(f"with {images} images {no}")
            break
        little = worth(promised)
        told.append(
            f"with {images} images {'' if told else 'is protected only '}at epsilon {promised:.3g}"
            + (f" (which promises {little})" if little else "")
        )
    limit = "" if cap is None else f", and at most {cap} images of one {person} are used"
    unknown = (
        f"; which images belong to one {person} is not known here"
        if situation.group_name == "record"
        else ""
    )
    article = "An" if person[0] in "aeiou" else "A"
    return (
        f"{article} {person} {', one '.join(told)}{limit}: protected is each single image, not the"
        f" {person}{unknown}."
    )


def _opening(situation: Situation) -> list[str]:
    """Three sentences for a reader who knows no differential privacy."""
    server = situation.server_plan
    if server is None and not situation.plans:
        return [
            "Nobody is protected.",
            "Whoever sees what a site sends, or gets the model, may learn anything about the images"
            " that it was trained on.",
            "There is no bound on what can be learnt about one person: epsilon is infinite.",
        ]
    seeded = (
        "; but in this simulation noise comes from a seed, and against whoever knows or guesses it"
        " nothing is protected"
        if situation.noise == "seeded"
        else ""
    )
    if server is not None:
        return [
            "Protected is each site as a whole, with all that it contributes; no single person or"
            " image is promised anything of its own.",
            "It is protected against the other sites and anyone who gets a model, but not against"
            f" the server, which sees every update as it is{seeded}.",
            what_can_be_learnt(
                "one site, whose taking part is known, contributed its data",
                "the models",
                server.epsilon,
                server.delta,
            ),
        ]
    plan = next(iter(situation.plans.values()))
    what = (
        f"the images of one {_person(situation)} were used"
        if situation.unit == "group"
        else "one single image was used"
    )
    if not set(situation.plans) <= situation.add_remove:
        what += " (their number, which is told, is not hidden)"
    return [
        _who_is_protected(situation),
        (
            "This holds against everyone who sees what a site sends, whatever else they know: the"
            f" server, the other sites, anyone who gets the model{seeded}."
            if situation.honest is None
            else f"This holds as long as {situation.honest} of the {situation.sites} sites are"
            " honest, since they share their noise: against the server, the other sites and anyone"
            f" who gets the model{seeded}."
        ),
        what_can_be_learnt(what, "all that a site sends", plan.epsilon, plan.delta),
    ]


def _relation(situation: Situation) -> str:
    """Which data sets are neighbors, at which client."""
    declared = [c for c in situation.plans if c in situation.add_remove]
    counted = [c for c in situation.plans if c not in situation.add_remove]
    if not declared or not counted:
        return f"{RELATION}; {DECLARED if declared else COUNTED}"
    return f"{RELATION}; at {_named(declared)} {DECLARED}; at {_named(counted)} {COUNTED}"


def _named(clients: Sequence[str]) -> str:
    return f"client{'' if len(clients) == 1 else 's'} {', '.join(clients)}"


def _accounting(
    plans: Mapping[str, Plan], cost: str = "Poisson-subsampled Gaussian", step: str = "step"
) -> str:
    """How it is added up, by what each plan says; clients of one run may differ."""
    named: dict[str, list[str]] = {}
    for client, plan in plans.items():
        named.setdefault(plan.accountant, []).append(client)
    told = {
        "renyi": "Rényi filter of one fixed order (Feldman and Zrnic 2021), costs by"
        f" dp-accounting's {cost}",
    }
    if "pld" in named:
        steps = sorted({plans[client].steps for client in named["pld"]})
        most = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        told["pld"] = (
            "privacy-loss distributions (dp-accounting, pessimistic) for a plan fixed beforehand,"
            f" {most} {step}s at most"
        )
    if len(named) == 1:
        return told[next(iter(named))]
    return "; ".join(f"at {_named(clients)} {told[how]}" for how, clients in named.items())


def _public_images(situation: Situation) -> str:
    """Which images no guarantee covers, and who said that they are public."""
    found = situation.measured
    if found is None:
        return "validation and test images, which are treated as public"
    if not found.validation and not found.test:
        return "no validation or test images are used"
    counts = [(found.validation, "validation"), (found.test, "test")]
    used = " and ".join(f"{count} {split}" for count, split in counts if count)
    whose = "the lead's own data set " if found.lead else "the data set "
    agreed = f", as {found.agreed_by} agreed" if found.agreed_by else ""
    return f"the {used} images of {whose}{found.data}, which are treated as public{agreed}"


def _not_protected(situation: Situation, others: Sequence[str]) -> list[str]:
    found = situation.measured
    used = found is None or found.validation or found.test
    return [*others, *([_public_images(situation)] if used else [])]


def _plugins(situation: Situation) -> list[str]:
    promised = bool(situation.plans or situation.server_plan)
    return [
        f"the {'data set' if key == 'data' else key} {name} is a plug-in and not part of this"
        f" software{f': {PLUGINS[key]}' if promised else ''}"
        for key, name in situation.plugins.items()
    ]


def _cap(situation: Situation) -> int | None:
    """The enforced cap on a person's images: none where it is not known whose they are."""
    return None if situation.group_name == "record" else situation.group_cap


def person_guarantees(situation: Situation) -> list[dict[str, Any]]:
    """What a record-level run is worth to a person with several images, at the worst client.

    For the declared cap, or for a few examples where none is declared: the largest group that is
    really there is private and is not looked at.
    """
    if situation.unit != "record" or not situation.plans:
        return []
    cap = _cap(situation)
    found = []
    for images in (cap,) if cap is not None else (2, 4, 12):
        values = [group_epsilon(plan, images) for plan in situation.plans.values()]
        worst = None if None in values else max(v for v in values if v is not None)
        found.append({"images": images, "epsilon": worst})
    return found


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
            if situation.honest is None
            else "Some units stand at several clients: such a unit moves the one sum that they make"
            " by all that it moves each of them, under noise that counts once. At k of them it"
            " costs up to what k times the rate and a multiplier k times lower would, which is more"
            " than the sum of those clients' costs and more than the stated epsilon."
        )
    several = situation.group_name != "record" and _cap(situation) != 1
    if situation.plans and situation.unit == "record" and several:
        found.add(
            f"The guarantee is per image: unit = 'group' protects the {situation.group_name}."
        )
    if (situation.plans or situation.server_plan) and situation.shared_groups:
        found.add(
            f"Some {situation.group_name}s have images in training and in validation or test: the"
            " guarantee holds for the former only, and the latter may tell of the same"
            f" {situation.group_name}."
        )
    if situation.groups_split and situation.group_name != "record":
        found.add(f"Images of one {situation.group_name} stand at several clients.")
    return sorted(found)


def _line(client: str, plan: Plan, add_remove: bool = False) -> dict[str, Any]:
    return {
        "client": client,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "order": plan.order,
        "budget": plan.budget,
        "units": plan.units,
        "add_remove": add_remove,
        "sample_rate": plan.sample_rate,
        "steps": plan.steps,
    }


def make_statement(situation: Situation) -> dict[str, Any]:
    """The statement as plain values."""
    found = _client_statement(situation, bool(situation.plans))
    if situation.server_plan is not None:
        return {**found, **_central_terms(situation, situation.server_plan)}
    if situation.plans and situation.discrete:
        found |= {
            "noise": f"{situation.noise}, discrete Gaussian in whole numbers",
            "accounting": f"{found['accounting']}, at a whole order, where the discrete Gaussian's"
            " is the same",
            "assumptions": [EXACT if a == ASSUMPTIONS[-1] else a for a in found["assumptions"]],
        }
    if situation.honest is None:
        return found
    return {
        **found,
        "trust": "masked",
        "sites": situation.sites,
        "honest": situation.honest,
        "sampling": f"{found['sampling']}; one step a round",
        "noise": f"{found['noise']}, shared by sites under masks",
        "server_sees": MASKED_SEES,
        "assumptions": [*found["assumptions"], *_masked_assumptions(situation)],
    }


def _central_terms(situation: Situation, plan: Plan) -> dict[str, Any]:
    """Of a run whose guarantee is the trusted server's: no client has one of its own."""
    return {
        "unit": plan.unit,
        "neighboring_relation": CENTRAL_RELATION,
        "server": _line("server", plan),
        "sampling": "none that is secret: who takes part is known, so nothing is amplified; sums"
        " divided by the fixed number of clients a round",
        "noise": situation.noise,
        "accounting": _accounting({"server": plan}, "Gaussian, one a round", "round"),
        "assumptions": [*CENTRAL_ASSUMPTIONS, *_plugins(situation)],
        "not_protected": _not_protected(situation, CENTRAL_NOT_PROTECTED),
    }


def _client_statement(situation: Situation, private: bool) -> dict[str, Any]:
    return {
        "method": situation.method,
        "opening": _opening(situation),
        "promise": _promise(situation),
        "unit": situation.unit if private else None,
        "neighboring_relation": _relation(situation) if private else None,
        "epsilon_nominal": situation.epsilon_nominal,
        "preset": situation.preset,
        "clients": [_line(c, p, c in situation.add_remove) for c, p in situation.plans.items()],
        "server": None,
        "persons": person_guarantees(situation),
        "sampling": "Poisson, by unit; never truncated; sums divided by the expected batch"
        if private
        else None,
        "noise": situation.noise if private else None,
        "accounting": _accounting(situation.plans) if private else None,
        "server_sees": SERVER_SEES if private else "every update as it is",
        "assumptions": [*ASSUMPTIONS, *_plugins(situation)] if private else [],
        "not_protected": _not_protected(situation, NOT_PROTECTED) if private else ["anything"],
        "public_images": _public_images(situation),
        "plugins": _plugins(situation),
        "warnings": _warnings(situation),
    }


def _paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 92, initial_indent=indent, subsequent_indent=" " * len(indent))


def _listed(title: str, items: Sequence[str]) -> list[str]:
    return [title, *(_paragraph(item, "  - ") for item in items), ""] if items else []


def statement_text(statement: dict[str, Any]) -> str:
    """The same in words, for a person."""
    lines = [f"Privacy statement: {statement['method']}", ""]
    lines += [*(_paragraph(sentence) for sentence in statement["opening"]), ""]
    lines += [_paragraph(statement["promise"]), ""]
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
            ("neighboring_relation", "Neighbors: "),
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
    if statement["public_images"] not in statement["not_protected"]:
        lines += [_paragraph(f"Measured on: {statement['public_images']}."), ""]
    # Where something is promised they stand among what is assumed.
    others = [text for text in statement["plugins"] if text not in statement["assumptions"]]
    lines += _listed("Plug-ins:", others)
    lines += _listed("Beware:", statement["warnings"])
    return "\n".join(lines).rstrip() + "\n"
