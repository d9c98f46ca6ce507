"""Does it work here? Counts, evaluations and heads of a site's own: what leaves, what it costs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from made_sites import tiny_site
from support import TINY
from wire import a_request, real
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation.answer import answer
from xcal.federation.certificate import facts_of
from xcal.federation.folder import RunFolder
from xcal.federation.held_out import held_out
from xcal.federation.local import run_experiment
from xcal.federation.local_evaluation import measure, read_sent
from xcal.federation.messages import (
    Disclosure,
    Refusal,
    Reply,
    StatisticsRequest,
    decode_answer,
    encode_request,
    encode_statistics,
)
from xcal.federation.setup import prepare_remote
from xcal.federation.site_directory import SiteDirectory
from xcal.federation.surveys import statistics_of, tell_final
from xcal.models.model_registry import build_network

Invoke = Callable[..., tuple[int, str, str]]

COUNTS = {"statistics_epsilon": 1.0, "statistics_delta": 1e-4}
SENT = {"evaluation_epsilon": 2.0, "evaluation_delta": 1e-4}
OWN = {"personal_epsilon": 4.0, "personal_delta": 1e-3}
ASKED = StatisticsRequest("0", "before", "record", 16, 3, 1.0, 1e-4)


def told(site_dir: Path, message: bytes) -> Any:
    return decode_answer(answer(site_dir, message), 1 << 24)


def counts(site_dir: Path, **changes: Any) -> Any:
    return told(site_dir, encode_statistics(replace(ASKED, **changes)))


def final(site_dir: Path, **changes: Any) -> Any:
    return told(site_dir, encode_request(a_request(round=3, final=True, **changes)))


def trained(site_dir: Path) -> Path:
    assert isinstance(told(site_dir, encode_request(a_request())), Reply)
    return site_dir


def set_keys(site_dir: Path, text: str) -> Path:
    path = site_dir / "site.toml"
    names = [line.split(" =")[0] for line in text.splitlines()]
    kept = [x for x in path.read_text().splitlines() if x.split(" =")[0] not in names]
    path.write_text("\n".join([*kept, text]) + "\n")
    return site_dir


def runs(site_dir: Path) -> dict[str, int]:
    rows = read_rows(site_dir / "ledger.sqlite")
    return {run: len(charges_of(rows, run)) for run in runs_of(rows)}


# --- counts by class ------------------------------------------------------------------------------


def test_counts_are_charged_once_and_noisy(tmp_path: Path) -> None:
    site_dir = real(tiny_site(tmp_path, **COUNTS))
    got = counts(site_dir)
    assert isinstance(got, Disclosure)
    assert runs(site_dir) == {"before": 1}
    assert verify(site_dir / "ledger.sqlite").ok
    (charge,) = charges_of(read_rows(site_dir / "ledger.sqlite"), "before")
    assert charge.rate == 1.0 and charge.releases[0].noise == pytest.approx(got.noise)
    site = SiteDirectory.open(site_dir)
    true = np.bincount(site.images(site.trial()).images.labels, minlength=3)
    off = np.array(got.tables["classes"]) - true
    assert got.noise is not None and 3 < got.noise < 6 and (np.abs(off) < 6 * got.noise).all()
    assert counts(site_dir) == got and runs(site_dir) == {"before": 1}
    assert counts(site_dir, delta=5e-5) == Refusal("0", "round-other-weights")
    assert counts(site_dir, run="again") != got and runs(site_dir)["again"] == 1


@pytest.mark.parametrize(
    ("policy", "asked", "code"),
    [
        ({}, {}, "statistics-not-allowed"),
        (COUNTS, {"epsilon": 1.1}, "statistics-not-allowed"),
        (COUNTS, {"unit": "group"}, "unit-not-allowed"),
        (COUNTS, {"classes": 4}, "data"),
        (COUNTS, {"client": "1"}, "wrong-client"),
        ({**COUNTS, "epsilon_total": 1.0, "epsilon_run": 1.0}, {"run": "b"}, "epsilon-total"),
    ],
)
def test_counts_that_are_not_allowed_cost_nothing(
    tmp_path: Path, policy: dict[str, Any], asked: dict[str, Any], code: str
) -> None:
    site_dir = tiny_site(tmp_path, **policy)
    if code == "epsilon-total":
        assert isinstance(counts(site_dir), Disclosure)
    before = runs(site_dir)
    assert counts(site_dir, **asked) == Refusal("0", code)
    assert runs(site_dir) == before


def test_a_lost_answer_is_not_drawn_again(tmp_path: Path) -> None:
    site_dir = tiny_site(tmp_path, **COUNTS)
    counts(site_dir)
    (site_dir / "runs" / "before" / "statistics.json").unlink()
    assert counts(site_dir) == Refusal("0", "ledger")
    assert runs(site_dir) == {"before": 1}


# --- evaluations ----------------------------------------------------------------------------------


def test_by_default_a_final_model_sets_nothing_off(tmp_path: Path) -> None:
    site_dir = trained(tiny_site(tmp_path))
    before = runs(site_dir)
    assert final(site_dir) == Disclosure("0", "trial", {})
    assert runs(site_dir) == before and not (site_dir / "evaluation").exists()


def test_a_run_that_was_not_trained_here_is_none(tmp_path: Path) -> None:
    site_dir = set_keys(tiny_site(tmp_path, **SENT), 'evaluate = "last"')
    assert final(site_dir) == Refusal("0", "round-not-own")
    assert runs(site_dir) == {}


def test_numbers_stay_at_the_site(tmp_path: Path) -> None:
    site_dir = set_keys(trained(tiny_site(tmp_path)), 'evaluate = "last"')
    before = runs(site_dir)
    assert final(site_dir) == Disclosure("0", "trial", {})
    assert runs(site_dir) == before
    (record,) = json.loads((site_dir / "evaluation" / "trial.json").read_text())["records"]
    assert 0 <= record["macro_f1"] <= 1 and 0 <= record["auroc"] <= 1
    assert record["calibration_error"] is not None and record["round"] == 3
    page = (site_dir / "evaluation" / "trial.html").read_text()
    assert "AUROC" in page and "data:image/png" in page and "http" not in page


def test_each_round_is_measured_where_the_owner_wants_it(tmp_path: Path) -> None:
    site_dir = set_keys(tiny_site(tmp_path), 'evaluate = "each"')
    first = told(site_dir, encode_request(a_request()))
    told(site_dir, encode_request(a_request(round=1, weights=first.answer.weights)))
    final(site_dir)
    kept = json.loads((site_dir / "evaluation" / "trial.json").read_text())["records"]
    assert [(r["model"], r["round"]) for r in kept] == [("global", 1), ("global", 3)]


def test_sending_them_is_charged_before(tmp_path: Path) -> None:
    site_dir = real(tiny_site(tmp_path, **SENT))
    got = final(trained(site_dir))
    assert isinstance(got, Disclosure) and (got.epsilon, got.delta) == (2.0, 1e-4)
    assert runs(site_dir)["trial+evaluation"] == 1
    (charge,) = charges_of(read_rows(site_dir / "ledger.sqlite"), "trial+evaluation")
    assert [r.name for r in charge.releases] == ["confusion", "calibration"]
    assert verify(site_dir / "ledger.sqlite").ok
    numbers = read_sent(got, 3)
    assert 0 <= numbers["macro_f1"] <= 1 and numbers["epsilon"] == 2.0
    assert final(site_dir) == got and runs(site_dir)["trial+evaluation"] == 1
    other = {k: v + 1 for k, v in a_request().weights.items()}
    assert final(site_dir, weights=other) == Refusal("0", "round-other-weights")
    logged = [json.loads(x) for x in (site_dir / "log.jsonl").read_text().splitlines()]
    assert [x["event"] for x in logged] == ["answered", "disclosed", "disclosed", "refused"]


# --- a head of its own ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_head_of_its_own_is_paid_for_and_stays(tmp_path: Path) -> None:
    site_dir = tiny_site(tmp_path, **OWN)
    set_keys(trained(site_dir), 'evaluate = "last"\npersonal = true\npersonal_epochs = 2')
    assert final(site_dir) == Disclosure("0", "trial", {})
    paid = runs(site_dir)
    assert paid["trial+personal"] > 0 and verify(site_dir / "ledger.sqlite").ok
    kept = json.loads((site_dir / "evaluation" / "trial.json").read_text())["records"]
    assert [r["model"] for r in kept] == ["global", "personal"]
    said = json.loads((site_dir / "evaluation" / "trial+personal-statement.json").read_text())
    certified = {
        run["run"]: run["recipients"] for run in facts_of(SiteDirectory.open(site_dir))["runs"]
    }
    assert certified["trial+personal"] == "this site alone" != certified["trial"]
    again = a_request(run="trial+personal", own_rounds=(0,))  # what a curious server would ask
    assert told(site_dir, encode_request(again)) == Refusal("0", "malformed")
    assert said["epsilon"] == 4.0 and 0 < said["epsilon_spent"] <= 4.0
    assert final(site_dir) == Disclosure("0", "trial", {}) and runs(site_dir) == paid


def test_a_head_without_a_budget_is_not_made(tmp_path: Path) -> None:
    site_dir = set_keys(trained(tiny_site(tmp_path)), "personal = true")
    assert final(site_dir) == Disclosure("0", "trial", {})
    assert set(runs(site_dir)) == {"trial"}
    assert "personal_epsilon" in (site_dir / "log.jsonl").read_text()


# --- a federation of them -------------------------------------------------------------------------


class Direct:
    """Carries to sites of this process; the last of them never answers a question beside rounds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        return {c: answer(self.folder / c, m) for c, m in messages.items() if c != "silent"}

    def late(self) -> list[str]:
        return []


