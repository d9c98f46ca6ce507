"""Who a patient is: what the importer finds, which unit a run may promise, what is measured."""

from __future__ import annotations

import io
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import support
import xcal
from conftest import Invoke
from support import TINY
from xcal.data.catalog import load
from xcal.data.images import RECORD_GROUPS, ImageData
from xcal.data.importing import import_dataset
from xcal.dp.ledger.ledger import create
from xcal.dp.ledger.rows import Terms, read_rows, runs_of, terms_of
from xcal.errors import UserError
from xcal.experiments import make_experiment, read_pinned
from xcal.federation.constants import with_constants
from xcal.federation.folder import RunFolder
from xcal.federation.setup import prepare, prepare_remote
from xcal.presets import PRESETS

PATIENTS = 20
EACH = 6


@pytest.fixture(autouse=True)
def own_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "xcal-site"))


def picture(shade: int) -> bytes:
    packed = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), shade % 250, np.uint8)).save(packed, "PNG")
    return packed.getvalue()


def csv_of(
    folder: Path,
    heading: str = "path,label,PatientID",
    rows: list[str] | None = None,
    patients: int = PATIENTS,
) -> Path:
    """A hospital's CSV beside its images: every patient has six, of both classes."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [heading]
    for i in range(patients * EACH):
        (folder / f"{i}.png").write_bytes(picture(i))
        lines.append(f"{i}.png,{'ill' if i % 2 else 'well'},P-{i // EACH:03d}")
    (folder / "table.csv").write_text("\n".join(rows or lines))
    return folder / "table.csv"


SMALL = ["--pixels", "16", "--name", "ward"]
KEYS: dict[str, Any] = {
    **{k: v for k, v in TINY.items() if k != "unit"},
    "method": "fl-dp",
    "data": "ward",
    "clients": 1,
    "rounds": 1,
    "road_images": 0,
    "road_test_images": 0,
}


def words(**changes: Any) -> list[str]:
    found = []
    for key, value in {**KEYS, **changes}.items():
        found += ["--set", f"{key}={json.dumps(value)}"]
    return found


# --- the importer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column",
    [
        *("PatientID", "Patient ID", "patient_id", "PATIENT-ID", "patient.id", "Subject Id"),
        *("Patient (ID)", "Subject ID:", "#patient", "Patient/ID", "'patient'", "\u200bPatient ID"),
    ],
)
def test_a_patient_column_is_found_however_it_is_spelled(
    tmp_path: Path, invoke: Invoke, column: str
) -> None:
    table = csv_of(tmp_path / "ward", f"path,label,{column}")
    code, out, _ = invoke("data", "import", str(table), *SMALL)
    assert code == 0
    assert "patients" in out
    data = load("ward")
    assert data.group_name == "patient"
    assert sum(len(np.unique(images.groups)) for _, images in data.splits()) == PATIENTS
    assert data.shared_groups == 0


def test_a_csv_of_patientid_trains_its_patients_and_says_so(tmp_path: Path, invoke: Invoke) -> None:
    """The case that was reported: `unit = group` took every image for a patient."""
    table = csv_of(tmp_path / "ward")
    assert invoke("data", "import", str(table), *SMALL)[0] == 0
    out = tmp_path / "run"
    assert invoke("run", *words(unit="group"), "--out", str(out))[0] == 0
    result = json.loads((out / "result.json").read_text())
    patients = len(np.unique(load("ward").train.groups))
    assert (result["unit"], result["clients"][0]["units"]) == ("group", patients)
    assert patients == PATIENTS - 4  # a tenth each for validation and test
    terms = terms_of(read_rows(out / "clients" / "0" / "ledger.sqlite"))
    assert terms.unit == "group"


def test_columns_of_other_names_are_said_by_hand(tmp_path: Path, invoke: Invoke) -> None:
    table = csv_of(tmp_path / "ward", "Datei,Befund,Fall Nr")
    code, _, err = invoke("data", "import", str(table), *SMALL)
    assert code == 2
    assert "--path-column" in err
    named = ["--path-column", "datei", "--label-column", "Befund"]
    code, _, err = invoke("data", "import", str(table), *SMALL, *named, "--group-column", "FallNo")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "'Fall Nr'" in err
    assert "'Befund'" in err
    options = [*named, "--group-column", "fall_nr"]
    assert invoke("data", "import", str(table), *SMALL, *options)[0] == 0
    data = load("ward")
    assert (data.classes, data.groups_known) == (("ill", "well"), True)
    assert sum(len(np.unique(images.groups)) for _, images in data.splits()) == PATIENTS
    # The same by argument is the same set, and a folder with that one table will do.
    again = import_dataset(
        tmp_path / "ward",
        name="ward",
        pixels=16,
        path_column="datei",
        label_column="Befund",
        group_column="fall_nr",
    )
    assert again.already_there
    code, _, err = invoke(
        "data", "import", str(tmp_path / "ward"), *SMALL, "--kind", "folders", *named
    )
    assert code == 2
    assert "no table" in err


def test_an_unused_column_that_may_name_people_is_named(tmp_path: Path, invoke: Invoke) -> None:
    rows = ["path,label,Patient Age,StudyInstanceUID,Case-No,image_id,MRN code"]
    for i in range(PATIENTS * EACH):
        rows.append(f"{i}.png,{'ab'[i % 2]},{40 + i // EACH},1.2.{i // EACH},{i // EACH},{i},x")
    table = csv_of(tmp_path / "ward", rows=rows)
    code, out, _ = invoke("data", "import", str(table), *SMALL)
    assert code == 0
    shown = invoke("data", "show", "ward")[1]
    for text in (out, shown):
        for name in ("StudyInstanceUID", "Case-No", "MRN code"):
            assert f"'{name}'" in text
        for name in ("Patient Age", "image_id"):
            assert f"'{name}'" not in text
        assert "--group-column" in text
    assert load("ward").group_name == RECORD_GROUPS


def test_a_set_read_without_its_patients_is_not_taken_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older version kept under the name is not what is now read from the same file."""
    table = csv_of(tmp_path / "ward")
    monkeypatch.setattr("xcal.data.table.GROUP_COLUMNS", ["nothing"])
    old = import_dataset(table, name="ward", pixels=16)
    assert old.info.group_name == RECORD_GROUPS
    monkeypatch.undo()
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "xcal-site"))
    with pytest.raises(UserError, match="--replace"):
        import_dataset(table, name="ward", pixels=16)
    new = import_dataset(table, name="ward", pixels=16, replace=True)
    assert (new.already_there, new.info.group_name) == (False, "patient")


