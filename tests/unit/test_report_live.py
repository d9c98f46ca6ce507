"""The report of a run that still trains, and of a study of one's own."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import xcal
from support import TINY
from xcal.errors import UserError
from xcal.report.report import LiveReport

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("live") / "run"
    xcal.run(out, method="fl-dp", **{**TINY, "rounds": 2, "road_images": 0, "road_test_images": 4})
    return out


@pytest.fixture
def half(run: Path, tmp_path: Path) -> Path:
    """The run as it was after its first round."""
    copy = tmp_path / "half"
    shutil.copytree(run, copy)
    (copy / "result.json").unlink()
    first = (copy / "rounds.jsonl").read_text().splitlines()[0]
    (copy / "rounds.jsonl").write_text(first + "\n")
    return copy


@pytest.fixture
def live(half: Path) -> Iterator[LiveReport]:
    served = LiveReport(half, images=1)
    thread = threading.Thread(target=served.serve)
    thread.start()
    yield served
    served.close()
    thread.join()


def get(live: LiveReport, path: str, host: str | None = None) -> tuple[int, str]:
    place = live.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=60)
    connection.request("GET", path, headers={"Host": host or place})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_the_page_grows_and_ends_whole(live: LiveReport, half: Path, run: Path) -> None:
    assert live.url.startswith("http://127.0.0.1:")
    status, page = get(live, "/")
    assert status == 200 and "round 1 of 2 is done" in page
    assert "connect-src 'self'" in page and "figures.json" in page
    status, text = get(live, "/figures.json")
    told = json.loads(text)
    assert status == 200 and not told["finished"]
    f1 = next(f for f in told["figures"] if f["id"] == "rounds-validation-macro-f1")
    assert f1["data"][0]["x"] == [1]
    for name in ("rounds.jsonl", "result.json"):
        shutil.copyfile(run / name, half / name)
    told = json.loads(get(live, "/figures.json")[1])
    assert told["finished"]
    status, page = get(live, "/")
    assert "reaches macro F1" in page and "Where the models look" in page
    assert "connect-src" not in page  # the finished page asks for nothing
    assert live.final.is_set()


def test_others_are_not_answered(live: LiveReport) -> None:
    assert get(live, "/", host="elsewhere.example:80")[0] == 404
    assert get(live, "/result.json")[0] == 404
    assert get(live, "/../run.json")[0] == 404


def test_what_cannot_be_shown_live_is_refused(invoke: Invoke, run: Path, tmp_path: Path) -> None:
    assert invoke("report", "--live", str(tmp_path))[0] == 2
    assert invoke("report", "--live", str(run), str(run))[0] == 2
    taken = LiveReport(run)
    with pytest.raises(UserError, match="Port"):
        LiveReport(run, int(taken.url.rstrip("/").rpartition(":")[2]))
    taken._server.server_close()


def test_a_run_is_served_while_it_trains(invoke: Invoke, tmp_path: Path, monkeypatch) -> None:
    """`--watch` starts a process of its own and ends it; the run is what it would be without."""
    started = []

    class Process:
        def __init__(self, words: list[str], **options: object) -> None:
            import io

            started.append(words)
            self.stdout = io.StringIO("the address\n")
            self.ended = False

        def poll(self) -> int | None:
            return None

        def terminate(self) -> None:
            self.ended = True

        def wait(self) -> int:
            return 0

    only_here = types.SimpleNamespace(Popen=Process, PIPE=-1, DEVNULL=-3)
    monkeypatch.setattr("xcal.cli.run.subprocess", only_here)
    monkeypatch.setattr("xcal.cli.run.GRACE", 0.0)
    words = [f"{k}={v}" for k, v in {**TINY, "rounds": 1, "road_test_images": 0}.items()]
    sets = [word for one in words for word in ("--set", one)]
    code, shown, err = invoke("run", *sets, "--out", str(tmp_path / "run"), "--watch")
    assert code == 0, err
    assert "the address" in shown
    assert started[0][-2:] == ["--live", str(tmp_path / "run")]
    assert (tmp_path / "run" / "result.json").exists()


def test_a_study_has_a_page(invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    each = "seeds mean deviation difference low high wins losses verdict".split()
    head = ["method", "epsilon", "diverged"]
    head += [f"{m}_{name}" for m in ("macro_f1", "road", "auroc") for name in each]
    none = "," * (len(each) - 1)
    rows = [
        f"fl-dp,5,0,3,0.70,0.02,,,,,,,{none},{none}",
        f"xcal,5,0,3,0.60,0.03,-0.10,-0.15,-0.05,0,3,worse,{none},{none}",
    ]
    (folder / "comparison.csv").write_text("\n".join([",".join(head), *rows]) + "\n")
    out = tmp_path / "page.html"
    code, _, err = invoke("report", str(folder), "--out", str(out))
    assert code == 0, err
    page = out.read_text()
    assert "1 of 1 comparisons show a difference in macro F1" in page
    assert "method = xcal is worse (-0.100)" in page
    assert page.count('class="plot"') == 1 and "0.700 ± 0.020" in page
    (folder / "comparison.csv").write_text(",".join(head) + "\n")
    assert invoke("report", str(folder), "--out", str(out))[0] == 2
