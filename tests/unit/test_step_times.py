"""The benchmark's rows and table, on the smallest run there is."""

from __future__ import annotations

import json

import pytest

from peers import VARIANTS, run_bench, steps, write_results
from peers.results import quantities
from xcal.errors import UserError

KEYS = {"network", "pixels", "threads", "variant", "ratio_to_sgd", "q25", "q75", "memory_mb"}


@pytest.fixture(scope="module")
def rows():
    return run_bench(
        networks=["resnet18"],
        pixels=[32],
        threads=[1],
        variants=["sgd", "ours", "ours-secure-noise", "ours+full-signal", "ours+default-signal"],
        rounds=1,
        memory=False,
    )


def test_rows_have_their_keys_and_plain_sgd_is_one(rows):
    assert all(row.keys() >= KEYS for row in rows)
    assert [row["variant"] for row in rows] == [
        "sgd",
        "ours",
        "ours-secure-noise",
        "ours+full-signal",
        "ours+default-signal",
    ]
    assert rows[0]["ratio_to_sgd"] == rows[0]["q25"] == rows[0]["q75"] == 1.0
    assert all(row["q25"] <= row["ratio_to_sgd"] <= row["q75"] for row in rows)
    assert rows[2]["ratio_without_ahead"] > 0
    assert not any("reason" in row for row in rows)


def test_the_table_tells_where_it_comes_from(rows, tmp_path):
    path = write_results(rows, tmp_path, command="make bench")
    text = path.read_text(encoding="utf-8")
    for needed in ("commit", "torch", "machine", "make bench", "ours+full-signal"):
        assert needed in text
    stored = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert stored["rows"] == rows


def test_a_variant_that_cannot_run_is_a_row_of_nulls(monkeypatch, tmp_path):
    made = steps.make_step

    def failing(variant, setting):
        if variant == "vmap":
            raise ImportError("no such library\nand more")
        return made(variant, setting)

    monkeypatch.setattr(steps, "make_step", failing)
    rows = run_bench(
        networks=["resnet18"], pixels=[32], threads=[1], variants=["vmap"], rounds=1, memory=False
    )
    assert [row["variant"] for row in rows] == ["vmap"]
    assert rows[0]["ratio_to_sgd"] is rows[0]["q25"] is rows[0]["q75"] is None
    assert rows[0]["memory_mb"] is None
    assert rows[0]["reason"] == "ImportError: no such library"
    assert "no such library" in write_results(rows, tmp_path, command="").read_text("utf-8")


def test_quantities_come_from_rows():
    rows = [
        {"variant": v, "ratio_to_sgd": r, "ratio_to_ours": o, "memory_mb": m}
        for v, r, o, m in [
            ("sgd", 1.0, 0.83, 100.0),
            ("ours", 1.2, 1.0, 130.0),
            ("ours+full-signal", 1.6, 1.25, 1.0),
        ]
    ]
    assert quantities(rows) == ["1.20", None, "1.30", "25.0 %", None, None]


@pytest.mark.parametrize(
    "wrong",
    [
        {"networks": ["vgg"]},
        {"variants": ["magic"]},
        {"rounds": 0},
        {"threads": [0]},
        {"pixels": [8]},
    ],
)
def test_wrong_requests_are_refused(wrong):
    with pytest.raises(UserError):
        run_bench(**wrong)


def test_the_variants_are_the_published_ones():
    assert VARIANTS == (
        "sgd",
        "ours",
        "ours-secure-noise",
        "opacus-hooks",
        "opacus-ghost",
        "vmap",
        "ours+naive-signal",
        "ours+full-signal",
        "ours+default-signal",
    )