def test_images_that_name_nobody_make_no_groups(tmp_path: Path, invoke: Invoke) -> None:
    rows = ["path,label,PatientID"]
    for i in range(PATIENTS * EACH):
        rows.append(f"{i}.png,{'ab'[i % 2]},{'' if i < 5 else i // EACH}")
    table = csv_of(tmp_path / "ward", rows=rows)
    assert invoke("data", "import", str(table), *SMALL)[0] == 0
    data = load("ward")
    assert (data.ungrouped_images, data.groups_known) == (5, False)
    code, _, err = invoke("run", *words(unit="group"), "--out", str(tmp_path / "run"))
    assert code == 2
    assert "5 images" in err
    assert prepare(make_experiment(KEYS)).experiment.unit == "record"


# --- which unit -----------------------------------------------------------------------------------


def test_a_promise_per_group_needs_groups(tmp_path: Path, invoke: Invoke) -> None:
    table = csv_of(tmp_path / "ward", "path,label,remark")
    assert invoke("data", "import", str(table), *SMALL)[0] == 0
    site_dir = tmp_path / "site"
    create(site_dir / "ledger.sqlite", Terms("ward", "group", 30.0, 1e-2))
    out = tmp_path / "run"
    code, _, err = invoke("run", *words(unit="group", sites=[str(site_dir)]), "--out", str(out))
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert not out.exists()
    assert not runs_of(read_rows(site_dir / "ledger.sqlite"))
    # Without groups the default is one image.
    assert prepare(make_experiment(KEYS)).experiment.unit == "record"


