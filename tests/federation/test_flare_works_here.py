"""Over real processes: counts before training, the final model at the sites, what the lead sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra nvflare is not installed")

from federation.flare_support import LONG, SITES, running
from xcal.dp.ledger.rows import read_rows, runs_of
from xcal.federation.exact_counts import counts_sent

pytestmark = LONG


def test_counts_then_a_run_then_evaluations(tmp_path: Path) -> None:
    with running(tmp_path / "three", seed=None) as federation:
        for site in SITES[:2]:
            directory = federation.site_dir(site)
            policy = directory / "policy.toml"
            text = policy.read_text()
            for what in ("statistics", "evaluation"):
                text = text.replace(f"{what}_epsilon = 0.0", f"{what}_epsilon = 1.0")
                text = text.replace(f"{what}_delta = 0.0", f"{what}_delta = 1e-4")
            policy.write_text(text)
            about = directory / "site.toml"
            about.write_text(about.read_text().replace('evaluate = "never"', 'evaluate = "last"'))
        policy = federation.site_dir(SITES[2]) / "policy.toml"
        policy.write_text(
            policy.read_text().replace("evaluation_floor = 0", "evaluation_floor = 5")
        )
        federation.wait_connected()
        words = ("--epsilon", "1", "--delta", "1e-4", "--timeout", "200", "--name", "before")
        out = tmp_path / "counts.json"
        done = federation.xcal("statistics", str(federation.experiment), *words, "--out", str(out))
        assert done.returncode == 0, done.stderr
        found = json.loads(out.read_text())
        assert set(found["sites"]) == set(SITES[:2])
        assert found["refused"] == {SITES[2]: "statistics-not-allowed"}
        done = federation.xcal(
            "submit", str(federation.experiment), "--name", "one", "--timeout", "300"
        )
        assert done.returncode == 0, done.stderr
        assert "FINISHED:COMPLETED" in federation.wait_end("one")
        told = json.loads((federation.fetch("one") / "evaluations.json").read_text())
        assert set(told["sites"]) == set(SITES[:2]) and told["sites"][SITES[0]]["epsilon"] == 1.0
        assert set(told["exact"]) == {SITES[2]} and told["exact"][SITES[2]]["floor"] == 5
        (sent,) = counts_sent(federation.site_dir(SITES[2]))
        counts = [count for row in told["exact"][SITES[2]]["counts"] for count in row]
        assert counts == list(sent.counts)
        for site in SITES[:2]:
            directory = federation.site_dir(site)
            (page,) = (directory / "evaluation").glob("one-*.html")
            assert set(runs_of(read_rows(directory / "ledger.sqlite"))) == {
                "before",
                page.stem,
                f"{page.stem}+evaluation",
            }
        shown = federation.xcal("dashboard", "--once")
        assert shown.returncode == 0 and "3/3" in shown.stdout and SITES[0] in shown.stdout
        assert "exact, no guarantee" in shown.stdout
