"""Each layout that can be imported, from small generated sets."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xcal.data import image_store as store
from xcal.data.catalog import load
from xcal.data.folders import blood_cell_pictures
from xcal.data.importing import import_dataset
from xcal.errors import UserError


@pytest.fixture(autouse=True)
def site_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "site"))
    return tmp_path / "site"


def picture(value: int = 120, size: tuple[int, int] = (20, 12), kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(value)
    pixels = np.clip(rng.normal(value, 8, (size[1], size[0], 3)), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format=kind)
    return out.getvalue()


def write(root: Path, files: dict[str, bytes], as_zip: bool) -> Path:
    """The files as a folder or as a zip; both must be read alike."""
    if as_zip:
        path = root / "set.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return path
    path = root / "set"
    for name, data in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return path


def assert_pure(name: str) -> None:
    """No group stands in two splits."""
    seen: set[int] = set()
    for _, images in load(name).splits():
        groups = set(images.groups.tolist())
        assert not seen & groups
        seen |= groups


def files_of_pictures(split: str, cell: str) -> dict[int, list[str]]:
    """The official files of a folder by the picture they are copies of."""
    found: dict[int, list[str]] = {}
    for file, number in blood_cell_pictures().items():
        if file.startswith(f"{split}/{cell}/"):
            found.setdefault(number, []).append(file)
    return found


CELLS = ("EOSINOPHIL", "LYMPHOCYTE", "MONOCYTE", "NEUTROPHIL")


def blood_cells() -> dict[str, bytes]:
    """A part of the official set: of every class three copies of ten pictures, one test file."""
    files = {}
    for number, cell in enumerate(CELLS):
        jpeg = picture(60 * number + 30, (32, 24), "JPEG")
        tested = files_of_pictures("TEST", cell)
        trained = files_of_pictures("TRAIN", cell)
        for source in [n for n in trained if n not in tested][:10]:
            for file in trained[source][:3]:
                files[f"d/d/images/{file}"] = jpeg
        files[f"d/d/images/{min(tested.values())[0]}"] = jpeg
        files[f"d/d/images/TEST_SIMPLE/{cell}/_0_78.jpeg"] = jpeg
    return files


@pytest.mark.parametrize("as_zip", [True, False])
def test_blood_cells(tmp_path, as_zip):
    info = import_dataset(write(tmp_path, blood_cells(), as_zip), pixels=16).info
    assert (info.name, info.kind, info.group_name) == ("blood-cells", "blood-cells", "picture")
    assert info.classes == ("eosinophil", "lymphocyte", "monocyte", "neutrophil")
    train, validation, test = (info.splits[s] for s in ("train", "validation", "test"))
    assert train.images + validation.images == 120
    assert train.groups + validation.groups == 40
    assert validation.per_class == (3, 3, 3, 3)
    assert (test.images, test.groups) == (4, 4)
    assert train.largest_group == 3
    assert any("TEST_SIMPLE" in note for note in info.notes)
    assert not any("left out" in note for note in info.notes)
    data = load("blood-cells")
    assert not any("SIMPLE" in i for _, images in data.splits() for i in images.ids)
    assert_pure("blood-cells")
    # Files of one group are copies of one picture, and of no other group.
    picture_of = blood_cell_pictures()
    pairs = {
        (int(group), picture_of[str(name).removeprefix("d/d/images/")])
        for _, images in data.splits()
        for group, name in zip(images.groups, images.ids, strict=True)
    }
    assert len(pairs) == len({g for g, _ in pairs}) == len({n for _, n in pairs}) == 44


def test_blood_cells_as_shipped_are_records_of_their_own(tmp_path):
    files = blood_cells()
    kind = "blood-cells-as-shipped"
    info = import_dataset(write(tmp_path, files, True), pixels=16, kind=kind).info
    assert (info.name, info.kind, info.group_name) == (kind, kind, "record")
    train, validation, test = (info.splits[s] for s in ("train", "validation", "test"))
    assert train.images + validation.images == train.groups + validation.groups == 120
    assert test.images == test.groups == 4
    assert not load(kind).groups_known  # so that a promise for a whole picture is refused
    assert any("Copies of one picture" in note for note in info.notes)


def test_training_copies_of_tested_blood_cells_are_left_out(tmp_path):
    files = blood_cells()
    torn = [
        name
        for cell in CELLS
        for number, names in files_of_pictures("TRAIN", cell).items()
        if number in files_of_pictures("TEST", cell)
        for name in names[:4]
    ]
    assert torn
    # Whether the copies in TEST are in the given part of the set makes no difference.
    files |= {f"d/d/images/{name}": picture(90, (32, 24), "JPEG") for name in torn}
    info = import_dataset(write(tmp_path, files, True), pixels=16).info
    assert info.splits["train"].images + info.splits["validation"].images == 120
    pictures = len({blood_cell_pictures()[name] for name in torn})
    assert (
        f"TRAIN: {len(torn)} more files are left out, as their {pictures} pictures have copies "
        "in TEST." in info.notes
    )
    assert not any(str(i).endswith(tuple(torn)) for i in load("blood-cells").train.ids)


def test_blood_cells_of_no_known_picture_are_refused(tmp_path):
    files = {name: data for name, data in blood_cells().items() if "SIMPLE" not in name}
    files["d/d/images/TRAIN/MONOCYTE/_7_99999.jpeg"] = picture(kind="JPEG")
    path = write(tmp_path, files, True)
    with pytest.raises(
        UserError,
        match=r"pictures 1 of the files.*MONOCYTE/_7_99999\.jpeg is the first.*--kind folders",
    ):
        import_dataset(path, pixels=16)
    # Told that every file is a picture, it asks for no table.
    info = import_dataset(path, pixels=16, kind="folders").info
    assert info.group_name != "picture"


def test_blood_cells_grouped_by_file_numbers_are_made_anew(tmp_path):
    path = write(tmp_path, blood_cells(), True)
    new = import_dataset(path, pixels=16).info
    about = store.folder_of("blood-cells", 16) / "about.json"
    raw = json.loads(about.read_text())
    del raw["listing"]
    about.write_text(json.dumps(raw | {"key": "as before"}))
    with pytest.raises(UserError, match=r"took file numbers for pictures: .* xcal data import /"):
        load("blood-cells")
    again = import_dataset(path, pixels=16)
    assert not again.already_there
    assert again.info == new
    assert len(load("blood-cells").test) == 4


def test_older_sets_of_other_kinds_are_opened(tmp_path):
    path = write(tmp_path, chest_xray(), True)
    import_dataset(path, pixels=16)
    about = store.folder_of("chest-xray14", 16) / "about.json"
    raw = json.loads(about.read_text())
    assert raw.pop("listing") == 1
    about.write_text(json.dumps(raw))
    assert len(load("chest-xray14").train)
    assert import_dataset(path, pixels=16).already_there


def test_a_zip_and_its_folder_are_the_same_set(tmp_path):
    files = blood_cells()
    first = import_dataset(write(tmp_path, files, True), pixels=16)
    second = import_dataset(write(tmp_path, files, False), pixels=16)
    assert not first.already_there
    assert second.already_there
    assert first.info == second.info


def chest_xray(lists: bool = True) -> dict[str, bytes]:
    findings = ["No Finding", "Pneumonia", "Effusion|Pneumonia", "Mass"]
    rows, files = ["Image Index,Finding Labels,Patient ID"], {}
    names = []
    for patient in range(20):
        for visit in range(2):
            name = f"{patient:08d}_{visit:03d}.png"
            rows.append(f"{name},{findings[(patient + visit) % 4]},{patient}")
            files[f"images_00{visit}/images/{name}"] = picture(100 + patient)
            names.append(name)
    rows.append("99999999_000.png,Mass,99")
    files["Data_Entry_2017.csv"] = "\n".join(rows).encode()
    if lists:
        files["train_val_list.txt"] = "\n".join(names[:32]).encode()
        files["test_list.txt"] = "\n".join(names[32:]).encode()
    return files


@pytest.mark.parametrize(
    ("task", "classes", "positive"),
    [
        (None, ("no finding", "finding"), 30),
        ("pneumonia", ("no pneumonia", "pneumonia"), 20),
        ("Effusion", ("no effusion", "effusion"), 10),
    ],
)
def test_chest_xray(tmp_path, task, classes, positive):
    path = write(tmp_path, chest_xray(), True)
    info = import_dataset(path, pixels=16, task=task).info
    assert (info.kind, info.group_name, info.classes) == ("chest-xray14", "patient", classes)
    assert sum(counts.per_class[1] for counts in info.splits.values()) == positive
    assert info.splits["test"].images == 8
    assert info.splits["validation"].images > 0
    assert any("1 images" in note for note in info.notes)
    assert_pure("chest-xray14")


def test_an_unknown_finding_is_named_with_the_known_ones(tmp_path):
    path = write(tmp_path, chest_xray(), False)
    with pytest.raises(UserError, match="effusion, mass, pneumonia"):
        import_dataset(path, pixels=16, task="measles")


@pytest.mark.parametrize("as_zip", [True, False])
def test_ham10000_is_split_by_lesion(tmp_path, as_zip):
    rows, files = ["lesion_id,image_id,dx,dx_type"], {}
    for image in range(90):
        lesion = image // 3
        dx = ["nv", "mel", "bkl", "bcc", "akiec", "df"][lesion % 6]
        rows.append(f"HAM_{lesion:07d},ISIC_{image:07d},{dx},histo")
        files[f"HAM10000_images_part_{1 + image % 2}/ISIC_{image:07d}.jpg"] = picture(
            90 + image, kind="JPEG"
        )
    files["HAM10000_metadata.csv"] = "\r\n".join(rows).encode()
    info = import_dataset(write(tmp_path, files, as_zip), pixels=16).info
    assert (info.name, info.group_name, info.classes) == (
        "ham10000",
        "lesion",
        ("benign", "malignant"),
    )
    sizes = {split: counts.images for split, counts in info.splits.items()}
    assert sum(sizes.values()) == 90
    assert 6 <= sizes["test"] <= 12
    assert 6 <= sizes["validation"] <= 12
    assert sum(counts.per_class[1] for counts in info.splits.values()) == 45
    assert_pure("ham10000")
    by_diagnosis = import_dataset(
        write(tmp_path, files, as_zip), name="ham-7", pixels=16, task="diagnosis"
    )
    assert len(by_diagnosis.info.classes) == 6


@pytest.mark.parametrize("as_zip", [True, False])
def test_class_folders_with_splits(tmp_path, as_zip):
    files = {}
    for split, count in (("train", 10), ("test", 4)):
        for cls in ("benign", "malignant"):
            for i in range(count):
                files[f"melanoma/{split}/{cls}/{i}.jpg"] = picture(40 + i, kind="JPEG")
    files["melanoma/README.txt"] = b"about"
    info = import_dataset(write(tmp_path, files, as_zip), name="skin", pixels=16).info
    assert info.classes == ("benign", "malignant")
    assert info.group_name == "record"
    assert info.splits["train"].per_class == (9, 9)
    assert info.splits["validation"].per_class == (1, 1)
    assert info.splits["test"].per_class == (4, 4)
    assert any("1 files" in note for note in info.notes)


def test_class_folders_without_splits_are_cut_in_three(tmp_path):
    files = {f"{cls}/{i}.png": picture(i) for cls in ("cat", "dog", "eel") for i in range(20)}
    info = import_dataset(write(tmp_path, files, False), name="pets", pixels=16).info
    assert [info.splits[s].per_class for s in ("train", "validation", "test")] == [
        (16, 16, 16),
        (2, 2, 2),
        (2, 2, 2),
    ]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": b"x", "b.png": b"x"}, "no class folder"),
        ({"a/1.png": b"x", "a/2.png": b"x"}, "one class folder"),
        ({"readme.txt": b"x"}, "No image was found"),
        ({"train/a/1.png": b"x", "b/2.png": b"x"}, "in none"),
    ],
)
def test_folders_that_say_nothing_are_refused(tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        import_dataset(write(tmp_path, files, False), pixels=16)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_with_groups_and_splits(tmp_path, delimiter):
    rows = [["Path", "Label", "Patient_ID", "Split"]]
    files = {}
    for i in range(24):
        split = "test" if i >= 20 else "train"
        rows.append([f"img/{i}.png", "sick" if i % 2 else "well", f"p{i // 4}", split])
        files[f"img/{i}.png"] = picture(i)
    files["labels.csv"] = "\n".join(delimiter.join(row) for row in rows).encode("utf-8-sig")
    folder = write(tmp_path, files, False)
    for path in (folder, folder / "labels.csv"):
        info = import_dataset(path, name="table", pixels=16).info
        assert (info.kind, info.group_name, info.classes) == ("csv", "patient", ("sick", "well"))
        assert info.splits["test"].images == 4
        assert sum(counts.groups for counts in info.splits.values()) == 6
    assert_pure("table")


def test_a_csv_cannot_name_files_outside_its_folder(tmp_path):
    (tmp_path / "secret.png").write_bytes(picture())
    rows = "path,label\n../secret.png,a\nin/1.png,a\nin/2.png,b\nin/3.png,b\nin/4.png,a\n"
    files = {f"in/{i}.png": picture(i) for i in range(1, 5)} | {"t.csv": rows.encode()}
    folder = write(tmp_path, files, False)
    with pytest.raises(UserError, match=r"\.\./secret\.png is named in t\.csv but not there"):
        import_dataset(folder, name="t", pixels=16)
    info = import_dataset(folder, name="t", pixels=16, skip_bad=True).info
    assert [name for name, _ in info.skipped] == ["../secret.png"]


def npz(path: Path, channels: bool, labels: int = 1, side: int = 28, **extra: object) -> Path:
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 30), ("val", 6), ("test", 8)):
        shape = (n, side, side, 3) if channels else (n, side, side)
        arrays[f"{part}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{part}_labels"] = rng.integers(0, 2, (n, labels), dtype=np.uint8)
    arrays.update(extra)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize("pixels", [28, 64])
def test_medmnist(tmp_path, channels, pixels):
    path = npz(tmp_path / "pneumoniamnist.npz", channels)
    info = import_dataset(path, pixels=pixels).info
    assert info.classes == ("normal", "pneumonia")
    assert [counts.images for counts in info.splits.values()] == [30, 6, 8]
    data = load("pneumoniamnist")
    assert data.train.pixels.shape == (30, pixels, pixels, 3)
    if not channels:
        assert (data.train.pixels[..., 0] == data.train.pixels[..., 2]).all()
    if pixels == 28:
        with np.load(path) as original:
            stored = data.test.pixels if channels else data.test.pixels[..., 0]
            assert np.array_equal(stored, original["test_images"])


def test_medmnist_with_several_labels(tmp_path):
    path = npz(tmp_path / "chestmnist.npz", False, labels=14)
    assert import_dataset(path, name="any", pixels=28).info.classes == ("no finding", "finding")
    one = import_dataset(path, name="one", pixels=28, task="3").info
    with np.load(path) as original:
        assert one.splits["train"].per_class[1] == original["train_labels"][:, 3].sum()
    with pytest.raises(UserError, match="14 labels"):
        import_dataset(path, name="none", pixels=28, task="14")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"train_images": np.zeros((30, 28, 28, 28), np.uint8)}, "only 2D sets"),
        ({"train_images": np.zeros((30, 28, 28), np.float32)}, "only 2D sets"),
        ({"train_labels": np.zeros((29, 1), np.uint8)}, "do not fit"),
        ({"train_labels": np.array([object()] * 30)}, "cannot|can be read"),
    ],
)
def test_npz_files_of_another_shape_are_refused(tmp_path, extra, message):
    path = npz(tmp_path / "x.npz", False, **extra)
    with pytest.raises(UserError, match=message):
        import_dataset(path, pixels=28)


def test_an_npz_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"not a zip at all")
    with pytest.raises(UserError, match=r"not an \.npz file"):
        import_dataset(tmp_path / "x.npz", pixels=28)
    np.savez(tmp_path / "y.npz", a=np.zeros(3))
    with pytest.raises(UserError, match="not the MedMNIST format"):
        import_dataset(tmp_path / "y.npz", pixels=28)


def test_diagnoses_of_something_else_are_not_taken_for_skin(tmp_path):
    rows = ["image,diagnosis,patient_id"]
    rows += [f"{i}.png,{'covid' if i % 2 else 'healthy'},p{i}" for i in range(20)]
    files = {f"{i}.png": picture(i) for i in range(20)}
    files["metadata.csv"] = "\n".join(rows).encode()
    info = import_dataset(write(tmp_path, files, False), name="lungs", pixels=16).info
    assert (info.kind, info.classes) == ("csv", ("covid", "healthy"))


def test_a_table_beside_class_folders_that_is_none_of_theirs_is_ignored(tmp_path):
    files = {f"{cls}/{i}.png": picture(i) for cls in ("cat", "dog") for i in range(10)}
    files["notes.csv"] = "Größe;Wert\nä;1".encode("latin-1")
    files["empty.csv"] = b""
    info = import_dataset(write(tmp_path, files, True), name="pets", pixels=16).info
    assert info.kind == "folders"


def test_a_table_pointed_at_wins_over_what_lies_beside_it(tmp_path):
    files = chest_xray()
    names = [n for n in files if n.endswith(".png")]
    rows = ["path,label"] + [f"{n},{'left' if i % 2 else 'right'}" for i, n in enumerate(names)]
    files["sides.csv"] = "\n".join(rows).encode()
    folder = write(tmp_path, files, False)
    info = import_dataset(folder / "sides.csv", name="sides", pixels=16).info
    assert (info.kind, info.classes) == ("csv", ("left", "right"))
    assert import_dataset(folder, pixels=16).info.kind == "chest-xray14"
    entries = import_dataset(folder / "Data_Entry_2017.csv", name="again", pixels=16)
    assert entries.info.kind == "chest-xray14"
