"""One signed page for a site's data-protection officer: what its population has paid, and to whom.

The page is HTML that needs nothing else. Its last line is an Ed25519 signature, by a key that the
site alone holds, of every byte before it; so whoever has the page can see that nobody changed it,
and whoever has the ledger too, that the ledger still contains what the page was made from.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from xcal.dp.ledger.analysis import lifetime, lifetime_text, spending
from xcal.dp.ledger.rows import Head, Row, check_head, read_rows, terms_of, verify
from xcal.errors import UserError
from xcal.federation.clinicians_page import page_html, safe, table_html
from xcal.federation.disclosure import is_own
from xcal.federation.exact_counts import sent_by, sent_text
from xcal.federation.files import read_json
from xcal.federation.site_directory import SiteDirectory
from xcal.federation.site_identity import KEY as KEY
from xcal.federation.site_identity import public_key, site_key

MAX_BYTES = 16 << 20
_SIGNED = re.compile(
    rb"\n<!-- xcal-signature key ([A-Za-z0-9+/=]{44}) signature ([A-Za-z0-9+/=]{88}) -->\n\Z"
)
_FACTS = re.compile(
    rb'<script type="application/json" id="xcal-certificate">(.*?)</script>', re.DOTALL
)


def facts_of(site: SiteDirectory) -> dict[str, Any]:
    """What the page says, from the ledger, the policy and who it answers to."""
    checked = verify(site.ledger_path)
    if not checked.ok:
        raise UserError(
            f"{site.ledger_path}: row {checked.row} {checked.problem}. Nothing is certified."
        )
    rows = read_rows(site.ledger_path)
    terms, life = terms_of(rows), lifetime(rows)
    recipients = _recipients(site.path)
    return {
        "site": site.about.client,
        "population": terms.population,
        "unit": terms.unit,
        "simulated": terms.simulated,
        "limit": {"epsilon": terms.epsilon, "delta": terms.delta, "rule": terms.rule},
        "policy": {"epsilon": site.policy.epsilon_total, "delta": site.policy.delta_total},
        "state": lifetime_text(rows),
        "left": _left(life),
        "runs": [
            {**run, "recipients": "this site alone" if is_own(run["run"]) else recipients}
            for run in spending(rows)
        ],
        "exact": _exact(rows),
        "held_out": _held_out(site, rows),
        "head": {"rows": len(rows), "hash": rows[-1].hash},
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _exact(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The runs whose counts of held-out people left without noise."""
    return [{k: getattr(one, k) for k in ("run", "floor", "time")} for one in sent_by(rows)]


def _held_out(site: SiteDirectory, rows: Sequence[Row]) -> str:
    """What left of those who are not trained on, and what may."""
    policy = site.policy
    told = sent_text(sent_by(rows)) or "nothing was sent of them but what the ledger charged for"
    if not policy.evaluation_floor:
        return told
    most = policy.evaluation_tables
    return (
        f"{told}. The policy sends such counts of {most} run{'s' * (most > 1)} in all, each below"
        f" {policy.evaluation_floor} withheld"
    )


def _left(life: dict[str, Any]) -> str:
    """What further runs may reserve, by the ledger's own rule."""
    if "budget" in life:
        left = max(0.0, life["epsilon"] - life["epsilon_spent"])
        share = life["left"] / life["budget"]
        return f"ε = {left:.4g} by the odometer ({share:.1%} of Σρ at order {life['order']:g})"
    if "epsilon_left" in life:
        return f"ε = {life['epsilon_left']:.6g} and δ = {life['delta_left']:.6g}"
    return "the ledger sets no limit"


def _recipients(site_dir: Path) -> str:
    """Who gets a run's releases: the server that the site joined, and whoever gets its model."""
    party = site_dir.resolve().parent / "party.json"
    if not party.exists():
        return "the server that asked, and whoever is given the model"
    about = read_json(party)
    return (
        f"the federation {about['federation']!r}: its server {about['server']}:{about['port']}, its"
        " sites, and whoever is given the model"
    )


def certificate(site_dir: Path) -> bytes:
    """The signed page of a site."""
    facts = facts_of(SiteDirectory.open(site_dir))
    key = site_key(site_dir)
    public = key.public_key().public_bytes_raw()
    page = _page(facts, public.hex()).encode()
    signature = key.sign(page)
    told = (base64.b64encode(public).decode(), base64.b64encode(signature).decode())
    return page + f"\n<!-- xcal-signature key {told[0]} signature {told[1]} -->\n".encode()


@dataclass(frozen=True)
class Checked:
    """A page whose signature is right."""

    facts: dict[str, Any]
    key: str  # the public key, as the page shows it


