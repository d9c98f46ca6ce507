"""The signed page of a site, and budgets shown as ε with the share beside it."""

from __future__ import annotations

import html
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from made_sites import tiny_site
from wire import a_request, ask
from xcal.dp.accounting import epsilon_at
from xcal.dp.ledger.analysis import spending
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of
from xcal.federation.certificate import KEY, read_certificate
from xcal.federation.messages import Reply
from xcal.federation.nvflare.lead_runs import round_line
from xcal.federation.site_directory import SiteDirectory

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def site_dir(tmp_path: Path) -> Path:
    made = tiny_site(tmp_path)
    assert isinstance(ask(made, a_request()), Reply)
    return made


def page_of(invoke: Invoke, site_dir: Path, out: Path) -> Path:
    code, said, err = invoke("ledger", "certificate", str(site_dir), "--out", str(out))
    assert code == 0, err
    assert "public key" in said
    return out


def test_the_page_says_what_was_paid_and_verifies(
    site_dir: Path, tmp_path: Path, invoke: Invoke
) -> None:
    page = page_of(invoke, site_dir, tmp_path / "page.html")
    key = site_dir / KEY
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert b"PRIVATE" not in page.read_bytes()
    rows = read_rows(site_dir / "ledger.sqlite")
    found = read_certificate(page)
    (run,) = found.facts["runs"]
    (terms,) = runs_of(rows).values()
    spent = sum(c.cost for c in charges_of(rows, "trial"))
    assert terms.order is not None and terms.delta is not None
    assert (run["epsilon"], run["delta"], run["unit"]) == (8.0, terms.delta, "record")
    assert run["epsilon_spent"] == pytest.approx(epsilon_at(terms.order, spent, terms.delta))
    assert run["charges"] == len(charges_of(rows, "trial")) > 0
    assert "server" in run["recipients"]
    assert found.facts["head"] == {"rows": len(rows), "hash": rows[-1].hash}
    text = page.read_text()
    for word in (found.facts["population"], rows[-1].hash, found.key, run["recipients"]):
        assert html.escape(word) in text
    code, said, err = invoke("ledger", "verify", str(page), "--ledger", str(site_dir))
    assert code == 0, err
    assert found.key in said
    assert invoke("ledger", "verify", str(page))[0] == 0
    # later runs do not make it wrong, and the next page has the same key
    assert isinstance(ask(site_dir, a_request(run="second")), Reply)
    assert invoke("ledger", "verify", str(page), "--ledger", str(site_dir))[0] == 0
    again = page_of(invoke, site_dir, tmp_path / "again.html")
    assert read_certificate(again).key == found.key
    assert len(read_certificate(again).facts["runs"]) == 2