@pytest.mark.slow
def test_a_lead_sees_what_sites_send_and_who_did_not(tmp_path: Path) -> None:
    terms: tuple[dict[str, Any], ...] = ({**COUNTS, **SENT}, {**COUNTS, **SENT}, {})
    for client, policy in enumerate(terms):
        tiny_site(tmp_path, client, **policy)
    experiment = make_experiment(
        {**TINY, "method": "xcal-steered", "rounds": 1, "round_timeout": 9.0}
    )
    carrier = Direct(tmp_path)
    found = statistics_of("before", experiment, ["0", "1", "2", "silent"], (1.0, 1e-4), carrier)
    assert set(found["sites"]) == {"0", "1"} and found["missing"] == ["silent"]
    assert found["refused"] == {"2": "statistics-not-allowed"}
    assert all(0 <= told["distance"] <= 1 for told in found["sites"].values())
    folder = RunFolder.create(tmp_path / "run", experiment, ())
    federation = prepare_remote(experiment, ["0", "1", "2"])
    run_experiment(folder, None, federation, carrier)
    told = tell_final(folder, federation, carrier)
    assert told["sites"]["2"] is None and told["sites"]["0"]["epsilon"] == 2.0
    assert json.loads((tmp_path / "run" / "evaluations.json").read_text()) == told


