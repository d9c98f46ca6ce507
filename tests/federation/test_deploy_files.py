"""What lies in deploy/: units that stay hardened, a small image, alerts on metrics there are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from support import ROOT
from xcal.federation.nvflare.exposition import METRICS

DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.stem)
def test_units_are_rated_ok_or_better(unit: Path) -> None:
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    rated = re.search(r"exposure level for \S+: ([0-9.]+) (\w+)", done.stdout)
    assert rated is not None, done.stderr
    assert float(rated[1]) <= 2.0 and rated[2] in ("OK", "SAFE")


def test_every_alert_is_about_a_metric_that_exists() -> None:
    rules = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yml").read_text())
    named = set()
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"] and rule["labels"]["severity"]
            named |= set(re.findall(r"xcal_\w+", rule["expr"]))
    assert named and named <= set(METRICS)


def test_the_image_is_not_root_and_has_no_test_tools() -> None:
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    steps = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert "USER 10001:10001" in steps and steps.index("USER 10001:10001") < len(steps) - 3
    assert set(re.findall(r"\[(\w[\w,]*)\]\"", text)) == {"nvflare,dicom"}
    assert "*.whl" in text and "COPY . " not in text
    service = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
    party = service["party"]
    assert party["read_only"] is True and party["cap_drop"] == ["ALL"]
    assert party["user"] == "10001:10001" and "/srv/xcal/party:/party" in party["volumes"]