def test_one_image_per_person_is_declared_by_hand(tmp_path: Path, invoke: Invoke) -> None:
    table = csv_of(tmp_path / "ward", "path,label,remark")
    code, out, _ = invoke("data", "import", str(table), *SMALL, "--one-image-per-person")
    assert code == 0
    assert "declared by hand" in out
    data = load("ward")
    assert (data.group_name, data.groups_declared, data.groups_known) == ("person", True, True)
    made = prepare(make_experiment({**KEYS, "unit": "group"}))
    assert made.plans[0] is not None
    assert made.plans[0].units == len(data.train)
    assert made.data.groups_declared
    # Where the set itself names people with several images, nobody can declare otherwise.
    other = csv_of(tmp_path / "other")
    code, _, err = invoke(
        "data", "import", str(other), *SMALL, "--one-image-per-person", "--replace"
    )
    assert code == 2
    assert f"{PATIENTS} patients" in err
    assert load("ward").group_name == "person"


def test_groups_are_the_default_where_there_are_any(tmp_path: Path, invoke: Invoke) -> None:
    assert invoke("data", "import", str(csv_of(tmp_path / "ward")), *SMALL)[0] == 0
    out = tmp_path / "run"
    assert invoke("run", *words(), "--out", str(out))[0] == 0
    pinned = tomllib.loads((out / "experiment.toml").read_text())
    assert pinned["unit"] == "group"
    result = json.loads((out / "result.json").read_text())
    assert (result["unit"], result["clients"][0]["units"]) == ("group", PATIENTS - 4)
    statement = json.loads((out / "statement.json").read_text())
    plans = json.loads((out / "plans.json").read_text())
    assert statement["unit"] == plans["0"]["unit"] == "group"
    assert invoke("run", "--resume", str(out))[0] == 0
    # One image is a choice.
    other = tmp_path / "record"
    assert invoke("run", *words(unit="record"), "--out", str(other))[0] == 0
    assert tomllib.loads((other / "experiment.toml").read_text())["unit"] == "record"


def test_every_way_to_a_run_pins_the_unit(tmp_path: Path) -> None:
    keys = {k: v for k, v in TINY.items() if k != "unit"} | {"rounds": 1, "road_images": 0}
    keys["road_test_images"] = 0
    result = xcal.run(tmp_path / "run", **keys, method="fl-dp")
    assert result["unit"] == "group"
    assert RunFolder.find(tmp_path / "run").experiment.unit == "group"
    remote = prepare_remote(make_experiment({**keys, "clients": 2}), ["a", "b"])
    assert remote.experiment.unit == "group"


def test_an_old_run_keeps_the_unit_it_pinned(tmp_path: Path) -> None:
    keys = {**TINY, "rounds": 1, "road_images": 0, "road_test_images": 0, "method": "fl-dp"}
    xcal.run(tmp_path / "run", **keys)
    text = (tmp_path / "run" / "experiment.toml").read_text()
    assert 'unit = "record"' in text
    assert "public_validation" not in text  # nothing new in what an older version wrote
    assert read_pinned(tmp_path / "run" / "experiment.toml").unit == "record"


def test_a_cap_on_images_is_no_default_of_groups() -> None:
    keys = {k: v for k, v in TINY.items() if k != "unit"} | {"method": "fl-dp", "group_cap": 2}
    with pytest.raises(UserError, match="unit = 'record'"):
        prepare(make_experiment(keys))


def nameless(*, pixels: int = 16, seed: int = 0) -> ImageData:
    """A set of somebody's own that does not know its groups, though it has numbers for them."""
    return replace(support.tiny(pixels=pixels, seed=seed), group_name=RECORD_GROUPS)


def torn(*, pixels: int = 16, seed: int = 0) -> ImageData:
    """Two patients of the training images stand in validation, one of them in test too."""
    data = support.tiny(pixels=pixels, seed=seed)
    validation = replace(data.validation, groups=data.validation.groups.copy())
    test = replace(data.test, groups=data.test.groups.copy())
    validation.groups[:2] = (0, 1)
    test.groups[0] = 1
    return replace(data, validation=validation, test=test)


def test_the_author_of_a_set_says_what_its_groups_are() -> None:
    name = f"{__name__}:nameless"
    assert load(name).shared_groups == 0
    with pytest.raises(UserError, match="group"):
        prepare(make_experiment({**TINY, "data": name, "unit": "group", "method": "fl-dp"}))
    keys = {k: v for k, v in TINY.items() if k != "unit"} | {"data": name, "method": "fl-dp"}
    assert prepare(make_experiment(keys)).experiment.unit == "record"