def read_certificate(path: Path) -> Checked:
    """A page, if nobody changed it since it was signed. Raises `UserError`."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
    except OSError:
        raise UserError(f"There is no page {path}: check the path.") from None
    found = _SIGNED.search(data)
    if found is None:
        raise UserError(f"{path} is no signed page: its last line is no signature.")
    page, public = data[: found.start()], base64.b64decode(found[1])
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(base64.b64decode(found[2]), page)
        (told,) = _FACTS.findall(page)
        facts = json.loads(told)
        Head(facts["head"]["rows"], facts["head"]["hash"])
    except InvalidSignature:
        raise UserError(f"{path} was changed after it was signed.") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is signed and no page of a ledger.") from None
    return Checked(facts, public.hex())


def check_against(page: Checked, ledger: Path) -> None:
    """Whether the ledger still contains what the page was made from. Raises `UserError`."""
    rows, facts = read_rows(ledger), page.facts
    checked = verify(ledger)
    if not checked.ok:
        raise UserError(f"{ledger}: row {checked.row} {checked.problem}")
    head = Head(facts["head"]["rows"], facts["head"]["hash"])
    if terms_of(rows).population != facts["population"] or not check_head(rows, head).ok:
        raise UserError(
            f"{ledger} does not contain the page's head, row {head.count} ({head.hash[:12]}): it is"
            " another ledger, or an older or shortened one."
        )
    own = ledger.parent / KEY
    if own.exists() and public_key(ledger.parent).hex() != page.key:
        raise UserError(f"The page is signed with the key {page.key}, which is not {own}.")
    told = [{k: v for k, v in run.items() if k != "recipients"} for run in facts["runs"]]
    found = spending(rows[: head.count])
    if not any("honest" in run for run in told):  # a page of before it was told
        found = [{k: v for k, v in run.items() if k != "honest"} for run in found]
    if json.loads(json.dumps(found)) != told:
        raise UserError(f"The page tells other runs than the first {head.count} rows of {ledger}.")
    if _exact(rows[: head.count]) != facts.get("exact", []):
        raise UserError(f"The page tells of other exact counts than {ledger}.")


# --- the page -------------------------------------------------------------------------------------

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;"
    "color:#111;background:#fff}table{border-collapse:collapse;width:100%;font-size:.9rem}"
    "th,td{border:1px solid #999;padding:.3rem .5rem;text-align:left;vertical-align:top}"
    "code{overflow-wrap:anywhere;font-size:.85rem}"
)


def _number(value: float | None, nothing: str = "∞") -> str:
    return nothing if value is None else f"{value:.4g}"


_BUT = " It says nothing of held-out people, of whom the exact counts named above were sent."


def _shared(run: dict[str, Any]) -> str:
    """What the promise of a run rests on that shares its noise with other sites."""
    if "honest" not in run:
        return ""
    return f" (noise shared under masks: holds while {run['honest']} of its sites are honest)"


def _page(facts: dict[str, Any], key: str) -> str:
    limit = facts["limit"]
    told = "no limit"
    if limit["epsilon"] is not None:
        told = (
            f"({limit['epsilon']:g}, {limit['delta']:g}) over all runs, by the rule {limit['rule']}"
        )
    heads = "run|method|protected unit|(ε, δ) reserved|ε spent (odometer)|share of its budget|steps"
    runs = table_html(
        [*heads.split("|"), "recipients"],
        (
            [
                run["run"],
                run["method"] + _shared(run),
                run["unit"],
                f"({_number(run['epsilon'])}, {_number(run['delta'], '–')})",
                _number(run["epsilon_spent"]),
                "–" if run["share"] is None else f"{100 * run['share']:.1f} %",
                run["charges"],
                run["recipients"],
            ]
            for run in facts["runs"]
        ),
    )
    items = {
        "Site": facts["site"],
        "Population": facts["population"],
        "Protected": f"one {facts['unit']}"
        + (" (a simulation: nobody is protected)" if facts["simulated"] else ""),
        "Limit of the ledger": told,
        "Limit of the policy": f"({facts['policy']['epsilon']:g}, {facts['policy']['delta']:g})",
        "State": facts["state"],
        "Left": facts["left"],
        "Held-out people": facts["held_out"],
        "Made": facts["made"],
    }
    listed = "".join(f"<dt><b>{safe(k)}</b></dt><dd>{safe(v)}</dd>" for k, v in items.items())
    plain = json.dumps(facts).replace("<", "\\u003c")  # nothing in it ends the script
    title = f"Privacy budget of {facts['population']}"
    body = (
        f"<h1>{safe(title)}</h1>\n<dl>{listed}</dl>\n"
        f"<h2>Runs</h2>\n{runs}\n"
        "<p>The guarantee of a run is the (ε, δ) that it reserved, however little was spent; ∞ is"
        " no guarantee. It bounds what anybody who sees all that left the site can tell about one"
        " protected unit, under the assumptions of docs/guarantee.md."
        f"{_BUT if facts['exact'] else ''}</p>\n"
        f"<h2>Proof</h2>\n<p>The ledger's head: row {facts['head']['rows']}, <code>"
        f"{safe(facts['head']['hash'])}</code>. Signed with the site's Ed25519 key"
        f" <code>{key}</code>, to be compared with the site. To check: <code>xcal ledger verify"
        " PAGE.html --ledger SITE</code>.</p>\n"
        f'<script type="application/json" id="xcal-certificate">{plain}</script>'
    )
    return page_html(title, _STYLE, [body])
