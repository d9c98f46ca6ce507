"""Exact counts of held-out people above a floor: what leaves, what cannot be told from it, and who
says so. No guarantee covers them, so each of these tests is about what is withheld or written down.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import xcal
from inventory import INVENTORY
from made_sites import tiny_site
from support import TINY, tiny
from wire import a_request, real
from xcal.data.images import Images
from xcal.data.importing import import_dataset
from xcal.dp import refusals as engine_refusals
from xcal.dp.clipping.named import trainable
from xcal.dp.ledger.ledger import Ledger
from xcal.dp.ledger.rows import charges_of, read_rows, runs_of, verify
from xcal.errors import UserError
from xcal.experiments import make_experiment
from xcal.federation import local_evaluation
from xcal.federation.answer import answer
from xcal.federation.certificate import read_certificate
from xcal.federation.evaluation import Predictions
from xcal.federation.exact_counts import above, counts_sent, mean_f1, people_by_class, read_counts
from xcal.federation.folder import RunFolder
from xcal.federation.held_out import HeldOut
from xcal.federation.local import run_experiment
from xcal.federation.messages import (
    Disclosure,
    Refusal,
    Reply,
    Request,
    StatisticsRequest,
    decode_answer,
    encode_disclosure,
    encode_request,
    encode_statistics,
    frozen_digest,
    public_keys,
)
from xcal.federation.nvflare.dashboard import page
from xcal.federation.nvflare.observe import RunState, Snapshot
from xcal.federation.policy import Policy
from xcal.federation.request_refusals import Refused
from xcal.federation.setup import prepare_remote
from xcal.federation.site_directory import (
    SiteDirectory,
    SiteTable,
    _own_images,
    create_site,
)
from xcal.federation.surveys import tell_final
from xcal.models.model_registry import build_network

Invoke = Callable[..., tuple[int, str, str]]
People = Sequence[tuple[int, int]]  # of each person the true and the predicted class

FLOOR = {"evaluation_floor": 5}
NOISY = {"evaluation_epsilon": 2.0, "evaluation_delta": 1e-4}
# of class 0 seven are called 0, three 1 and none 2; and so on
PEOPLE = [(0, 0)] * 7 + [(0, 1)] * 3 + [(1, 1)] * 5 + [(1, 2)] * 4 + [(2, 2)] * 9 + [(2, 0)] * 6
COUNTS = (7, None, None, None, 5, None, 6, None, 9)


def told(site_dir: Path, message: bytes) -> Any:
    return decode_answer(answer(site_dir, message), 1 << 24)


def final_bytes(site_dir: Path, **changes: Any) -> bytes:
    return answer(site_dir, encode_request(a_request(round=3, final=True, **changes)))


def final(site_dir: Path, **changes: Any) -> Any:
    return decode_answer(final_bytes(site_dir, **changes), 1 << 24)


def trained(site_dir: Path, *runs: str) -> Path:
    for run in runs or ("trial",):
        assert isinstance(told(site_dir, encode_request(a_request(run=run))), Reply)
    return site_dir


def charges(site_dir: Path) -> dict[str, int]:
    rows = read_rows(site_dir / "ledger.sqlite")
    return {run: len(charges_of(rows, run)) for run in runs_of(rows)}


def events(site_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (site_dir / "log.jsonl").read_text().splitlines()]


def set_policy(site_dir: Path, **terms: Any) -> Path:
    path = site_dir / "policy.toml"
    kept = [x for x in path.read_text().splitlines() if x.split(" =")[0] not in terms]
    path.write_text("\n".join([*kept, *(f"{k} = {v}" for k, v in terms.items())]) + "\n")
    return site_dir


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> Callable[[People], None]:
    """Has every site hold out these people, one image each, and every model call them so."""

    def hold(people: People, *, apart: bool = True, who: str = "patient") -> None:
        true, said = np.array(people, dtype=np.int64).T
        count = len(people)
        images = Images(
            pixels=np.zeros((count, 16, 16, 3), dtype=np.uint8),
            labels=true,
            groups=50_000 + np.arange(count),
            ids=np.array([f"secret-{n}" for n in range(count)]),
        )
        held = HeldOut(
            images,
            ("left", "middle", "right"),
            who,
            apart,
            {},
            tiny(),
            people=apart and who == "patient",
        )
        predictions = Predictions(true, said, np.ones(count), np.eye(3)[said])
        monkeypatch.setattr(local_evaluation, "held_out", lambda *_: held)
        monkeypatch.setattr(local_evaluation, "predict", lambda *_, **__: predictions)

    return hold


# --- the owner's word -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "match"),
    [
        ({"evaluation_floor": 1}, "5 is the least"),
        ({"evaluation_floor": 4}, "5 is the least"),
        ({"evaluation_floor": -5}, "is not accepted"),
        ({"evaluation_floor": 5.5}, "is not accepted"),
        ({"evaluation_floor": 5, "evaluation_tables": 0}, "is not accepted"),
        ({**FLOOR, **NOISY}, "exclude each other"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_one_sentence(
    tmp_path: Path, terms: dict[str, Any], match: str
) -> None:
    site_dir = set_policy(tiny_site(tmp_path), **terms)
    with pytest.raises(UserError, match=match) as caught:
        SiteDirectory.open(site_dir)
    assert "\n" not in str(caught.value)
    assert told(site_dir, encode_request(a_request())) == Refusal("0", "site")


def test_who_opens_it_is_told(tmp_path: Path, invoke: Invoke, holds: Any) -> None:
    site_dir = tiny_site(tmp_path, **FLOOR)
    code, out, _ = invoke("site", "check", str(site_dir))
    assert code == 0 and "looser than recommended: evaluation_floor = 5" in out
    assert "whom no guarantee then covers" in out and "two exact tables" not in out
    assert "Without a charge" not in invoke("site", "show", str(site_dir))[1]
    holds(PEOPLE)
    final(trained(site_dir))
    shown = " ".join(invoke("site", "show", str(site_dir))[1].split())
    assert "exact counts of held-out people were sent for trial (floor 5): no guarantee" in shown
    out = invoke("site", "check", str(site_dir))[1]
    assert "for trial (floor 5)" in out and "evaluation_tables = 1 in policy.toml is used up" in out
    out = invoke("site", "check", str(set_policy(site_dir, evaluation_tables=2)))[1]
    assert "two exact tables" in out and "used up" not in out


# --- how a person is counted ----------------------------------------------------------------------


def test_each_person_is_counted_once() -> None:
    """By most of their images, and by what the model makes of those together."""
    labels = np.array([0, 1, 1, 2, 0, 0, 1])
    groups = np.array([7, 7, 7, 3, 5, 5, 5])
    probabilities = np.array(
        [
            [1.0, 0.0, 0.0],  # not one of most
            [0.0, 0.6, 0.4],
            [0.0, 0.3, 0.7],  # together 0.45 and 0.55
            [np.nan, np.nan, np.nan],  # a network without an answer: class 0
            [0.1, 0.9, 0.0],
            [0.8, 0.1, 0.1],  # together 0.45 and 0.5
            [0.0, 0.0, 1.0],
        ]
    )
    images = Images(np.zeros((7, 2, 2, 3), np.uint8), labels, groups, np.arange(7).astype(str))
    expected = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert people_by_class(images, probabilities, 3).tolist() == expected


def test_a_site_counts_its_own_held_out_people(tmp_path: Path) -> None:
    """As `tiny` has them, by a trained network, through the messages."""
    site_dir = real(tiny_site(tmp_path, **FLOOR))
    got = final(trained(site_dir))
    held = tiny().test
    assert isinstance(got, Disclosure) and got.counts is not None and got.floor == 5
    people = len(np.unique(held.groups))
    known = sum(c for c in got.counts if c is not None)
    assert known <= people <= known + 4 * got.counts.count(None)
    # Each has an image of every class: the first of them is theirs.
    assert got.counts[3:] == (None,) * 6 and known > 0


# --- what leaves ----------------------------------------------------------------------------------


def test_only_counts_from_the_floor_on_leave(tmp_path: Path, holds: Any) -> None:
    holds(PEOPLE)
    site_dir = trained(real(tiny_site(tmp_path, **FLOOR)))
    before = charges(site_dir)
    sent = final_bytes(site_dir)
    size = int.from_bytes(sent[:8], "little")
    fields = json.loads(json.loads(sent[8 : 8 + size])["__metadata__"]["xcal"])
    assert fields == {
        "format": 1,
        "version": fields["version"],
        "kind": "disclosure",
        "client": "0",
        "run": "trial",
        "tables": {},
        **dict.fromkeys(("noise", "epsilon", "delta")),
        "counts": list(COUNTS),
        "floor": 5,
    }
    assert len(sent) == 8 + size  # and no arrays
    logged = json.loads((site_dir / "messages.jsonl").read_text().splitlines()[-1])
    explained = {f.name for f in INVENTORY if f.is_in("disclosure")}
    assert {"counts", "floor"} <= set(logged["fields"]) <= explained
    assert charges(site_dir) == before  # nothing pays for it
    (one,) = counts_sent(site_dir)
    assert (one.run, one.floor, one.counts) == ("trial", 5, COUNTS)
    last = events(site_dir)[-1]
    assert (last["event"], last["exact_counts_from"]) == ("disclosed", 5)


@pytest.mark.parametrize(
    "hidden",
    [
        [(0, 2), (1, 0), (2, 1)],  # one person in every cell that was empty
        [(0, 2)] * 4 + [(1, 0)] * 4 + [(2, 1)] * 4,
        [],
    ],
)
def test_what_is_below_the_floor_cannot_be_told(
    tmp_path: Path, holds: Any, hidden: list[tuple[int, int]]
) -> None:
    """Sites whose people differ in such cells only send the same bytes."""
    seen = [p for p in PEOPLE if PEOPLE.count(p) >= 5]
    sent = []
    for number, people in enumerate((PEOPLE, seen + hidden, [*seen[1:], *hidden, seen[0]])):
        site_dir = trained(real(tiny_site(tmp_path / str(number), **FLOOR)))
        holds(people)
        sent.append(final_bytes(site_dir))
    assert sent[0] == sent[1] == sent[2]
    site_dir = trained(real(tiny_site(tmp_path / "one-more", **FLOOR)))
    holds([*PEOPLE, (0, 0)])
    assert final_bytes(site_dir) != sent[0]


def test_a_table_of_small_counts_says_nothing(tmp_path: Path, holds: Any) -> None:
    holds([(0, 0), (1, 1), (2, 0)])
    got = final(trained(tiny_site(tmp_path, **FLOOR)))
    assert got == Disclosure("0", "trial", {}, counts=(None,) * 9, floor=5)
    seen = read_counts(got, ("a", "b", "c"))
    assert (seen["accuracy"], seen["macro_f1"], seen["units"]) == (None, None, [0, 36])


# --- once a run -----------------------------------------------------------------------------------


def test_the_same_question_gets_what_was_sent(tmp_path: Path, holds: Any) -> None:
    site_dir = trained(tiny_site(tmp_path, **FLOOR))
    holds(PEOPLE)
    sent = final_bytes(site_dir)
    holds(PEOPLE[1:])  # other people by now: a difference would tell who came
    assert final_bytes(site_dir) == sent and len(counts_sent(site_dir)) == 1
    other = {k: v + 1 for k, v in a_request().weights.items()}
    assert final(site_dir, weights=other) == Refusal("0", "round-other-weights")
    set_policy(site_dir, evaluation_floor=6)
    assert final(site_dir) == Refusal("0", "round-other-weights")
    set_policy(site_dir, evaluation_floor=0)
    assert final(site_dir) == Disclosure("0", "trial", {})


def test_it_is_written_down_before_it_leaves(
    tmp_path: Path, holds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that dies between the two sends the same once it is back."""
    site_dir = trained(tiny_site(tmp_path, **FLOOR))
    holds(PEOPLE)

    class Killed(BaseException):
        pass

    def killed(_: Disclosure) -> bytes:
        raise Killed

    with monkeypatch.context() as there:
        there.setattr("xcal.federation.answer.encode_disclosure", killed)
        with pytest.raises(Killed):
            final_bytes(site_dir)
    assert counts_sent(site_dir)[0].counts == COUNTS
    holds(PEOPLE[1:])
    assert final(site_dir).counts == COUNTS


