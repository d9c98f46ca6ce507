"""Explanations of single images: what is found, what is computed, what is drawn."""

from __future__ import annotations

import base64
import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from support import TINY, micro, tiny
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.explain.choosing import asked_for
from xcal.explain.road import RoadSettings
from xcal.report.drawing import explanations_page, save_explanation, tile_side, where_in_words
from xcal.report.explaining import Explanation, Picture, explain_pictures, file_names, find_pictures
from xcal.report.runs import LoadedRun


@pytest.fixture
def run() -> LoadedRun:
    """A network that was never trained explains as well as any."""
    return LoadedRun(make_experiment(TINY), micro(3).eval(), ("left", "middle", "right"))


@pytest.fixture
def broken(run: LoadedRun) -> LoadedRun:
    with torch.no_grad():
        run.model.head.weight.fill_(float("nan"))  # type: ignore[union-attr, operator]
    return run


def write_png(path: Path, color: tuple[int, int, int] = (200, 30, 60)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), color).save(path)
    return path


# what is to be explained


def test_test_images_are_named_by_id_or_by_place(run: LoadedRun) -> None:
    by_place, by_id = find_pictures(run, ["test:7", "test:secret-test-7"])
    assert by_place.name == by_id.name == "secret-test-7"
    assert np.array_equal(by_place.pixels, tiny().test.pixels[7])
    assert by_place.label == tiny().test.labels[7]
    for wrong in ("test:45", "test:-1", "test:²", "test:nobody", "test:"):
        with pytest.raises(UserError, match="from 0 to 44"):
            find_pictures(run, [wrong])


def test_files_and_folders_are_read_at_the_runs_size(run: LoadedRun, tmp_path: Path) -> None:
    write_png(tmp_path / "set" / "b.png")
    write_png(tmp_path / "set" / "deeper" / "a.jpg")
    (tmp_path / "set" / "notes.txt").write_text("not an image")
    found = find_pictures(run, [str(tmp_path / "set"), str(tmp_path / "set" / "b.png")])
    assert [p.name for p in found] == ["b.png", "deeper/a.jpg", "b.png"]
    assert all(p.pixels.shape == (16, 16, 3) and p.label is None for p in found)
    assert file_names(found) == [
        "b-explained.png",
        "deeper-a-explained.png",
        "b-explained-2.png",
    ]