def test_a_plan_without_data_says_what_a_unit_is(invoke: Invoke) -> None:
    plan = ["plan", "--method", "fl-dp", "--epsilon", "3", "--units", "400"]
    code, out, _ = invoke(*plan)
    assert code == 0
    assert "record" in out
    assert json.loads(invoke(*plan, "--json")[1])["unit"] == "record"
    assert json.loads(invoke(*plan, "--unit", "group", "--json")[1])["unit"] == "group"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_keep_the_unit_they_were_measured_at(preset: str) -> None:
    assert make_experiment({"preset": preset}).unit == "record"
    assert make_experiment({"preset": preset, "unit": "group"}).unit == "group"


# --- the same person in two splits ----------------------------------------------------------------


def test_a_person_in_training_and_in_test_has_no_promise_per_group() -> None:
    name = f"{__name__}:torn"
    assert load(name).shared_groups == 2
    with pytest.raises(UserError, match=" 2 patients"):
        prepare(make_experiment({**TINY, "data": name, "unit": "group", "method": "fl-dp"}))
    made = prepare(make_experiment({**TINY, "data": name, "method": "fl-dp"}))
    assert made.data.shared_groups == 2


def test_a_split_column_that_parts_a_person_is_named(tmp_path: Path, invoke: Invoke) -> None:
    rows = ["path,label,Patient ID,split"]
    for i in range(PATIENTS * EACH):
        split = "test" if i % EACH == 0 and i < 3 * EACH else "train"
        rows.append(f"{i}.png,{'ab'[i // 2 % 2]},{i // EACH},{split}")
    table = csv_of(tmp_path / "ward", rows=rows)
    code, out, _ = invoke("data", "import", str(table), *SMALL)
    assert code == 0
    assert "3 patients stand in training and in validation or test" in out
    code, _, err = invoke("run", *words(), "--out", str(tmp_path / "run"))
    assert code == 2
    assert " 3 patients" in err


# --- images that are measured without a guarantee -------------------------------------------------


@pytest.fixture
def hospital(tmp_path: Path) -> dict[str, Any]:
    """A run at the site of a real population."""
    import_dataset(csv_of(tmp_path / "ward"), name="ward", pixels=16)
    site_dir = tmp_path / "site"
    create(site_dir / "ledger.sqlite", Terms("ward 7", "group", 30.0, 1e-2))
    return {**KEYS, "sites": [str(site_dir)], "road_images": 4, "road_test_images": None}


def charged(keys: dict[str, Any]) -> int:
    return len(runs_of(read_rows(Path(keys["sites"][0]) / "ledger.sqlite")))


def test_a_hospitals_own_images_are_not_measured_unless_somebody_agrees(
    tmp_path: Path, invoke: Invoke, hospital: dict[str, Any]
) -> None:
    hospital.pop("road_test_images")
    out = tmp_path / "run"
    assert invoke("run", *words(**hospital), "--out", str(out))[0] == 0
    result = json.loads((out / "result.json").read_text())
    assert result["macro_f1"] is None
    assert result["classification"]["macro_f1"] is None and not result["classification"]["images"]
    assert result["explanations"] is None
    assert not (out / "predictions.npz").exists()
    [line] = [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]
    measured = [v for k, v in line.items() if k.startswith(("validation", "road"))]
    assert measured == [None] * 5
    assert charged(hospital) == 1
    for command in (
        ["evaluate", str(out)],
        ["explain", str(out), "test:0", "--out", str(tmp_path / "maps")],
        ["panel", str(out), "--out", str(tmp_path / "panel.png")],
    ):
        code, _, err = invoke(*command)
        assert code == 2, command
        assert len(err.strip().splitlines()) == 1

    agreed = {**hospital, "public_validation": True, "public_validation_by": "Dr. Vogel, ethics"}
    assert invoke("run", *words(**agreed), "--out", str(tmp_path / "agreed"))[0] == 0
    result = json.loads((tmp_path / "agreed" / "result.json").read_text())
    assert 0 <= result["macro_f1"] <= 1
    assert (tmp_path / "agreed" / "predictions.npz").exists()
    pinned = RunFolder.find(tmp_path / "agreed").experiment
    assert pinned.public_validation_by == "Dr. Vogel, ethics"
    assert invoke("evaluate", str(tmp_path / "agreed"))[0] == 0