def test_what_cannot_be_written_down_is_not_sent(
    tmp_path: Path, holds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site_dir = trained(tiny_site(tmp_path, **FLOOR))
    holds(PEOPLE)

    def full(*_: object) -> None:
        raise UserError("The ledger could not be written: no space left on device.")

    with monkeypatch.context() as there:
        there.setattr(Ledger, "record_exact", full)
        assert final(site_dir) == Refusal("0", "ledger")
    assert counts_sent(site_dir) == []
    assert final(site_dir).counts == COUNTS


def test_further_runs_need_the_owners_word(tmp_path: Path, holds: Any) -> None:
    site_dir = trained(tiny_site(tmp_path, **FLOOR), "one", "two")
    holds(PEOPLE)
    assert final(site_dir, run="one").counts == COUNTS
    assert final(site_dir, run="two") == Disclosure("0", "two", {})
    assert [e["event"] for e in events(site_dir)[-2:]] == ["not-disclosed", "disclosed"]
    assert "evaluation_tables = 1" in events(site_dir)[-2]["detail"]
    assert final(site_dir, run="one").counts == COUNTS  # which was sent before
    set_policy(site_dir, evaluation_tables=2)
    assert final(site_dir, run="two").counts == COUNTS
    assert [one.run for one in counts_sent(site_dir)] == ["one", "two"]


@pytest.mark.parametrize(("first", "then"), [(FLOOR, NOISY), (NOISY, FLOOR)])
def test_a_run_has_one_table_whatever_the_policy_becomes(
    tmp_path: Path, holds: Any, first: dict[str, Any], then: dict[str, Any]
) -> None:
    site_dir = trained(tiny_site(tmp_path, **first))
    holds(PEOPLE)
    assert isinstance(final(site_dir), Disclosure)
    paid, sent = charges(site_dir), counts_sent(site_dir)
    set_policy(site_dir, **dict.fromkeys(first, 0), **then)
    assert final(site_dir) == Refusal("0", "round-other-weights")
    assert (charges(site_dir), counts_sent(site_dir)) == (paid, sent)


# --- what sets it off -----------------------------------------------------------------------------


def test_only_a_run_that_was_trained_here_sets_it_off(tmp_path: Path, holds: Any) -> None:
    site_dir = tiny_site(tmp_path, **FLOOR, statistics_epsilon=1.0, statistics_delta=1e-4)
    holds(PEOPLE)
    assert final(site_dir) == Refusal("0", "round-not-own")
    question = StatisticsRequest("0", "before", "record", 16, 3, 1.0, 1e-4)
    assert isinstance(told(site_dir, encode_statistics(question)), Disclosure)
    assert final(site_dir, run="before") == Refusal("0", "round-not-own")  # a cheap name of a run
    assert counts_sent(site_dir) == []


def test_people_who_may_be_trained_on_are_not_counted(
    tmp_path: Path, holds: Any, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    site_dir = trained(tiny_site(tmp_path, **FLOOR))
    with monkeypatch.context() as there:  # nobody says whose the images are
        data = tiny()
        there.setattr(SiteDirectory, "whole_set", lambda *_: replace(data, ungrouped_images=1))
        assert final(site_dir) == Refusal("0", "data")
        code, _, err = invoke("site", "check", str(site_dir))
        assert code == 1 and "--group-column" in err
    with monkeypatch.context() as there:  # a person on both sides
        test = replace(data.test, groups=data.test.groups - 20_000)
        there.setattr(SiteDirectory, "whole_set", lambda *_: replace(data, test=test))
        assert final(site_dir) == Refusal("0", "data")
    assert counts_sent(site_dir) == []
    assert [e["code"] for e in events(site_dir) if e["event"] == "refused"] == ["data", "data"]


def test_a_group_that_is_no_person_is_not_counted(tmp_path: Path, holds: Any) -> None:
    """A patient's second lesion may be trained on."""
    site_dir = trained(tiny_site(tmp_path, **FLOOR))
    holds(PEOPLE, who="lesion")
    assert final(site_dir) == Refusal("0", "data")
    assert "a lesion, which is no person" in (site_dir / "refusals.jsonl").read_text()
    assert counts_sent(site_dir) == []


# --- a hospital's set, as it changes --------------------------------------------------------------


class Ward:
    """A site of a real population with an imported set of its own: 60 people, one image each."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, unit: str = "group") -> None:
        self.folder, self.unit = folder, unit
        monkeypatch.setenv("XCAL_HOME", str(folder / "home"))
        self.source = folder / "source"
        self.site = folder / "site"

    def has(self, train: Sequence[int], test: Sequence[int], **other: int) -> None:
        """Import these people anew; `other`: whose image a follow-up is, by the name it has."""
        shutil.rmtree(self.source, ignore_errors=True)
        self.source.mkdir(parents=True)
        people = {**{f"p{n}": n for n in (*train, *test)}, **other}
        rows = ["path,label,patient_id,split"]
        for name, n in people.items():
            pixels = np.random.default_rng([n, len(name)]).integers(0, 255, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(self.source / f"{name}.png")
            split = "train" if n in train else "test"
            rows.append(f"{name}.png,{'ab'[n % 2]},P{n},{split}")
        (self.source / "table.csv").write_text("\n".join(rows) + "\n")
        _own_images.cache_clear()
        import_dataset(self.source, pixels=16, name="ward", replace=self.site.exists())
        if not self.site.exists():
            policy = {
                "epsilon_total": 20.0,
                "delta_total": 1e-2,
                "epsilon_run": 8.0,
                "delta_run": 1e-3,
                "sigma_min": 0.0,
            }
            about = SiteTable(client="0", population="ward", data="ward", threads=1)
            methods = {"methods": ("fl-dp",), "networks": ("small",), "unit": self.unit}
            create_site(
                self.site,
                about,
                Policy.model_validate({**policy, **methods, **FLOOR}),
                unit=self.unit,
            )

    def asks(self, run: str = "one", *, last: bool = False, shift: float = 0.0) -> Any:
        keys = {"network": "small", "pixels": 16, "method": "fl-dp", "unit": self.unit}
        keys |= {"rounds": 1, "batch": 10, "epsilon": 4.0, "delta": 1e-3, "clients": 2}
        made = make_experiment({"data": "smear", **keys, "pool_views": "none"})
        network = build_network(made, 2)
        asked = Request(
            client="0",
            run=run,
            round=1 if last else 0,
            own_rounds=(0,),
            experiment=public_keys(made),
            initial_seed=0,
            frozen=frozen_digest(network),
            head=None,
            weights={k: p.detach() + shift for k, p in trainable(network).items()},
            validation_losses=(),
            final=last,
        )
        return told(self.site, encode_request(asked))


@pytest.fixture
def ward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ward]:
    def make(unit: str = "group") -> Ward:
        return Ward(tmp_path / unit, monkeypatch, unit)

    return make


FIRST, SECOND = range(40), range(40, 60)


def test_a_hospitals_own_people_are_counted(ward: Callable[..., Ward]) -> None:
    here = ward()
    here.has(FIRST, SECOND)
    assert isinstance(here.asks(), Reply)
    sent = here.asks(last=True)
    assert sum(c for c in sent.counts if c) <= 20 and any(sent.counts)
    assert isinstance(here.asks("two"), Reply)  # the set is as it was
    assert verify(here.site / "ledger.sqlite").ok


@pytest.mark.parametrize("unit", ["group", "record"])
@pytest.mark.parametrize(
    ("train", "test"), [(SECOND, FIRST), (range(30), range(40, 60)), (range(40), range(45, 60))]
)
def test_who_may_have_been_trained_on_is_not_counted(
    ward: Callable[..., Ward],
    invoke: Invoke,
    unit: str,
    train: Sequence[int],
    test: Sequence[int],
) -> None:
    """Whatever the set was when the ledger was charged, and it is another one now."""
    here = ward(unit)
    here.has(FIRST, SECOND)
    assert isinstance(here.asks(), Reply)
    assert invoke("site", "check", str(here.site))[0] == 0
    here.has(train, [n for n in test if n not in train])
    code, _, err = invoke("site", "check", str(here.site))
    assert code == 1 and "no exact counts would be sent" in err
    assert here.asks(last=True) == Refusal("0", "data")
    assert counts_sent(here.site) == []
    here.has(FIRST, SECOND)
    assert here.asks(last=True).counts


@pytest.mark.parametrize("unit", ["group", "record"])
def test_a_set_that_was_another_in_between_is_not_counted(
    ward: Callable[..., Ward], unit: str
) -> None:
    here = ward(unit)
    here.has(FIRST, SECOND)
    assert isinstance(here.asks(), Reply)
    here.has(range(50), range(50, 60))  # it grew: some of those held out were trained on
    assert isinstance(here.asks("two"), Reply)
    here.has(FIRST, SECOND)
    assert here.asks(last=True) == Refusal("0", "data")


def test_a_follow_up_of_somebody_who_was_trained_on_is_not_counted(
    ward: Callable[..., Ward],
) -> None:
    here = ward()
    here.has(FIRST, SECOND)
    assert isinstance(here.asks(), Reply)
    here.has(range(35), SECOND, later35=35)
    assert here.asks(last=True) == Refusal("0", "data")


def test_a_site_that_forgot_what_it_was_charged_for_counts_nobody(
    ward: Callable[..., Ward],
) -> None:
    here = ward()
    here.has(FIRST, SECOND)
    assert isinstance(here.asks(), Reply)
    (here.site / "partition.json").unlink()
    here.has(SECOND, FIRST)
    assert here.asks(last=True) == Refusal("0", "data")
    assert isinstance(here.asks("two"), Reply)  # which writes a new one
    assert here.asks("two", last=True) == Refusal("0", "data")


@pytest.mark.parametrize("unit", ["group", "record"])
def test_who_was_counted_is_not_trained_on(ward: Callable[..., Ward], unit: str) -> None:
    here = ward(unit)
    here.has(FIRST, SECOND)
    assert isinstance(here.asks(), Reply)
    assert here.asks(last=True).counts
    spent = charges(here.site)
    here.has(range(50), range(50, 60))
    assert here.asks("two") == Refusal("0", "data")
    assert charges(here.site) == spent
    assert "may now be trained on" in (here.site / "refusals.jsonl").read_text()
    here.has(FIRST, SECOND)
    assert isinstance(here.asks("two"), Reply)


def own_loop(site: Path) -> None:
    """One step of a loop of the owner's own, charged to the site's ledger."""
    engine = xcal.PrivacyEngine(ledger=site)
    network: torch.nn.Module = torch.nn.Linear(3, 2)
    try:
        network, optimizer, criterion, loader = engine.make_private_with_epsilon(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            criterion=torch.nn.CrossEntropyLoss(),
            data_loader=DataLoader(
                TensorDataset(torch.randn(40, 3), torch.zeros(40, dtype=torch.long)), batch_size=20
            ),
            target_epsilon=1.0,
            target_delta=1e-4,
            epochs=1,
            max_grad_norm=1.0,
            groups=list(range(40)),
        )
        for x, y in loader:
            optimizer.zero_grad()
            criterion(network(x), y).backward()
            optimizer.step()
            break
    finally:
        engine.close()


def test_a_loop_of_ones_own_does_not_train_on_who_was_counted(ward: Callable[..., Ward]) -> None:
    here = ward()
    here.has(FIRST, SECOND)
    assert isinstance(here.asks(), Reply)
    assert here.asks(last=True).counts
    spent = charges(here.site)
    with pytest.raises(engine_refusals.Refused) as refused:
        own_loop(here.site)
    assert refused.value.code == "counted" and charges(here.site) == spent


def test_who_a_loop_of_ones_own_may_have_trained_on_is_not_counted(
    ward: Callable[..., Ward],
) -> None:
    here = ward()
    here.has(FIRST, SECOND)
    assert isinstance(here.asks(), Reply)
    own_loop(here.site)
    assert here.asks(last=True) == Refusal("0", "data")
    assert counts_sent(here.site) == []


def test_a_backup_that_is_put_back_sends_no_second_table(
    ward: Callable[..., Ward], tmp_path: Path, invoke: Invoke
) -> None:
    here = ward()
    here.has(FIRST, SECOND)
    assert isinstance(here.asks(), Reply)
    assert invoke("ledger", "backup", str(here.site), str(tmp_path / "copy"))[0] == 0
    assert here.asks(last=True).counts
    for name in ("ledger.sqlite", "ledger.head", "partition.json"):
        shutil.copy(tmp_path / "copy" / name, here.site)
    assert here.asks(last=True, shift=0.05) == Refusal("0", "ledger-older")


# --- in words of other versions -------------------------------------------------------------------


def test_an_older_server_gets_nothing_that_it_cannot_read(tmp_path: Path, holds: Any) -> None:
    site_dir = tiny_site(tmp_path, **FLOOR)
    holds(PEOPLE)
    trained(site_dir)
    asked = a_request(round=3, final=True)
    assert told(site_dir, encode_request(asked, "0.1")) == Disclosure("0", "trial", {})
    assert counts_sent(site_dir) == []
    assert final(site_dir).counts == COUNTS


def test_answers_without_counts_are_as_they_were() -> None:
    def fields(sent: Disclosure) -> set[str]:
        data = encode_disclosure(sent)
        size = int.from_bytes(data[:8], "little")
        return set(json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["xcal"]))

    plain = {"format", "version", "kind", "client", "run", "tables", "noise", "epsilon", "delta"}
    assert fields(Disclosure("0", "a", {})) == plain
    assert fields(Disclosure("0", "a", {"classes": (1.0,)}, 1.0, 1.0, 1e-4)) == plain
    assert fields(Disclosure("0", "a", {}, counts=(None,), floor=5)) == {*plain, "counts", "floor"}


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": (4,)},
        {"counts": (5.0,)},
        {"counts": (True,)},
        {"counts": (-5,)},
        {"counts": ("5",)},
        {"counts": (2**31,)},  # such that no sum of them leaves 64 bits
        {"floor": 0},
        {"floor": None},
        {"tables": {"confusion": (1.0,)}, "noise": 1.0, "epsilon": 1.0, "delta": 1e-4},
        {"epsilon": 1.0},
    ],
)
def test_a_site_that_sends_something_else_is_not_understood(changes: dict[str, Any]) -> None:
    sent = Disclosure("0", "a", {}, counts=(5, None), floor=5)
    assert decode_answer(encode_disclosure(sent), 1 << 20) == sent
    with pytest.raises(Refused) as refused:
        decode_answer(encode_disclosure(replace(sent, **changes)), 1 << 20)
    assert refused.value.code == "malformed"


# --- what the lead makes of it --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_ends_are_those_of_all_tables_that_it_may_be(seed: int) -> None:
    """Two classes and three, floor 3: every table that would have been sent so is tried."""
    size, floor = (2, 3)[seed % 2], 3
    rng = np.random.default_rng(seed)
    while True:
        table = rng.integers(0, 9, (size, size))
        sent = above(table, floor)
        if 0 < sent.count(None) <= 5:
            break
    found = read_counts(Disclosure("0", "a", {}, counts=sent, floor=floor), "abc"[:size])
    seen: dict[str, list[float]] = {"accuracy": [], "macro_f1": [], "units": []}
    for hidden in itertools.product(range(floor), repeat=sent.count(None)):
        fill = iter(hidden)
        one = np.array([next(fill) if c is None else c for c in sent]).reshape(size, size)
        seen["accuracy"].append(np.trace(one) / one.sum())
        f1 = mean_f1(one)
        assert f1 is not None
        seen["macro_f1"].append(f1)
        seen["units"].append(int(one.sum()))
    for name, values in seen.items():
        assert found[name] == pytest.approx([min(values), max(values)])
    assert found["epsilon"] is None and found["counts"][0] == list(sent[:size])
    with pytest.raises(UserError, match="another shape"):
        read_counts(Disclosure("0", "a", {}, counts=sent, floor=floor), "abcd")


class Direct:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        return {client: answer(self.folder / client, m) for client, m in messages.items()}

    def late(self) -> list[str]:
        return []


@pytest.mark.slow
def test_a_lead_sees_each_site_as_its_policy_says(tmp_path: Path) -> None:
    for client, policy in enumerate((NOISY, FLOOR, {})):
        tiny_site(tmp_path, client, **policy)
    experiment = make_experiment({**TINY, "method": "xcal-steered", "rounds": 1})
    folder = RunFolder.create(tmp_path / "run", experiment, ())
    federation = prepare_remote(experiment, ["0", "1", "2"])
    run_experiment(folder, None, federation, Direct(tmp_path))
    told = tell_final(folder, federation, Direct(tmp_path))
    assert told["sites"]["0"]["epsilon"] == 2.0 and told["sites"]["2"] is None
    assert set(told["sites"]) == {"0", "2"} and not told["refused"]
    exact = told["exact"]["1"]
    assert exact["floor"] == 5 and exact["epsilon"] is None
    assert exact["units"][0] <= 15 <= exact["units"][1]
    assert json.loads((tmp_path / "run" / "evaluations.json").read_text()) == told
    text = page("three", seen_with(told), "", None, 5.0)
    assert "with noise" in text and "exact, no guarantee" in text


def seen_with(told: Mapping[str, Any]) -> Snapshot:
    return Snapshot({"1": True}, [RunState("trial", "finished", 1, [], (), told)])


def test_the_leads_page_shows_counts_and_what_lies_between() -> None:
    sent = Disclosure("1", "trial", {}, counts=COUNTS, floor=5)
    names = ("<b>left</b>", "middle", "right")
    told = {"sites": {}, "exact": {"1": read_counts(sent, names)}, "refused": {}, "missing": []}
    text = page("three", seen_with(told), "", "trial", 5.0)
    assert "exact, no guarantee (ε = ∞) for held-out people" in text and "with noise" not in text
    assert "<td>&lt; 5</td>" in text and "<td>9</td>" in text and "<b>left" not in text
    assert "27 to 47 people" in text and "accuracy 0.447–0.778" in text
    nothing = replace(sent, counts=(None,) * 9)
    told["exact"] = {"1": read_counts(nothing, names)}
    assert "accuracy unknown" in page("three", seen_with(told), "", "trial", 5.0)


# --- the data-protection officer ------------------------------------------------------------------


def test_the_certificate_names_it(tmp_path: Path, holds: Any, invoke: Invoke) -> None:
    site_dir = trained(tiny_site(tmp_path, **FLOOR))
    holds(PEOPLE)

    def certified(name: str) -> tuple[Path, str]:
        out = tmp_path / name
        code, _, err = invoke("ledger", "certificate", str(site_dir), "--out", str(out))
        assert code == 0, err
        return out, out.read_text()

    before, text = certified("before.html")
    assert "nothing was sent of them but what the ledger charged for" in text
    assert "of 1 run in all, each below 5 withheld" in text
    assert "It says nothing of held-out people" not in text
    final(site_dir)
    after, text = certified("after.html")
    assert "exact counts of held-out people were sent for trial (floor 5): no guarantee" in text
    assert "It says nothing of held-out people" in text
    (one,) = read_certificate(after).facts["exact"]
    assert (one["run"], one["floor"]) == ("trial", 5)
    for page_of in (before, after):
        assert invoke("ledger", "verify", str(page_of), "--ledger", str(site_dir))[0] == 0
    code, _, _ = invoke("ledger", "backup", str(site_dir), str(tmp_path / "copy"))
    assert code == 0
    assert invoke("ledger", "verify", str(after), "--ledger", str(tmp_path / "copy"))[0] == 0
    assert invoke("ledger", "verify", str(before), "--ledger", str(site_dir))[0] == 0