def test_file_names_lead_nowhere_and_never_meet() -> None:
    pixels = np.zeros((16, 16, 3), np.uint8)
    names = ("../../etc/passwd", "A.png", "a.png", "…", "é" * 300, "x" * 300)
    found = file_names([Picture(name, pixels) for name in names])
    assert len({name.lower() for name in found}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.png", name) for name in found)


def test_what_cannot_be_read_is_named_in_one_sentence(run: LoadedRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("no image at all")
    (tmp_path / "cut.png").write_bytes(write_png(tmp_path / "whole.png").read_bytes()[:60])
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "broken.dcm").write_bytes(b"\0" * 200)
    (tmp_path / "mixed").mkdir()
    write_png(tmp_path / "mixed" / "good.png")
    (tmp_path / "mixed" / "bad.png").write_text("bad")
    for word, problem in (
        ("nowhere.png", "check the path"),
        ("empty", "holds no images"),
        ("zero.png", "is empty"),
        ("text.png", "not an image that can be recognized"),
        ("cut.png", "broken or truncated"),
        ("notes.txt", "not named as an image"),
        ("mixed", "bad.png"),
        ("broken.dcm", "DICOM"),
    ):
        with pytest.raises(UserError, match=problem) as raised:
            find_pictures(run, [str(tmp_path / word)])
        assert "\n" not in str(raised.value)


def test_a_dicom_file_without_ending_is_known_by_its_first_bytes(
    run: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)  # as if the extra were not there
    (tmp_path / "IM0001").write_bytes(b"\0" * 128 + b"DICM" + b"\0" * 64)
    with pytest.raises(UserError, match=r"\.whl\[dicom\]"):
        find_pictures(run, [str(tmp_path / "IM0001")])


def test_a_dicom_file_is_explained_with_its_extra(run: LoadedRun, tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom", reason="the extra 'dicom' is not installed")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    made = pydicom.dataset.Dataset()
    made.file_meta = meta
    made.SOPClassUID, made.SOPInstanceUID = (
        meta.MediaStorageSOPClassUID,
        meta.MediaStorageSOPInstanceUID,
    )
    made.PatientName = "Somebody"
    made.Rows = made.Columns = 20
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = 16
    made.HighBit, made.PixelRepresentation = 15, 0
    made.PixelData = (np.arange(400, dtype=np.uint16) * 9).tobytes()
    for name in ("xray.dcm", "IM0001"):  # with and without an ending
        pydicom.dcmwrite(tmp_path / name, made, enforce_file_format=True)
        (picture,) = find_pictures(run, [str(tmp_path / name)])
        assert picture.name == name and picture.pixels.shape == (16, 16, 3)
        html = page(run, explain_pictures(run, [picture]))
        assert name in html and "Somebody" not in html


# what is computed


def test_an_explanation_says_what_the_network_says(run: LoadedRun) -> None:
    pictures = find_pictures(run, ["test:0", "test:1"])
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    found = explain_pictures(run, pictures)
    tensors = torch.from_numpy(np.stack([p.pixels for p in pictures]))
    images = torch.stack([f.image for f in found])
    assert torch.allclose(images, tensors.permute(0, 3, 1, 2) / 255, atol=1e-6)
    for explained, picture in zip(found, pictures, strict=True):
        assert sum(explained.probabilities) == pytest.approx(1)
        assert explained.answer.confidence == max(explained.probabilities)
        assert explained.answer.name == run.classes[int(np.argmax(explained.probabilities))]
        assert explained.truth == run.classes[picture.label or 0]
        assert explained.right == (explained.truth == explained.answer.name)
        assert all(0 <= value <= 1 for value in explained.morf + explained.lerf)
        gap = np.mean(np.subtract(explained.lerf, explained.morf)) / 2
        assert explained.road == pytest.approx(gap)
    assert not any(module.training for module in run.model.modules())
    assert all(torch.equal(before[k], v) for k, v in run.model.state_dict().items())


def test_covering_takes_the_top_cells_and_no_others(run: LoadedRun) -> None:
    (found,) = explain_pictures(run, find_pictures(run, ["test:4"]))
    changed = (found.image - found.covered).abs().amax(dim=0) > 1e-6
    cells = changed.view(8, 2, 8, 2).amax(dim=(1, 3))  # maps of 8×8 on images of 16×16
    assert 0.2 <= found.covered_share <= 0.25
    assert found.saliency[cells].min() >= found.saliency[~cells].max() - 1e-6


def test_an_image_is_explained_alike_alone_and_in_company(run: LoadedRun) -> None:
    alone = explain_pictures(run, find_pictures(run, ["test:3"]))[0]
    company = explain_pictures(run, find_pictures(run, ["test:1", "test:3"]))[1]
    assert alone.morf == company.morf and alone.lerf == company.lerf


def test_other_maps_and_levels_can_be_chosen(run: LoadedRun) -> None:
    pictures = find_pictures(run, ["test:3"])
    settings = RoadSettings(levels=(10, 50))
    (found,) = explain_pictures(run, pictures, method="gradcam++", settings=settings)
    assert found.levels == (10, 50) and len(found.morf) == 2


def test_a_network_without_finite_answers_is_said_to_explain_nothing(
    broken: LoadedRun, tmp_path: Path
) -> None:
    (found,) = explain_pictures(broken, find_pictures(broken, ["test:0"]))
    assert found.answer.confidence == 0 and found.covered_share == 0
    assert "no finite answer" in found.notes[0]
    assert where_in_words(found) == "it highlights nothing"
    save_explanation(tmp_path / "broken.png", found)
    assert "no finite answer" in page(broken, [found])


def test_an_empty_map_is_said_to_be_one(run: LoadedRun) -> None:
    with torch.no_grad():
        run.model.head.weight.fill_(-1)  # type: ignore[union-attr, operator]
    (found,) = explain_pictures(run, find_pictures(run, ["test:0"]))
    assert "zero everywhere" in found.notes[0]
    assert torch.equal(found.covered, found.image)


# what is drawn


def page(run: LoadedRun, found: list[Explanation]) -> str:
    result = {"epsilon_target": 8.0, "delta": 1e-3}
    return explanations_page(run, found, asked_for("gradcam"), result)


class Reader(HTMLParser):
    """Collects what a browser would fetch, and whether every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.alts: list[str | None] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        for key in ("src", "href", "srcset", "action", "data"):
            if values.get(key):
                self.sources.append(str(values[key]))
        if tag == "img":
            self.alts.append(values.get("alt"))
        if tag not in ("img", "meta", "br", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_but_itself(run: LoadedRun) -> None:
    html = page(run, explain_pictures(run, find_pictures(run, ["test:0", "test:1"])))
    reader = Reader()
    reader.feed(html)
    assert not reader.open
    assert reader.sources and all(s.startswith("data:image/png;base64,") for s in reader.sources)
    for source in reader.sources:
        Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).verify()
    assert all(alt and len(alt) > 10 for alt in reader.alts)
    assert not re.search(r"https?:|url\(|@import|<script", html)
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html
    assert "ε = 8, δ = 0.001" in html and "not a medical device" in html


def test_names_from_outside_are_text_on_the_page(run: LoadedRun) -> None:
    pictures = [Picture('"><script>alert(1)</script>', tiny().test.pixels[0])]
    html = page(run, explain_pictures(run, pictures))
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "true class not known" in html


def test_a_picture_is_drawn_whatever_the_name(run: LoadedRun, tmp_path: Path) -> None:
    name = "Zelle ñ 细胞 " + "very long " * 60
    (found,) = explain_pictures(run, [Picture(name, tiny().test.pixels[0])])
    save_explanation(tmp_path / "one.png", found)
    with Image.open(tmp_path / "one.png") as drawn:
        assert drawn.width > 4 * tile_side(16)
        assert not drawn.info  # pixels and nothing else
    with pytest.raises(UserError, match="was not saved"):
        save_explanation(tmp_path / "nowhere" / "one.png", found)


def test_tiles_are_whole_multiples_of_the_image() -> None:
    assert [tile_side(p) for p in (16, 64, 128, 224, 512)] == [224, 256, 256, 224, 512]


def test_where_the_map_is_strongest_is_said_in_words(run: LoadedRun) -> None:
    (found,) = explain_pictures(run, find_pictures(run, ["test:0"]))
    saliency = torch.zeros(9, 9)
    for place, words in (
        ((0, 0), "at the upper left"),
        ((4, 4), "in the middle"),
        ((8, 4), "at the lower middle"),
        ((4, 8), "at the middle right"),
    ):
        marked = saliency.clone()
        marked[place] = 1
        object.__setattr__(found, "saliency", marked)
        assert where_in_words(found).endswith(words)