@pytest.mark.parametrize(
    "half",
    [
        {"public_validation": True},
        {"public_validation_by": "Dr. Vogel"},
        {"public_validation": False, "public_validation_by": "Dr. Vogel"},
        {"public_validation": True, "public_validation_by": "  "},
    ],
)
def test_who_agreed_and_that_somebody_did_go_together(
    tmp_path: Path, invoke: Invoke, hospital: dict[str, Any], half: dict[str, Any]
) -> None:
    hospital.pop("road_test_images")
    code, _, err = invoke("run", *words(**hospital, **half), "--out", str(tmp_path / "run"))
    assert code == 2
    assert "public_validation_by" in err
    assert charged(hospital) == 0
    assert not (tmp_path / "run").exists()


def test_what_needs_public_images_is_refused_before_a_charge(
    tmp_path: Path, invoke: Invoke, hospital: dict[str, Any]
) -> None:
    hospital.pop("road_test_images")
    hospital["method"] = "adap-dpfl"
    out = tmp_path / "run"
    code, _, err = invoke("run", *words(**hospital), "--out", str(out))
    assert code == 2
    assert "public_validation" in err
    assert not out.exists()
    assert charged(hospital) == 0


def test_no_constants_of_a_hospitals_images(tmp_path: Path, hospital: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "w.safetensors")
    keys = {
        **hospital,
        "network": "efficientnet_b0",
        "norm": "frozen",
        "weights": str(tmp_path / "w.safetensors"),
        "head_reads": "stages:4-6",
    }
    with pytest.raises(UserError, match="public_validation"):
        with_constants(make_experiment(keys))


def test_simulated_sites_measure_as_before(tmp_path: Path, hospital: dict[str, Any]) -> None:
    site_dir = tmp_path / "simulated"
    create(site_dir / "ledger.sqlite", Terms("made up", "group", 30.0, 1e-2, simulated=True))
    made = prepare(make_experiment({**hospital, "sites": [str(site_dir)]}))
    assert len(made.data.test)
    assert not len(prepare(make_experiment(hospital)).data.test)


def test_a_hospital_that_only_trains_gives_up_nobody(tmp_path: Path, invoke: Invoke) -> None:
    table = csv_of(tmp_path / "ward")
    assert invoke("data", "import", str(table), *SMALL, "--all-train")[0] == 0
    data = load("ward")
    assert len(data.train) == PATIENTS * EACH
    assert len(data.validation) == len(data.test) == 0


# --- a client elsewhere ---------------------------------------------------------------------------


def test_a_client_elsewhere_promises_no_groups_that_it_does_not_know(tmp_path: Path) -> None:
    from wire import ask, changed
    from xcal.federation.messages import Refusal, Reply
    from xcal.federation.policy import Policy
    from xcal.federation.site_check import check_site
    from xcal.federation.site_directory import SiteDirectory, SiteTable, create_site

    table = csv_of(tmp_path / "ward", "path,label,remark")
    table.write_text(table.read_text().replace("0.png,well", "0.png,third", 1))  # three classes
    made = SiteTable(client="0", population="ward", data="ward", threads=1)
    policy = Policy(
        epsilon_total=20.0,
        delta_total=1e-2,
        epsilon_run=8.0,
        delta_run=1e-3,
        sigma_min=0.0,
        methods=("xcal", "xcal-steered"),
        networks=("support:micro",),
        unit="group",
    )
    site_dir = create_site(tmp_path / "site", made, policy, unit="group").path
    import_dataset(table, name="ward", pixels=16)
    assert ask(site_dir, changed(unit="group")) == Refusal("0", "data")
    assert ask(site_dir, changed(unit=None)) == Refusal("0", "experiment-invalid")
    assert not runs_of(read_rows(site_dir / "ledger.sqlite"))
    assert "unit = 'group'" in SiteDirectory.open(site_dir).refusals()[0]["detail"]
    assert "problem" in {finding.level for finding in check_site(SiteDirectory.open(site_dir))}
    import_dataset(table, name="ward", pixels=16, one_image_per_person=True, replace=True)
    assert isinstance(ask(site_dir, changed(unit="group")), Reply)