def test_a_run_whose_noise_is_shared_is_told_apart(
    site_dir: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """Its (ε, δ) is another promise than one by the site's own noise: guarantee.md §10."""
    with Ledger(site_dir / "ledger.sqlite") as ledger:
        (terms,) = ledger.runs.values()
        ledger.reserve(replace(terms, run="shared", honest=2))
    page = page_of(invoke, site_dir, tmp_path / "page.html")
    own, shared = read_certificate(page).facts["runs"]
    assert "honest" not in own and shared["honest"] == 2
    assert page.read_text().count("holds while 2 of its sites are honest") == 1
    assert invoke("ledger", "verify", str(page), "--ledger", str(site_dir))[0] == 0
    assert "masked, 2 honest" in " ".join(invoke("ledger", "show", str(site_dir))[1].split())


def test_a_changed_page_is_found(site_dir: Path, tmp_path: Path, invoke: Invoke) -> None:
    page = page_of(invoke, site_dir, tmp_path / "page.html")
    whole = page.read_bytes()
    for changed_page in (
        whole.replace(b"(8, ", b"(1, ", 1),  # what people read
        whole.replace(b'"epsilon": 8.0', b'"epsilon": 1.0', 1),  # what programs read
        whole + b"<p>approved</p>",
        whole.replace(b"\n<!-- xcal-signature", b"\n<p>more</p>\n<!-- xcal-signature"),
        whole.rsplit(b"\n<!--", 1)[0],
        b"",
    ):
        assert changed_page != whole
        page.write_bytes(changed_page)
        code, _, err = invoke("ledger", "verify", str(page), "--ledger", str(site_dir))
        assert code == 1, err
        assert "Traceback" not in err


def test_another_or_an_older_ledger_and_another_key_are_found(
    site_dir: Path, tmp_path: Path, invoke: Invoke
) -> None:
    older = tmp_path / "older"
    shutil.copytree(site_dir, older)
    assert isinstance(ask(site_dir, a_request(run="second")), Reply)
    page = page_of(invoke, site_dir, tmp_path / "page.html")
    assert invoke("ledger", "verify", str(page), "--ledger", str(older))[0] == 1
    other = tiny_site(tmp_path / "other")
    assert invoke("ledger", "verify", str(page), "--ledger", str(other))[0] == 1
    (site_dir / KEY).unlink()
    page_of(invoke, site_dir, tmp_path / "new.html")  # makes another key
    assert invoke("ledger", "verify", str(page), "--ledger", str(site_dir))[0] == 1


def test_bad_uses_are_sentences(site_dir: Path, tmp_path: Path, invoke: Invoke) -> None:
    def code(*words: object) -> int:
        found, _, err = invoke("ledger", *map(str, words))
        assert "Traceback" not in err
        return found

    assert code("certificate", site_dir, "--out", tmp_path / "page.pdf") == 2
    assert code("certificate", site_dir, "--out", tmp_path / "no" / "page.html") == 2
    assert code("certificate", tmp_path / "nowhere", "--out", tmp_path / "page.html") == 2
    assert code("verify", tmp_path / "none.html") == 1
    assert code("verify", site_dir, "--ledger", site_dir) == 2
    (site_dir / KEY).write_text("no key")
    (site_dir / KEY).chmod(0o600)
    assert code("certificate", site_dir, "--out", tmp_path / "page.html") == 2
    assert not (tmp_path / "page.html").exists()
    (site_dir / KEY).unlink()
    assert code("certificate", site_dir, "--out", tmp_path / "page.html") == 0
    (site_dir / KEY).chmod(0o644)
    assert code("certificate", site_dir, "--out", tmp_path / "page.html") == 2


def test_names_cannot_write_into_the_page(tmp_path: Path, invoke: Invoke) -> None:
    site_dir = tiny_site(tmp_path)
    about = site_dir / "site.toml"
    evil = "</script><script>alert(1)</script>"
    about.write_text(about.read_text().replace('client = "0"', f'client = "{evil}"'))
    code, _, err = invoke("ledger", "certificate", str(site_dir), "--out", str(tmp_path / "p.html"))
    if code == 0:
        assert "<script>alert" not in (tmp_path / "p.html").read_text()
        assert read_certificate(tmp_path / "p.html").facts["site"] == evil
    else:  # a site of that name is refused
        assert code == 2, err


def test_budgets_are_told_as_epsilon_with_the_share_beside_it(
    site_dir: Path, invoke: Invoke
) -> None:
    (one,) = spending(read_rows(site_dir / "ledger.sqlite"))
    told = f"ε = {one['epsilon_spent']:.3g} ({100 * one['share']:.1f} % of Σρ)"
    for words in (("ledger", "verify"), ("site", "show"), ("site", "check")):
        code, out, err = invoke(*words, str(site_dir))
        assert code == 0, err
        assert told in " ".join(out.split()), words
    code, out, _ = invoke("ledger", "show", str(site_dir))
    assert code == 0
    assert "spent" in out
    record = {
        "round": 0,
        "answered": 1,
        "clients": [{"client": "a", "epsilon_spent": 1.41, "share_spent": 0.17}],
    }
    assert "a spent ε = 1.41 (17.0 % of Σρ)" in round_line(record, 3)


def test_reserved_above_the_total_is_flagged(site_dir: Path, invoke: Invoke) -> None:
    policy = site_dir / "policy.toml"
    total = SiteDirectory.open(site_dir).policy.epsilon_total
    code, out, _ = invoke("site", "check", str(site_dir))
    assert "above the epsilon_total" not in out
    lines = [
        f"{line.split()[0]} = 3.0" if line.startswith(("epsilon_total", "epsilon_run")) else line
        for line in policy.read_text().splitlines()
    ]
    policy.write_text("\n".join(lines) + "\n")
    assert total > 3
    code, out, err = invoke("site", "check", str(site_dir))
    assert "reserved ε = 8, above the epsilon_total = 3" in " ".join((out + err).split()), code