# --- held-out patients ----------------------------------------------------------------------------


def hospital(tmp_path: Path, invoke: Invoke, *, mixed: bool = False) -> Path:
    """A site with 40 pictures of 20 patients, a third of whom are held out."""
    source = tmp_path / "scans"
    source.mkdir()
    rng = np.random.default_rng(1)
    with open(source / "table.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "patient_id", "split", "sex"])
        for n in range(40):
            pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(source / f"{n}.png")
            patient = n // 2
            split = "test" if (n if mixed else patient) % 3 == 0 else "train"
            sex = "f" if patient % 2 else "m"
            writer.writerow([f"{n}.png", "ab"[n % 2], f"P{patient}", split, sex])
    done = invoke("data", "import", str(source), "--name", "scans", "--pixels", "16")
    assert done[0] == 0, done
    words = ("--client", "0", "--data", "scans", "--population", "ward", "--unit", "record")
    done = invoke(
        "site", "init", str(tmp_path / "site"), *words, "--epsilon", "5", "--delta", ".01"
    )
    assert done[0] == 0, done
    return tmp_path / "site"


def test_subgroups_below_the_floor_have_no_numbers(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "home"))
    table = f'subgroup_table = "{tmp_path / "scans" / "table.csv"}"\nsubgroups = ["sex"]'
    site_dir = set_keys(hospital(tmp_path, invoke), f"{table}\nsubgroup_floor = 4")
    site = SiteDirectory.open(site_dir)
    held = held_out(site, 16)
    assert (held.who, held.apart, len(held.images)) == ("patient", True, 14)
    experiment = make_experiment({**TINY, "data": "scans"})
    found = measure(site, build_network(experiment, 2), experiment).numbers["subgroups"]["sex"]
    assert [(one["value"], one.get("units"), one.get("fewer_than")) for one in found] == [
        ("f", None, 4),
        ("m", 4, None),
    ]