def test_a_trial_without_a_unit_takes_that_of_its_data(tmp_path: Path) -> None:
    from xcal.config import to_toml
    from xcal.federation.policy import Policy
    from xcal.federation.site_check import check_site
    from xcal.federation.site_directory import SiteTable, create_site

    keys = {k: v for k, v in TINY.items() if k != "unit"}
    (tmp_path / "trial.toml").write_text(to_toml(keys))
    about = SiteTable(
        client="0", population="p", experiment=str(tmp_path / "trial.toml"), simulated=True, seed=1
    )
    policy = Policy(
        epsilon_total=8.0, delta_total=1e-3, epsilon_run=8.0, delta_run=1e-3, unit="group"
    )
    site_dir = create_site(tmp_path / "site", about, policy, unit="group")
    assert site_dir.trial().unit == "group"
    assert [f for f in check_site(site_dir) if f.level == "problem"] == []


def test_a_ledger_of_patients_is_not_charged_for_their_studies(
    tmp_path: Path, invoke: Invoke
) -> None:
    table = csv_of(tmp_path / "ward")
    rows = table.read_text().splitlines()[1:]
    studies = [f"{row},S{i // 2}" for i, row in enumerate(rows)]
    table.write_text("\n".join(["path,label,PatientID,study", *studies]))
    ward = ["data", "import", str(table), *SMALL, "--all-train"]
    assert invoke(*ward)[0] == 0
    limits = "--unit group --epsilon 20 --delta 1e-2 --population ward".split()
    assert invoke("ledger", "create", str(tmp_path / "site"), *limits)[0] == 0
    keys = words(sites=[str(tmp_path / "site")], epsilon=2.0, delta=1e-3)
    assert invoke("run", *keys, "--out", str(tmp_path / "patients"))[0] == 0
    paid = read_rows(tmp_path / "site" / "ledger.sqlite")
    assert invoke(*ward, "--group-column", "study", "--replace")[0] == 0
    code, _, err = invoke("run", *keys, "--out", str(tmp_path / "studies"))
    assert code == 2 and err.count("\n") == 1
    assert f"in {PATIENTS} groups" in err and "--group-column" in err
    assert read_rows(tmp_path / "site" / "ledger.sqlite") == paid
    # Under other names, in another order, they are the same groups.
    renamed = [line.replace("P-", "Q-1") for line in reversed(studies)]
    table.write_text("\n".join(["path,label,PatientID,study", *renamed]))
    assert invoke(*ward, "--replace")[0] == 0
    assert invoke("run", *keys, "--out", str(tmp_path / "again"))[0] == 0


@pytest.mark.parametrize("column", ["patient_id_hash", "PatientID.1", "Patienten-Nr.", "Case Nr 2"])
def test_nobody_declares_one_image_each_beside_a_column_that_says_otherwise(
    tmp_path: Path, invoke: Invoke, column: str
) -> None:
    table = csv_of(tmp_path / "ward", f"path,label,{column}")
    code, _, err = invoke("data", "import", str(table), *SMALL, "--one-image-per-person")
    assert code == 2 and err.count("\n") == 1
    assert f"--group-column {column!r}" in err


def test_a_cell_too_many_shifts_nobody_into_another_column(tmp_path: Path, invoke: Invoke) -> None:
    table = csv_of(tmp_path / "ward")
    lines = table.read_text().splitlines()
    shifted = [
        line.replace("ill,", "ill, left,") if i == 8 else line for i, line in enumerate(lines)
    ]
    table.write_text("\n".join(shifted))
    code, _, err = invoke("data", "import", str(table), *SMALL)
    assert code == 2 and err.count("\n") == 1
    assert "table.csv, line 9" in err and "double quotes" in err and "left" not in err
    quoted = [line.replace("ill, left", '"ill, left"') for line in shifted]
    table.write_text("\n".join(line + "," for line in quoted))  # an empty last cell says nothing
    assert invoke("data", "import", str(table), *SMALL)[0] == 0
    assert sum(len(np.unique(images.groups)) for _, images in load("ward").splits()) == PATIENTS


