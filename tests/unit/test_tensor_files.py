"""Files of tensors: what was written, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from xcal.federation.files import read_tensors, write_tensors

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "c": torch.tensor(7)}
ABOUT = {"round": 3, "request": "abc", "report": {"units": 5}}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, ABOUT)
    found = read_tensors(path)
    assert found is not None
    tensors, about = found
    assert about == ABOUT
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[k], TENSORS[k]) for k in TENSORS)


def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    """A damaged reply or checkpoint would else be sent, or trained on, as if it were whole."""
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, ABOUT)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            broken = bytearray(whole)
            broken[place] ^= 1 << bit
            path.write_bytes(broken)
            found = read_tensors(path)
            if found is not None:  # the sum's own name, or white space: nothing that counts
                assert {key: found[1][key] for key in ABOUT} == ABOUT, (place, bit)
                assert all(torch.equal(found[0][k], TENSORS[k]) for k in TENSORS), (place, bit)


def test_files_of_before_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path, {"about": json.dumps(ABOUT)})
    found = read_tensors(path)
    assert found is not None and found[1] == ABOUT
