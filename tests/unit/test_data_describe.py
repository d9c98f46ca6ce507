"""What `data show` tells."""

from __future__ import annotations

import numpy as np
from PIL import Image

from xcal.data.catalog import show_dataset
from xcal.data.importing import import_dataset


def test_smear_is_described_with_its_patients():
    shown = show_dataset("smear", pixels=16, seed=0, train=60, validation=12, test=12)
    assert "The 60 training images come from 10 patients, up to 6 from one" in shown.to_text()
    assert list(shown.splits["train"].per_class) == [15, 15, 15, 15]
    assert shown.data.group_name == "patient"


def test_an_imported_set_tells_where_it_came_from(tmp_path, monkeypatch):
    monkeypatch.setenv("XCAL_HOME", str(tmp_path / "site"))
    for cls in ("ill", "well"):
        (tmp_path / "set" / cls).mkdir(parents=True)
        for i in range(20):
            image = Image.fromarray(np.full((9, 12), 10 * i, np.uint8))
            image.save(tmp_path / "set" / cls / f"{i}.png")
    (tmp_path / "set" / "ill" / "empty.png").write_bytes(b"")
    import_dataset(tmp_path / "set", name="x", pixels=8, skip_bad=True)
    shown = show_dataset("x")
    text = shown.to_text()
    assert "12×9 (40)" in text
    assert "1 files could not be used" in text
    assert "not known to belong together" in text
    assert shown.info is not None and dict(shown.info.skipped) == {
        "ill/empty.png": "is empty (0 bytes)"
    }
    assert [len(line) for line in text.splitlines() if line.startswith(("ill", "well"))] == [48, 48]
