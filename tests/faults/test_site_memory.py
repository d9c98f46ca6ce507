"""A site's own files lost, put back, mixed up or in the way: nothing unpaid or paid twice."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from made_sites import tiny_site
from support import TINY
from wire import a_request, ask, changed, real
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation import memory
from xcal.federation.answer import answer
from xcal.federation.files import write_tensors
from xcal.federation.loaded_site import Pace
from xcal.federation.messages import Refusal, Reply, encode_request
from xcal.federation.site_check import check_site
from xcal.federation.site_directory import SiteDirectory, log_refusal
from xcal.methods.registry import method_of


@pytest.fixture
def site_dir(tmp_path: Path) -> Path:
    return real(tiny_site(tmp_path))


def paid(site_dir: Path) -> int:
    rows = read_rows(site_dir / "ledger.sqlite")
    return sum(len(charges_of(rows, run)) for run in runs_of(rows))


def code(found: Reply | Refusal) -> str:
    return found.code if isinstance(found, Refusal) else "answered"


def problems(site_dir: Path) -> list[str]:
    return [f.text for f in check_site(SiteDirectory.open(site_dir)) if f.level == "problem"]


class Cut(BaseException):
    """The client dies here."""


def cut_off(site_dir: Path, after: int = 2, **keys: Any) -> None:
    """A request whose client dies after some steps."""
    made = 0

    def on_step(_: int) -> None:
        nonlocal made
        made += 1
        if made == after:
            raise Cut

    with pytest.raises(Cut):
        answer(site_dir, encode_request(changed(**keys)), on_step)


@pytest.fixture
def saving_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "due", lambda self: True)


@pytest.mark.parametrize("name", ["ledger.seen", "ledger.seen.new", "answered.json"])
def test_no_run_has_a_name_that_is_in_the_way(site_dir: Path, name: str) -> None:
    assert code(ask(site_dir, a_request(run=name))) == "answered"
    assert code(ask(site_dir, a_request(run="another"))) == "answered"
    assert problems(site_dir) == []


def test_an_older_ledger_put_back_is_refused_and_told_beforehand(site_dir: Path) -> None:
    older = {p.name: p.read_bytes() for p in site_dir.glob("ledger.*") if p.is_file()}
    assert code(ask(site_dir, a_request())) == "answered"
    for name, content in older.items():
        (site_dir / name).write_bytes(content)
    assert code(ask(site_dir, a_request(run="another"))) == "ledger-older"
    assert "older than what this site remembers" in problems(site_dir)[0]


def test_a_site_of_before_keeps_what_it_remembers(site_dir: Path) -> None:
    """Where the newest head was kept before, it is still found."""
    assert code(ask(site_dir, a_request())) == "answered"
    (site_dir / "answered.json").rename(site_dir / "runs" / "ledger.seen")
    older = real(tiny_site(site_dir.parent / "other"))
    shutil.copy(older / "ledger.sqlite", site_dir / "ledger.sqlite")
    shutil.copy(older / "ledger.head", site_dir / "ledger.head")
    assert code(ask(site_dir, a_request(run="another"))) == "ledger-older"


def test_an_older_answer_put_back_does_not_open_its_rounds_again(site_dir: Path) -> None:
    first = ask(site_dir, a_request())
    assert isinstance(first, Reply) and first.answer.weights is not None
    (reply,) = site_dir.glob("runs/trial/reply.safetensors")
    kept = reply.read_bytes()
    second = a_request(round=1, weights=first.answer.weights)
    assert code(ask(site_dir, second)) == "answered"
    before = paid(site_dir)
    reply.write_bytes(kept)
    moved = {k: v + 1 for k, v in first.answer.weights.items()}
    assert code(ask(site_dir, replace(second, weights=moved))) == "site"
    assert paid(site_dir) == before


def test_the_answer_of_another_run_is_refused(site_dir: Path) -> None:
    assert code(ask(site_dir, a_request())) == "answered"
    assert code(ask(site_dir, a_request(run="another"))) == "answered"
    replies = {p.parent.name: p for p in site_dir.glob("runs/*/reply.safetensors")}
    shutil.copy(replies["another"], replies["trial"])
    assert code(ask(site_dir, a_request())) == "site"
    assert "another run" in SiteDirectory.open(site_dir).refusals()[-1]["detail"]


def test_a_damaged_answer_is_refused_and_told_beforehand(site_dir: Path) -> None:
    assert code(ask(site_dir, a_request())) == "answered"
    (reply,) = site_dir.glob("runs/*/reply.safetensors")
    content = bytearray(reply.read_bytes())
    content[-5] ^= 1
    reply.write_bytes(content)
    before = paid(site_dir)
    assert code(ask(site_dir, a_request())) == "site"
    assert paid(site_dir) == before
    assert "is damaged" in problems(site_dir)[0]


@pytest.mark.parametrize("content", ["{}", "[]", '{"round": "x"}', "no"])
def test_a_damaged_note_of_what_was_begun(site_dir: Path, content: str) -> None:
    assert code(ask(site_dir, a_request())) == "answered"
    (begun,) = site_dir.glob("runs/*/begun.json")
    begun.write_text(content)
    first = ask(site_dir, a_request())
    assert isinstance(first, Reply) and first.answer.weights is not None
    before = paid(site_dir)
    assert code(ask(site_dir, a_request(round=1, weights=first.answer.weights))) == "site"
    assert paid(site_dir) == before


@pytest.mark.usefixtures("saving_every_step")
def test_progress_of_another_experiment_is_none(site_dir: Path) -> None:
    """State of another optimizer must not break a step that is paid for."""
    cut_off(site_dir, optimizer="momentum")
    before = paid(site_dir)
    assert code(ask(site_dir, changed(optimizer="adam"))) == "answered"
    steps = 3  # ⌈51 units / 17⌉ of one round
    assert paid(site_dir) - before >= steps


@pytest.mark.usefixtures("saving_every_step")
def test_progress_is_taken_up(site_dir: Path) -> None:
    cut_off(site_dir)
    before = paid(site_dir)
    found = ask(site_dir, a_request())
    assert isinstance(found, Reply)
    assert paid(site_dir) - before == len(found.answer.trace) - 1  # one of two steps had been saved


@pytest.mark.usefixtures("saving_every_step")
@pytest.mark.parametrize("what", ["nan", "keys", "names"])
def test_progress_that_cannot_be_used_is_none(site_dir: Path, what: str) -> None:
    cut_off(site_dir)
    (progress,) = site_dir.glob("runs/*/progress.safetensors")
    found = memory.read_tensors(progress)
    assert found is not None
    tensors, about = found
    if what == "nan":
        tensors = {k: torch.full_like(v, float("nan")) for k, v in tensors.items()}
    elif what == "keys":
        about = {k: v for k, v in about.items() if k != "trace"}
    else:
        tensors = {f"{k}x": v for k, v in tensors.items()}
    write_tensors(progress, tensors, about)
    assert code(ask(site_dir, a_request())) == "answered"


@pytest.mark.usefixtures("saving_every_step")
def test_no_room_for_progress_costs_nothing(
    site_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = memory.write_tensors

    def full(path: Path, *words: Any, **more: Any) -> None:
        if path.name == "progress.safetensors":
            raise UserError(f"{path} could not be written: No space left on device.")
        write(path, *words, **more)

    monkeypatch.setattr(memory, "write_tensors", full)
    found = ask(site_dir, a_request())
    assert isinstance(found, Reply)
    assert paid(site_dir) == len(found.answer.trace)


def test_no_room_for_the_answer_is_told_before_anything_is_paid(
    site_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(3):
        assert code(ask(site_dir, a_request())) == "site"
    assert paid(site_dir) == 0
    assert "No space left" in SiteDirectory.open(site_dir).refusals()[-1]["detail"]
    monkeypatch.undo()
    assert code(ask(site_dir, a_request())) == "answered"
    assert not list(site_dir.glob("runs/*/room"))


@pytest.mark.parametrize("keys", [{"w": 0.0}, {"kappa": 0.01}, {}], ids=str)
def test_a_floor_that_the_first_step_would_break_reserves_nothing(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    experiment = make_experiment({**TINY, "method": "xcal-steered", **keys})
    plan = method_of(experiment).plan(experiment, 51, 3)
    assert plan is not None
    for factor, answered in ((1.001, False), (0.999, True)):
        floor = plan.sigma_joint_min * factor
        site_dir = real(tiny_site(tmp_path / str(factor), sigma_min=floor))
        found = code(ask(site_dir, changed(**keys)))
        assert found in ("answered", "sigma-too-low")
        if not answered:
            assert found == "sigma-too-low"
            assert runs_of(read_rows(site_dir / "ledger.sqlite")) == {}
        else:  # the first step is within; later ones may not be, and that is told then
            assert paid(site_dir) > 0


def test_the_owner_limits_the_batch(tmp_path: Path) -> None:
    site_dir = real(tiny_site(tmp_path, max_batch=8))
    assert code(ask(site_dir, changed(expected_batch_size=9))) == "batch-too-large"
    assert code(ask(site_dir, changed(expected_batch_size=8))) == "answered"


def test_weights_of_a_foreign_type(site_dir: Path) -> None:
    weights = {k: v.to(torch.bfloat16) for k, v in a_request().weights.items()}
    request = encode_request(a_request())
    header = json.loads(request[8 : 8 + int.from_bytes(request[:8], "little")])
    from safetensors.torch import save

    message = save(weights, header["__metadata__"])
    assert code(ask(site_dir, message)) == "weights-mismatch"


def test_a_clock_that_was_wrong_has_a_remedy(site_dir: Path) -> None:
    head = site_dir / "ledger.head"
    future = head.stat().st_mtime + 10 * 86400
    os.utime(head, (future, future))
    assert code(ask(site_dir, a_request())) == "ledger"
    (told,) = problems(site_dir)
    assert f"touch {head}" in told
    head.touch()
    assert problems(site_dir) == []
    assert code(ask(site_dir, a_request())) == "answered"


def test_refusals_are_read_whatever_a_crash_left(site_dir: Path) -> None:
    log = site_dir / "refusals.jsonl"
    log_refusal(site_dir, "data", "the first")
    with open(log, "ab") as file:
        file.write(b'{"time": "2026-01-01T00:00:00Z", "co')
    log_refusal(site_dir, "data", "glued to it")
    with open(log, "ab") as file:
        file.write(b'{"other": 1}\n\xff\xfe\n[]\n')
    log_refusal(site_dir, "internal", "x" * 5000 + " the last words")
    found = SiteDirectory.open(site_dir).refusals()
    assert found[0]["detail"] == "the first"
    assert found[-1]["detail"].endswith("the last words")
    assert len(found[-1]["detail"]) < 2100
