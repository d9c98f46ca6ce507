"""`log` and `logger=`: the real TensorBoard, MLflow and Weights & Biases, and one of one's own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import xcal
from commands import xcal_forked
from support import TINY, sets
from xcal.errors import UserError
from xcal.experiments import LOCAL_KEYS, make_experiment
from xcal.federation.folder import RunFolder
from xcal.federation.loggers import MEASURED, RELEASED, MLflow, WandB

QUICK = {**TINY, "method": "fl-dp", "rounds": 2, "clients": 2, "road_images": 0}
QUICK = {**QUICK, "road_test_images": 0}
NAMES = {
    *(f"server/{name}" for name in MEASURED),
    *(f"{client}/{name}" for client in "01" for name in RELEASED),
    *("result/macro_f1", "result/road", "result/epsilon_target"),
}


class Kept:
    """A logger of one's own."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_a_logger_of_ones_own_gets_released_and_public_numbers_only(tmp_path: Path) -> None:
    kept = Kept()
    result = xcal.run(tmp_path / "run", logger=kept, **QUICK)
    assert [step for step, _ in kept.seen] == [1, 2, 2]
    assert {name for _, values in kept.seen for name in values} <= NAMES
    for (_, values), record in zip(kept.seen[:2], rounds_of(tmp_path / "run"), strict=True):
        assert values["server/validation_macro_f1"] == record["validation_macro_f1"]
        assert values["0/epsilon_spent"] == record["clients"][0]["epsilon_spent"]
    assert kept.seen[2][1]["result/macro_f1"] == result["macro_f1"]
    assert not kept.closed  # who made it closes it


def test_a_logger_that_fails_is_left_behind(tmp_path: Path) -> None:
    class Broken(Kept):
        def log(self, values: Mapping[str, float], step: int) -> None:
            super().log(values, step)
            raise ConnectionError("the server went away\nfor good")

    from xcal.federation.coordinator import NullCallback

    class Listening(NullCallback):
        def __init__(self) -> None:
            self.said: list[str] = []

        def say(self, text: str) -> None:
            self.said.append(text)

    broken, progress = Broken(), Listening()
    found = xcal.run(tmp_path / "run", logger=broken, progress=progress, **QUICK)
    plain = xcal.run(tmp_path / "plain", **QUICK)
    assert found["macro_f1"] == plain["macro_f1"]
    assert len(broken.seen) == 1
    assert [text for text in progress.said if "server went away" in text] != []
    assert not any("for good" in text for text in progress.said)


def test_tensorboard_by_the_key_and_as_the_run_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    done = xcal_forked("run", *sets(**QUICK, log="tensorboard"), "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) <= NAMES
    drawn = [(e.step, e.value) for e in found.Scalars("server/validation_macro_f1")]
    told = [(r["round"] + 1, r["validation_macro_f1"]) for r in rounds_of(out)]
    assert drawn == [(step, pytest.approx(value)) for step, value in told]
    assert RunFolder.find(out).experiment.log == "tensorboard"
    assert xcal.run(out, resume=True)["macro_f1"] is not None


def test_mlflow_keeps_a_run_and_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "")  # so that what the logger sets is taken back
        monkeypatch.delenv(name)
    out = tmp_path / "run"
    xcal.run(out, logger="mlflow", **QUICK)
    again = MLflow(out, RunFolder.find(out).about["run"])
    client, run = again._client, again._run
    data = client.get_run(run).data
    assert set(data.metrics) <= NAMES
    assert len(client.search_runs([client.get_experiment_by_name("xcal").experiment_id])) == 1
    history = client.get_metric_history(run, "server/validation_macro_f1")
    told = [(r["round"] + 1, r["validation_macro_f1"]) for r in rounds_of(out)]
    assert [(m.step, m.value) for m in history] == told
    again.log({"server/answered": 2.0}, 3)
    again.close()
    assert client.get_run(run).info.status == "FINISHED"
    # Elsewhere, where the environment says so.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "team").as_uri())
    MLflow(out, "another").close()
    assert (tmp_path / "team").is_dir()


def test_wandb_offline_stays_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "")  # so that what the logger sets is taken back
        monkeypatch.delenv(name)
    made = WandB(tmp_path, "abc")
    made.log({"server/answered": 2.0}, 1)
    made.log({"server/answered": 1.0}, 2)
    made.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*-abc/run-abc.wandb")
    for _ in range(300):  # W&B's own process writes it, a little later
        if (kept := file.read_bytes()).count(b"server/answered") >= 2:
            break
        time.sleep(0.1)
    else:
        raise AssertionError(kept)
    assert list((file.parent / "files").iterdir()) == []  # neither packages nor machine
    assert str(Path(__file__).parent).encode() not in kept


@pytest.mark.parametrize(
    ("name", "extra"), [("tensorboard", "loggers"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    for keys in ({"log": name}, {"logger": name}):
        with pytest.raises(UserError, match=rf"whl\[{extra}\]'"):
            xcal.run(tmp_path / "run", **QUICK, **keys)
    assert not (tmp_path / "run").exists()


def test_a_logger_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    done = xcal_forked("run", *sets(**QUICK, log="tensorbord"), "--out", str(tmp_path / "run"))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    with pytest.raises(UserError, match="Did you mean 'wandb'"):
        xcal.run(tmp_path / "run", logger="wandbb", **QUICK)
    assert not (tmp_path / "run").exists()


def test_the_key_is_no_part_of_a_run(tmp_path: Path) -> None:
    plain, logged = make_experiment(QUICK), make_experiment({**QUICK, "log": "mlflow"})
    assert plain.identity() == logged.identity()
    assert "log" not in plain.resolved()
    assert logged.resolved()["log"] == "mlflow"
    assert "log" in LOCAL_KEYS  # no server sets it