def test_patients_on_both_sides_are_refused(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "home"))
    site_dir = set_keys(hospital(tmp_path, invoke, mixed=True), 'evaluate = "last"')
    code, _, err = invoke("site", "check", str(site_dir))
    assert code == 1 and "also trained on" in err
    site = SiteDirectory.open(site_dir)
    with pytest.raises(UserError, match="also trained on"):
        held_out(site, 16)


@pytest.mark.slow
def test_a_fetched_run_is_measured_by_hand(tmp_path: Path, invoke: Invoke) -> None:
    site_dir = tiny_site(tmp_path)
    experiment = make_experiment({**TINY, "method": "fl-dp", "rounds": 1})
    folder = RunFolder.create(tmp_path / "run", experiment, ())
    run_experiment(folder)
    code, out, _ = invoke("site", "evaluate", str(site_dir), str(tmp_path / "run"))
    assert code == 0 and "AUROC" in out and runs(site_dir) == {}
    name = folder.about["run"]
    assert (site_dir / "evaluation" / f"{name}.html").exists()
    assert invoke("site", "evaluate", str(site_dir), str(tmp_path))[0] == 2


def test_a_backup_says_which_images_were_charged(tmp_path: Path, invoke: Invoke) -> None:
    site_dir = real(tiny_site(tmp_path, **COUNTS))
    assert invoke("ledger", "backup", str(site_dir), str(tmp_path / "empty"))[0] == 0
    assert not (tmp_path / "empty" / "partition.json").exists()  # nothing was charged yet
    counts(site_dir)
    code, out, _ = invoke("ledger", "backup", str(site_dir), str(tmp_path / "copy"))
    assert code == 0 and "partition.json" in out
    kept, copy = site_dir / "partition.json", tmp_path / "copy" / "partition.json"
    assert copy.read_bytes() == kept.read_bytes()


def test_several_findings_at_once_are_counted_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit with several findings would move a table by more than its sensitivity."""
    site_dir = tiny_site(tmp_path, **COUNTS)
    alone = SiteDirectory.images

    def several(site: SiteDirectory, experiment: Any) -> Any:
        own = alone(site, experiment)
        labels = np.eye(own.classes, dtype=np.int64)[own.images.labels]
        return replace(own, images=replace(own.images, labels=labels))

    monkeypatch.setattr(SiteDirectory, "images", several)
    said = counts(site_dir)
    assert isinstance(said, Refusal) and said.code == "data"
    assert "one class an image" in (site_dir / "refusals.jsonl").read_text()
    assert runs(site_dir) == {}