def contradicted(*, pixels: int = 16, seed: int = 0) -> ImageData:
    return replace(support.tiny(pixels=pixels, seed=seed), groups_declared=True)


def unsaid(*, pixels: int = 16, seed: int = 0) -> ImageData:
    return replace(support.tiny(pixels=pixels, seed=seed), group_name=" ")


def miscounted(*, pixels: int = 16, seed: int = 0) -> ImageData:
    return replace(support.tiny(pixels=pixels, seed=seed), ungrouped_images=-3)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (contradicted, "groups_declared"),
        (unsaid, "group_name"),
        (miscounted, "ungrouped_images"),
    ],
)
def test_a_set_that_contradicts_itself_promises_nothing(
    tmp_path: Path, invoke: Invoke, made: Any, problem: str
) -> None:
    named = f"{__name__}:{made.__name__}"
    code, _, err = invoke("run", *words(data=named), "--out", str(tmp_path / "run"))
    assert code == 2 and err.count("\n") == 1
    assert problem in err and "docs/data.md" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("one", "other"), [("K-007", "k-007"), ("7", "007"), ("7", "7.0"), ("K 7", "K7")]
)
@pytest.mark.parametrize("layout", ["csv", "folders"])
def test_one_patient_written_in_two_ways_is_no_two_patients(
    tmp_path: Path, invoke: Invoke, one: str, other: str, layout: str
) -> None:
    table = csv_of(tmp_path / "ward")
    lines = table.read_text().replace("P-003", one).replace("P-005", other).splitlines()
    source = table
    if layout == "folders":
        source = table.parent
        for line in lines[1:]:
            name, cls, _ = line.split(",")
            (source / cls).mkdir(exist_ok=True)
            (source / name).rename(source / cls / name)
        lines = [",".join(line.split(",")[::2]) for line in lines]
    table.write_text("\n".join(lines))
    code, _, err = invoke("data", "import", str(source), *SMALL)
    assert code == 2 and err.count("\n") == 1
    assert f"lines {2 + 3 * EACH} and {2 + 5 * EACH}" in err and "--group-column 'PatientID'" in err
    assert invoke("data", "import", str(source), *SMALL, "--group-column", "PatientID")[0] == 0
    assert sum(len(np.unique(images.groups)) for _, images in load("ward").splits()) == PATIENTS


def test_nor_where_the_set_has_grown(tmp_path: Path, invoke: Invoke) -> None:
    """New images of anybody are welcome; those that were charged for stay in their groups."""
    table = csv_of(tmp_path / "ward")
    rows = table.read_text().splitlines()[1:]
    studies = [f"{row},S{i // 2}" for i, row in enumerate(rows)]
    heading = "path,label,PatientID,study"
    table.write_text("\n".join([heading, *studies[:-12]]))
    ward = ["data", "import", str(table), *SMALL, "--all-train"]
    assert invoke(*ward)[0] == 0
    limits = "--unit group --epsilon 20 --delta 1e-2 --population ward".split()
    assert invoke("ledger", "create", str(tmp_path / "site"), *limits)[0] == 0
    keys = words(sites=[str(tmp_path / "site")], epsilon=2.0, delta=1e-3, expected_batch_size=4)
    assert invoke("run", *keys, "--out", str(tmp_path / "first"))[0] == 0
    table.write_text("\n".join([heading, *studies]))
    assert invoke(*ward, "--replace")[0] == 0
    assert invoke("run", *keys, "--out", str(tmp_path / "grown"))[0] == 0
    paid = read_rows(tmp_path / "site" / "ledger.sqlite")
    # Of the images that came later, too, it is known who is one group.
    table.write_text("\n".join([heading, *studies[-12:]]))
    assert invoke(*ward, "--group-column", "study", "--replace")[0] == 0
    code, _, err = invoke("run", *keys, "--out", str(tmp_path / "studies"))
    assert code == 2 and "--group-column" in err
    assert read_rows(tmp_path / "site" / "ledger.sqlite") == paid
