"""No promise that imported data or a data set of one's own do not support: as a user types it."""

from __future__ import annotations

import io
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from conftest import Invoke
from scans import RAMP, dicom
from support import ROOT, TINY, tiny
from xcal.data.catalog import load
from xcal.data.images import RECORD_GROUPS, ImageData, Images
from xcal.data.importing import Kind, import_dataset
from xcal.data.listing import is_identifier, somebody
from xcal.dp.ledger.ledger import create
from xcal.dp.ledger.rows import Terms, read_rows, runs_of

PATIENTS, EACH = 20, 6
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


@pytest.fixture(autouse=True)
def own_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "xcal-site"))


def picture(shade: int) -> bytes:
    packed = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), shade % 250, np.uint8)).save(packed, "PNG")
    return packed.getvalue()


def ward(folder: Path, heading: str, row: Any, count: int = PATIENTS * EACH) -> Path:
    """A CSV beside its images; `row` makes what stands behind path and label."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [heading]
    for i in range(count):
        (folder / f"{i}.png").write_bytes(picture(i))
        lines.append(f"{i}.png,{'ill' if i % 2 else 'well'},{row(i)}")
    (folder / "table.csv").write_text("\n".join(lines))
    return folder / "table.csv"


def class_folders(folder: Path, table: list[str] | None = None) -> Path:
    for i in range(PATIENTS * EACH):
        place = folder / ("ill" if i % 2 else "well")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i}.png").write_bytes(picture(i))
    if table is not None:
        (folder / "people.csv").write_text("\n".join(table))
    return folder


def words(**changes: Any) -> list[str]:
    found = []
    for key, value in {**KEYS, **changes}.items():
        if value is not None:
            found += ["--set", f"{key}={json.dumps(value)}"]
    return found


def one_sentence(err: str) -> str:
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    return err


def people() -> int:
    return sum(len(np.unique(images.groups)) for _, images in load("ward").splits())


# --- who is nobody --------------------------------------------------------------------------------

NOBODY = [
    *("NA", "N/A", "nan", "none", "null", "unknown", "-", "?", " Unknown ", "n.a.", "<NA>", "--"),
    *("NaN", "NONE", "not available", "ANONYMOUS", "."),
]


@pytest.mark.parametrize("value", NOBODY)
def test_what_names_nobody_is_a_blank_cell(value: str) -> None:
    assert somebody(value) == ""


@pytest.mark.parametrize("value", ["0", "P-1", "Nina", "na1", "NA 7", "12", "ä", "Null-7"])
def test_what_may_be_a_name_is_one(value: str) -> None:
    assert somebody(f" {value} ") == value


@pytest.mark.parametrize("value", ["NA", " n/a ", "Unknown", "-", ""])
def test_images_of_nobody_are_no_patient(tmp_path: Path, invoke: Invoke, value: str) -> None:
    table = ward(
        tmp_path / "ward", "path,label,patient_id", lambda i: value if i < 7 else i // EACH
    )
    code, out, _ = invoke("data", "import", str(table), *SMALL)
    assert code == 0
    assert f"7 of {PATIENTS * EACH} images name no patient" in out
    assert people() == 7 + 19  # the images of nobody each for itself
    data = load("ward")
    assert (data.ungrouped_images, data.groups_known) == (7, False)
    code, _, err = invoke("run", *words(unit="group"), "--out", str(tmp_path / "run"))
    assert code == 2
    assert "7 images that name no patient" in one_sentence(err)
    assert not (tmp_path / "run").exists()


def test_a_set_whose_blanks_were_patients_is_not_taken_for_the_same(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ward(tmp_path / "ward", "path,label,patient_id", lambda i: "NA" if i < 7 else i // EACH)
    with monkeypatch.context() as older:
        older.setattr("xcal.data.table.somebody", str.strip)
        assert import_dataset(table, name="ward", pixels=16).info.ungrouped_images == 0
    code, _, err = invoke("data", "import", str(table), *SMALL)
    assert code == 2
    assert "--replace" in err
    assert invoke("data", "import", str(table), *SMALL, "--replace")[0] == 0
    assert load("ward").ungrouped_images == 7


def test_a_short_first_row_hides_no_patient_column(tmp_path: Path, invoke: Invoke) -> None:
    table = ward(tmp_path / "ward", "path,label,patient_id", lambda i: i // EACH)
    table.write_text(table.read_text().replace("0.png,well,0", "0.png,well", 1))
    assert invoke("data", "import", str(table), *SMALL)[0] == 0
    data = load("ward")
    assert (data.group_name, data.ungrouped_images) == ("patient", 1)


# --- who declares and who contradicts -------------------------------------------------------------


@pytest.mark.parametrize("column", ["visit", "pid", "Study ID", "case_id", "pat_nr", "AccessionNo"])
def test_nobody_declares_one_image_beside_an_identifier_that_repeats(
    tmp_path: Path, invoke: Invoke, column: str
) -> None:
    table = ward(tmp_path / "ward", f"path,label,{column}", lambda i: i // EACH)
    asked = ["data", "import", str(table), *SMALL, "--one-image-per-person"]
    code, _, err = invoke(*asked)
    assert code == 2
    assert f"--group-column {column!r}" in one_sentence(err)
    assert invoke(*asked[:-1])[0] == 0  # without the declaration: records
    assert load("ward").group_name == RECORD_GROUPS
    assert invoke(*asked[:-1], "--group-column", column, "--replace")[0] == 0
    assert people() == PATIENTS


def test_an_identifier_that_never_repeats_contradicts_nobody(
    tmp_path: Path, invoke: Invoke
) -> None:
    table = ward(tmp_path / "ward", "path,label,visit", lambda i: i if i > 9 else "NA")
    code, _, _ = invoke("data", "import", str(table), *SMALL, "--one-image-per-person")
    assert code == 0
    assert load("ward").groups_declared


@pytest.mark.parametrize("name", ["pid", "PID", "mrn", "subject", "case_id", "study_id", "pt_id"])
def test_what_looks_like_an_identifier(name: str) -> None:
    assert is_identifier(name)


@pytest.mark.parametrize("name", ["age", "image_id", "site_id", "scanner id", "rapid", "label_id"])
def test_what_does_not_look_like_one(name: str) -> None:
    assert not is_identifier(name)


def test_pid_is_named_as_unused(tmp_path: Path, invoke: Invoke) -> None:
    table = ward(tmp_path / "ward", "path,label,pid", lambda i: i // EACH)
    code, out, _ = invoke("data", "import", str(table), *SMALL)
    assert code == 0
    assert "--group-column 'pid'" in out


@pytest.mark.parametrize(
    ("one", "other"),
    [("patient_id", "PatientID"), ("Patient ID", "subject"), ("mrn", "group_id")],
)
def test_two_patient_columns_are_one_too_many(
    tmp_path: Path, invoke: Invoke, one: str, other: str
) -> None:
    table = ward(tmp_path / "ward", f"path,label,{one},{other}", lambda i: f"{i // EACH},{i}")
    asked = ["data", "import", str(table), *SMALL]
    code, _, err = invoke(*asked)
    assert code == 2
    one_sentence(err)
    assert f"'{one}'" in err and f"'{other}'" in err and "--group-column" in err
    assert invoke(*asked, "--group-column", one)[0] == 0
    assert people() == PATIENTS
    assert invoke(*asked, "--group-column", other, "--replace")[0] == 0
    assert people() == PATIENTS * EACH


@pytest.mark.parametrize("point_at", ["table.csv", "."])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, invoke: Invoke, point_at: str) -> None:
    table = ward(tmp_path / "ward", "path,label,patient_id,patient_id", lambda i: f"{i // 6},{i}")
    code, _, err = invoke("data", "import", str(table.parent / point_at), *SMALL)
    assert code == 2
    assert "'patient_id'" in one_sentence(err)


def test_a_lesion_beside_a_patient_is_no_second_one(tmp_path: Path, invoke: Invoke) -> None:
    table = ward(tmp_path / "ward", "path,label,lesion_id,patient_id", lambda i: f"{i},{i // EACH}")
    assert invoke("data", "import", str(table), *SMALL)[0] == 0
    assert (load("ward").group_name, people()) == ("patient", PATIENTS)


def scans(folder: Path, told: Any, *, in_folders: bool = False) -> Path:
    """DICOM files of five patients; `told(i)` is whom the CSV names."""
    folder.mkdir()
    lines = ["filename,patient_id" if in_folders else "path,label,patient_id"]
    for i in range(30):
        cls = "ab"[i % 2]
        name = f"{cls}/{i}.dcm" if in_folders else f"{i}.dcm"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(dicom(RAMP + i, patient=f"P{i // EACH}"))
        lines.append(f"{i}.dcm,{told(i)}" if in_folders else f"{name},{cls},{told(i)}")
    (folder / "table.csv").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("in_folders", [False, True])
def test_a_csv_against_the_files_own_patient(
    tmp_path: Path, invoke: Invoke, in_folders: bool
) -> None:
    folder = scans(
        tmp_path / "scans", lambda i: f"Q{i}" if i == 7 else f"P{i // EACH}", in_folders=in_folders
    )
    asked = ["data", "import", str(folder), *SMALL]
    code, _, err = invoke(*asked)
    assert code == 2
    one_sentence(err)
    assert "7.dcm" in err and "PatientID" in err and "--group-column" in err
    assert invoke(*asked, "--group-column", "patient_id")[0] == 0
    assert people() == 6


@pytest.mark.parametrize("in_folders", [False, True])
def test_a_csv_that_agrees_with_headers_completes_them(
    tmp_path: Path, invoke: Invoke, in_folders: bool
) -> None:
    folder = scans(
        tmp_path / "scans", lambda i: "NA" if i % 3 else f"P{i // EACH}", in_folders=in_folders
    )
    asked = ["data", "import", str(folder), *SMALL]
    assert invoke(*asked)[0] == 0
    assert (people(), load("ward").groups_known) == (5, True)
    # Where the table is said to be right, no header stands in for it: its names may be others.
    assert invoke(*asked, "--group-column", "patient_id", "--replace")[0] == 0
    assert load("ward").ungrouped_images == 20


# --- class folders with a table beside them -------------------------------------------------------


@pytest.mark.parametrize("written", ["{cls}/{i}.png", "{i}.png", "{i}", "./{cls}\\{i}.png"])
def test_a_table_beside_class_folders_says_whose_they_are(
    tmp_path: Path, invoke: Invoke, written: str
) -> None:
    table = ["filename,patient_id"]
    for i in range(PATIENTS * EACH):
        cls = "ill" if i % 2 else "well"
        table.append(f"{written.format(cls=cls, i=i)},{i // EACH}")
    folder = class_folders(tmp_path / "ward", table)
    code, out, _ = invoke("data", "import", str(folder), *SMALL)
    assert code == 0
    assert "left aside" not in out
    data = load("ward")
    assert (data.group_name, people(), data.groups_known) == ("patient", PATIENTS, True)
    assert data.shared_groups == 0


def test_images_that_the_table_does_not_name_are_nobodys(tmp_path: Path, invoke: Invoke) -> None:
    table = ["filename,patient_id", *(f"{i}.png,{i // EACH}" for i in range(100)), "100.png,NA"]
    folder = class_folders(tmp_path / "ward", table)
    assert invoke("data", "import", str(folder), *SMALL)[0] == 0
    assert load("ward").ungrouped_images == 20


def test_other_columns_beside_class_folders_are_hinted_at(tmp_path: Path, invoke: Invoke) -> None:
    table = ["Datei,pid", *(f"{i}.png,{i // EACH}" for i in range(PATIENTS * EACH))]
    folder = class_folders(tmp_path / "ward", table)
    asked = ["data", "import", str(folder), *SMALL]
    code, out, _ = invoke(*asked)
    assert code == 0
    assert "--group-column 'pid'" in out
    code, _, err = invoke(*asked, "--one-image-per-person", "--replace")
    assert code == 2
    assert "'pid'" in one_sentence(err)
    code, _, err = invoke(*asked, "--group-column", "pid", "--replace")
    assert code == 2
    assert "--path-column" in one_sentence(err)
    named = ["--group-column", "pid", "--path-column", "Datei", "--replace"]
    assert invoke(*asked, *named)[0] == 0
    assert people() == PATIENTS
    code, _, err = invoke(*asked, "--group-column", "nobody", "--replace")
    assert code == 2
    assert "'nobody'" in one_sentence(err)


def test_a_table_that_names_two_people_for_an_image_is_refused(
    tmp_path: Path, invoke: Invoke
) -> None:
    folder = class_folders(tmp_path / "ward", ["filename,patient_id", "0.png,1", "0.png,2"])
    code, _, err = invoke("data", "import", str(folder), *SMALL)
    assert code == 2
    assert "0.png" in one_sentence(err)


# --- what an import says --------------------------------------------------------------------------


def test_splits_that_could_not_be_cut_are_not_said_to_be(tmp_path: Path, invoke: Invoke) -> None:
    table = ward(tmp_path / "ward", "path,label,patient_id", lambda i: i, count=4)
    code, out, _ = invoke("data", "import", str(table), *SMALL)
    assert code == 0
    assert "too few" in out
    assert "10%" not in out and "were cut" not in out
    table = ward(tmp_path / "other", "path,label,patient_id", lambda i: i // EACH)
    out = invoke("data", "import", str(table), *SMALL, "--replace")[1]
    counts = {split: len(images) for split, images in load("ward").splits()}
    assert f"{counts['test']} of 120 images were cut" in out


def test_one_image_each_needs_no_warning_about_several(tmp_path: Path, invoke: Invoke) -> None:
    table = ward(tmp_path / "ward", "path,label,patient_id", lambda i: i)
    out = invoke("data", "import", str(table), *SMALL)[1]
    assert "up to 1" not in out and "does not cover" not in out
    assert "as many patients" in out


def test_a_file_that_is_not_there_cannot_be_removed(tmp_path: Path, invoke: Invoke) -> None:
    table = ward(tmp_path / "ward", "path,label,patient_id", lambda i: i)
    (tmp_path / "ward" / "3.png").unlink()
    code, _, err = invoke("data", "import", str(table), *SMALL)
    assert code == 2
    assert "3.png" in err and "of the table" in err and "--skip-bad" in err


@pytest.mark.parametrize("there", [False, True])
def test_a_csv_that_is_missing(tmp_path: Path, invoke: Invoke, there: bool) -> None:
    folder = class_folders(tmp_path / "ward", ["a,b", "1,2"] if there else None)
    code, _, err = invoke("data", "import", str(folder), *SMALL, "--kind", "csv")
    assert code == 2
    assert ("--path-column" in one_sentence(err)) == there


def test_every_kind_of_the_help_is_one(invoke: Invoke) -> None:
    shown = " ".join(invoke("data", "import", "--help")[1].replace("│", " ").split())
    *first, last = get_args(Kind)
    assert f"{', '.join(first)} or {last}." in shown


# --- one person in two splits ---------------------------------------------------------------------


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """Three patients stand in training and in test."""

    def row(i: int) -> str:
        return f"{i // EACH},{'test' if i % EACH == 0 and i < 3 * EACH else 'train'}"

    return ward(tmp_path / "ward", "path,label,Patient ID,split", row)


def test_a_person_in_two_splits_is_told_the_same_everywhere(
    tmp_path: Path, invoke: Invoke, torn: Path
) -> None:
    out = invoke("data", "import", str(torn), *SMALL)[1]
    assert "unit = group does" not in out
    assert "unit = 'group' is refused" in out
    init = ["site", "init", str(tmp_path / "new"), "--client", "a", "--population", "ward 7"]
    init += ["--epsilon", "20", "--delta", "1e-3", "--data", "ward"]
    for unit in ([], ["--unit", "group"]):
        code, _, err = invoke(*init, *unit)
        assert code == 2
        assert " 3 patients" in one_sentence(err)
    assert not (tmp_path / "new").exists()
    # A site from before, of a real population: refused by its check and by a run alike.
    from xcal.federation.policy import Policy
    from xcal.federation.site_directory import SiteTable, create_site

    about = SiteTable(client="a", population="ward 7", data="ward")
    policy = Policy(
        epsilon_total=20.0, delta_total=1e-3, epsilon_run=20.0, delta_run=1e-3, unit="group"
    )
    site_dir = create_site(tmp_path / "site", about, policy, unit="group").path
    code, _, err = invoke("site", "check", str(site_dir))
    assert code == 1
    assert " 3 patients" in err
    run = words(unit="group", sites=[str(site_dir)], delta=1e-4)
    code, _, err = invoke("run", *run, "--out", str(tmp_path / "run"))
    assert code == 2
    assert " 3 patients" in one_sentence(err)
    assert not (tmp_path / "run").exists()
    assert not runs_of(read_rows(site_dir / "ledger.sqlite"))


@pytest.mark.parametrize("real", [False, True])
def test_per_image_it_is_named_in_statement_and_card(
    tmp_path: Path, invoke: Invoke, torn: Path, real: bool
) -> None:
    assert invoke("data", "import", str(torn), *SMALL)[0] == 0
    sites = None
    if real:
        sites = [str(tmp_path / "site")]
        create(tmp_path / "site" / "ledger.sqlite", Terms("ward 7", "record", 30.0, 1e-2))
    out = tmp_path / "run"
    assert invoke("run", *words(unit="record", sites=sites), "--out", str(out))[0] == 0
    for name in ("statement.txt", "card.md"):
        text = " ".join((out / name).read_text().split())
        assert "Some patients have images in training and in validation or test" in text


# --- sites ----------------------------------------------------------------------------------------


def test_a_site_says_that_it_fell_back_to_images(tmp_path: Path, invoke: Invoke) -> None:
    ward_of = ward(tmp_path / "ward", "path,label,remark", lambda i: "-")
    assert invoke("data", "import", str(ward_of), *SMALL)[0] == 0
    init = ["--client", "a", "--population", "ward 7", "--epsilon", "20", "--delta", "1e-3"]
    code, out, _ = invoke("site", "init", str(tmp_path / "a"), *init, "--data", "ward")
    assert code == 0
    assert "per record" in out and "not one person" in out
    code, _, err = invoke(
        "site", "init", str(tmp_path / "b"), *init, "--data", "ward", "--unit", "group"
    )
    assert code == 2
    assert "--group-column" in one_sentence(err)
    assert not (tmp_path / "b").exists()
    # What is not there yet is the owner's word.
    later = ["--data", "later", "--unit", "group"]
    assert invoke("site", "init", str(tmp_path / "c"), *init, *later)[0] == 0


def test_a_cap_of_one_image_does_not_contradict_itself(tmp_path: Path, invoke: Invoke) -> None:
    table = ward(tmp_path / "ward", "path,label,patient_id", lambda i: i // EACH)
    assert invoke("data", "import", str(table), *SMALL)[0] == 0
    out = tmp_path / "run"
    capped = words(unit="record", group_cap=1, batch=4)
    assert invoke("run", *capped, "--out", str(out))[0] == 0
    statement = json.loads((out / "statement.json").read_text())
    assert statement["opening"][0].startswith("Protected is every patient")
    assert not [w for w in statement["warnings"] if "per image" in w]
    assert "only one that is used of a patient" in statement["promise"]
    assert [case["images"] for case in statement["persons"]] == [1]


# --- what may be measured -------------------------------------------------------------------------


def test_every_run_named_is_asked_whether_its_images_may_be_measured(
    tmp_path: Path, invoke: Invoke
) -> None:
    table = ward(tmp_path / "ward", "path,label,patient_id", lambda i: i // EACH)
    assert invoke("data", "import", str(table), *SMALL)[0] == 0
    site_dir = tmp_path / "site"
    create(site_dir / "ledger.sqlite", Terms("ward 7", "group", 30.0, 1e-2))
    public, real = str(tmp_path / "p1"), str(tmp_path / "real1")
    assert invoke("run", *words(epsilon=5.0), "--out", public)[0] == 0
    assert invoke("run", *words(sites=[str(site_dir)]), "--out", real)[0] == 0
    panel = ["--out", str(tmp_path / "panel.png")]
    for command in (
        ["panel", public, real, *panel],
        ["panel", real, public, *panel],
        ["evaluate", public, "--against", real],
        ["evaluate", real, "--against", public],
        ["evaluate", real],
    ):
        code, _, err = invoke(*command)
        assert code == 2, command
        assert "withhold" in one_sentence(err)
        assert "instead" not in err
    assert not (tmp_path / "panel.png").exists()
    # The page of both runs shows no such image either.
    page = tmp_path / "report.html"
    assert invoke("report", public, real, "--out", str(page))[0] == 0
    assert "Test image of" not in page.read_text()
    # Nor do they become public under another name.
    again = ["--pixels", "16", "--name", "again"]
    assert invoke("data", "import", str(table), *again)[0] == 0
    for command in (["evaluate", real, "again"], ["evaluate", public, "again", "--against", real]):
        code, _, err = invoke(*command)
        assert code == 2, command
        assert "images of ward" in one_sentence(err)
    assert invoke("evaluate", public, "again", "--images", "0")[0] == 0


# --- data sets of one's own -----------------------------------------------------------------------


def changed(**fields: Any) -> Any:
    """A function that gives `tiny` with fields of its training images exchanged."""

    def make(*, pixels: int = 16, seed: int = 0) -> ImageData:
        data = tiny(pixels=pixels, seed=seed)
        made = {k: v(getattr(data.train, k)) for k, v in fields.items()}
        return replace(data, train=replace(data.train, **made))

    return make


def missing(*, pixels: int = 16, seed: int = 0) -> ImageData:
    Path("/no/such/place/images.npy").read_bytes()
    raise AssertionError


def in_lines(*, pixels: int = 16, seed: int = 0) -> ImageData:
    raise KeyError("first\nsecond")


def mixed_sides(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = tiny(pixels=pixels, seed=seed)
    return replace(data, test=tiny(pixels=2 * pixels, seed=seed).test)


def one_class(*, pixels: int = 16, seed: int = 0) -> ImageData:
    data = tiny(pixels=pixels, seed=seed)
    alike = {
        split: replace(images, labels=np.zeros_like(images.labels))
        for split, images in data.splits()
    }
    return replace(data, classes=("all",), **alike)


def ragged(pixels: np.ndarray) -> np.ndarray:
    found = np.empty(len(pixels), dtype=object)
    for i, image in enumerate(pixels):
        found[i] = image[: 8 + i % 2]
    return found


OWN: dict[str, tuple[Any, str]] = {
    "floats": (changed(pixels=lambda p: p.astype(np.float32) / 255), "uint8"),
    "channels_first": (
        changed(pixels=lambda p: p.transpose(0, 3, 1, 2).copy()),
        "colors come last",
    ),
    "gray": (changed(pixels=lambda p: p[..., 0].copy()), "(N, H, W, 3)"),
    "lists": (changed(pixels=lambda p: p.tolist()), "numpy array"),
    "ragged": (changed(pixels=ragged), "object"),
    "not_square": (changed(pixels=lambda p: p[:, :8].copy()), "8×16"),
    "fewer_labels": (changed(labels=lambda v: v[:-1]), "(150,)"),
    "fewer_groups": (changed(groups=lambda v: v[:-1]), "groups"),
    "half_labels": (changed(labels=lambda v: v + 0.5), "int64"),
    "named_labels": (changed(labels=lambda v: v.astype(str)), "int64"),
    "too_high": (changed(labels=lambda v: v + 1), "1 to 3"),
    "negative": (changed(labels=lambda v: v - 1), "-1 to 1"),
    "numbers_as_ids": (changed(ids=lambda v: np.arange(len(v))), "ids"),
    "other_side": (lambda *, pixels=16, seed=0: tiny(pixels=32, seed=seed), "32 pixels"),
    "mixed_sides": (mixed_sides, "test images of 32 pixels"),
    "missing": (missing, "/no/such/place/images.npy"),
    "in_lines": (in_lines, "KeyError"),
    "nothing": (lambda *, pixels=16, seed=0: None, "NoneType"),
    "a_tuple": (lambda *, pixels=16, seed=0: (1, 2), "tuple"),
    "needs_more": (lambda folder, *, pixels=16, seed=0: tiny(), "folder"),
    "no_seed": (lambda *, pixels=16: tiny(pixels=pixels), "'seed'"),
    "class_list": (
        lambda *, pixels=16, seed=0: replace(tiny(), classes=["a", "b", "c"]),
        "tuple",
    ),
    "same_classes": (
        lambda *, pixels=16, seed=0: replace(tiny(), classes=("a", "b", "b")),
        "different names",
    ),
    "no_images": (lambda *, pixels=16, seed=0: replace(tiny(), test=None), "test must be Images"),
    "one_class": (one_class, "1 class"),
}


@pytest.fixture
def own_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_sets")
    for name, (function, _) in OWN.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "own_sets", module)


@pytest.mark.parametrize("name", OWN)
def test_an_own_data_set_that_is_none_is_refused_before_a_charge(
    tmp_path: Path, invoke: Invoke, own_sets: None, name: str
) -> None:
    site_dir = tmp_path / "site"
    create(site_dir / "ledger.sqlite", Terms("ward 7", "record", 30.0, 1e-2, simulated=True))
    out = tmp_path / "run"
    asked = words(data=f"own_sets:{name}", unit="record", sites=[str(site_dir)])
    code, _, err = invoke("run", *asked, "--out", str(out))
    assert code == 2
    one_sentence(err)
    assert f"own_sets:{name}" in err
    assert OWN[name][1] in err
    assert not out.exists()
    assert not runs_of(read_rows(site_dir / "ledger.sqlite"))
    assert invoke("data", "show", f"own_sets:{name}", "--pixels", "16")[0] == 2


@pytest.mark.parametrize(
    "method", ["fl", "fl-dp", "xcal-steered", "xcal-paper", "agp", "centralized"]
)
def test_one_class_is_refused_for_every_method(
    tmp_path: Path, invoke: Invoke, own_sets: None, method: str
) -> None:
    asked = words(data="own_sets:one_class", method=method, unit="record")
    code, _, err = invoke("run", *asked, "--out", str(tmp_path / "run"))
    assert code == 2
    assert "1 class" in one_sentence(err)
    assert "signal" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def load(:\n", "SyntaxError"),
        ("open('/no/such/table.csv')\n", "/no/such/table.csv"),
        ("import no_such_package\n", "no_such_package"),
        ("load = 3\n", "not a function"),
        ("", "load"),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "broken_ward.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_ward", raising=False)
    code, _, err = invoke("run", *words(data="broken_ward:load"), "--out", str(tmp_path / "run"))
    assert code == 2
    assert said in one_sentence(err)
    monkeypatch.delitem(sys.modules, "broken_ward", raising=False)


def test_the_example_of_the_docs_trains(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    (tmp_path / "docs_ward.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "run"
    assert invoke("run", *words(data="docs_ward:load"), "--out", str(out))[0] == 0
    assert json.loads((out / "result.json").read_text())["unit"] == "group"
    for kind in (ImageData, Images):  # every field is told
        for field in kind.__dataclass_fields__:
            assert f"`{field}`" in page, field
