"""DICOM files, made on the spot: window, photometric interpretation, patients as groups."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from scans import RAMP, dicom
from xcal.data.catalog import load
from xcal.data.importing import BadFilesError, import_dataset
from xcal.data.source_files import BadFile
from xcal.errors import UserError


@pytest.fixture(autouse=True)
def site_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "site"))


def seen(data: bytes, pixels: int = 16) -> np.ndarray:
    from xcal.data.decode import decode_dicom

    return decode_dicom(data, pixels)[0]


def test_without_a_window_the_whole_range_is_shown():
    image = seen(dicom(RAMP))
    assert image.shape == (16, 16, 3)
    assert (image[0, 0, 0], image[0, -1, 0]) == (0, 255)
    assert (np.diff(image[0, :, 0].astype(int)) > 0).all()


def test_the_first_window_is_applied():
    image = seen(dicom(RAMP, WindowCenter=[1000.5, 9], WindowWidth=[1001, 9]))
    values = RAMP[0]
    assert (image[0, values <= 500, 0] == 0).all()
    assert (image[0, values >= 1500, 0] == 255).all()
    middle = image[0, (values > 500) & (values < 1500), 0]
    expected = (values[(values > 500) & (values < 1500)] - 500) / 1000 * 255
    assert np.abs(middle - expected).max() <= 1


def test_monochrome1_is_shown_inverted():
    plain, inverted = seen(dicom(RAMP)), seen(dicom(RAMP, PhotometricInterpretation="MONOCHROME1"))
    assert np.array_equal(inverted, 255 - plain)


def test_rescaling_comes_before_the_window():
    hounsfield = RAMP.astype(np.int16)
    tags = {"RescaleSlope": 2, "RescaleIntercept": -1000}
    window = {"WindowCenter": 1000.5, "WindowWidth": 1001}
    image = seen(dicom(hounsfield, **tags, **window))
    values = RAMP[0].astype(float) * 2 - 1000
    assert (image[0, values <= 500, 0] == 0).all()
    assert (image[0, values >= 1500, 0] == 255).all()


def test_color_is_kept():
    colors = np.zeros((16, 16, 3), np.uint8)
    colors[..., 0] = 200
    assert (seen(dicom(colors)) == colors).all()


def test_what_is_not_dicom_is_a_bad_file():
    pytest.importorskip("pydicom", reason="the extra 'dicom' is not installed")
    for data in (b"no dicom", dicom(RAMP)[:400], dicom(RAMP, Rows=1000)):
        with pytest.raises(BadFile):
            seen(data)
    with pytest.raises(BadFile, match="too large"):
        seen(dicom(RAMP, Rows=60000, Columns=60000))


def test_patients_of_a_folder_stay_together(tmp_path):
    for number, cls in enumerate(("ill", "well")):
        (tmp_path / "set" / cls).mkdir(parents=True)
        for i in range(30):
            data = dicom(RAMP + i, patient=f"{number}-{i // 3}")
            (tmp_path / "set" / cls / f"{i}.dcm").write_bytes(data)
    info = import_dataset(tmp_path / "set", name="scans", pixels=16).info
    assert info.group_name == "patient"
    assert sum(counts.groups for counts in info.splits.values()) == 20
    splits = [set(images.groups.tolist()) for _, images in load("scans").splits()]
    assert not (splits[0] & splits[1] or splits[0] & splits[2] or splits[1] & splits[2])
    (tmp_path / "set" / "ill" / "x.dcm").write_bytes(b"no dicom at all")
    with pytest.raises(BadFilesError, match=r"ill/x\.dcm is named as DICOM"):
        import_dataset(tmp_path / "set", name="other", pixels=16)


def test_without_the_extra_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    for cls in ("a", "b"):
        (tmp_path / "set" / cls).mkdir(parents=True)
        (tmp_path / "set" / cls / "1.dcm").write_bytes(b"x" * 200)
    with pytest.raises(UserError, match=r"whl\[dicom\]"):
        import_dataset(tmp_path / "set", pixels=16)
