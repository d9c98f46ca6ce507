"""One cell in a process of its own: train, measure, write the result, remove what it took.

The runner starts this module and gives it orders, a line of JSON each, on standard input. Each is
carried out in a process forked from this one, which has imported everything already. When the line
closes, or this process ends, so does the cell, and what it had trained is resumed by the next one.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xcal.data.image_store import open_dataset
from xcal.data.normalize import to_tensor
from xcal.errors import UserError
from xcal.explain.choosing import DEFAULT, make_maps
from xcal.explain.road import RoadSettings, road
from xcal.federation.constants import with_constants
from xcal.federation.coordinator import Diverged
from xcal.federation.files import FolderBusy, read_tensors
from xcal.federation.folder import RunFolder, commit, versions
from xcal.federation.local import run_experiment
from xcal.federation.outcome import map_for, temperature_of
from xcal.federation.preflight import check_network
from xcal.federation.setup import DATA_SEED, Federation, prepare
from xcal.models.model_registry import build_network
from xcal.studies.grid import BUSY, FAILED, Cell
from xcal.studies.store import ROAD_STEP, Results, TestSet, group_numbers, pack, rank_images


class Measuring:
    """How a cell's model is measured; a study that measures more, or faster, has its own."""

    def prepare(self, federation: Federation) -> None:
        """Before training: whatever makes it faster and changes nothing."""

    def answering(self, model: nn.Module) -> nn.Module:
        """What is asked for answers in its place."""
        return model

    def maps(self, model: nn.Module, images: Tensor, method: str) -> Tensor:
        return make_maps(model, images, method=method)

    def further(
        self, model: nn.Module, federation: Federation, images: Tensor, temperature: float | None
    ) -> dict[str, Any]:
        """What else is told of it; `images` are the explained ones."""
        return {}


class Talk:
    """The cell's side of the conversation: one JSON object a line."""

    def __init__(self) -> None:
        self._last = 0.0
        self._done = 0
        self._total = 0

    def tell(self, **values: Any) -> None:
        print(json.dumps(values), flush=True)

    def start(self, total_steps: int, done_steps: int) -> None:
        self._total, self._done = max(total_steps, 1), done_steps

    def step(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._last > 1:
            self._last = time.monotonic()
            self.tell(share=round(self._done / self._total, 4))

    def round(self, record: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def measure(self, what: str, done: int, total: int) -> None: ...


def run_cell(
    cell: Cell,
    work: Path,
    command: str,
    talk: Talk,
    changes: Mapping[str, Any] | None = None,
    measuring: Measuring | None = None,
) -> tuple[dict[str, Any], TestSet | None]:
    """The result of the cell and the test set it was measured on; resumes what stands in `work`.

    Training that diverged is a result too: it has a reason, and no test set.
    """
    began = time.monotonic()
    experiment = with_constants(cell.experiment(changes))
    federation = prepare(experiment)
    if federation.data.multi_label:
        raise UserError(
            f"Studies compare runs by classes of which one is right, and {federation.data.name} is"
            " of several findings at once: train it with `xcal run`."
        )
    measuring = measuring or Measuring()
    measuring.prepare(federation)
    if (work / "run.json").exists():
        folder = RunFolder.find(work)
    else:
        folder = RunFolder.create(work, federation.experiment, sorted(cell.keys))
    try:
        result = run_experiment(folder, talk, federation, workers=1)  # cells run side by side
    except Diverged as error:
        return _frame(cell, "diverged", command, folder) | {"reason": str(error)}, None
    values = _frame(cell, "finished", command, folder)
    values |= {
        k: result[k]
        for k in ("macro_f1", "epsilon_target", "epsilon_nominal", "epsilon_paper", "delta", "unit")
    }
    values["mean_sigma"] = _rounded(result["mean_sigma"])
    values["auroc"] = _rounded(result["classification"].get("auroc"))
    values["clients"] = [
        {k: _rounded(c[k], 6) for k in ("units", "steps", "share_spent", "epsilon_spent", "halted")}
        for c in result["clients"]
    ]
    values["rounds"] = _rounds(folder)
    values |= measure(folder, federation, cell.explained, measuring)
    values["seconds"] = round(result["seconds"], 1)
    values["seconds_in_all"] = round(time.monotonic() - began, 1)
    return values, test_set_of(federation)


def _frame(cell: Cell, status: str, command: str, folder: RunFolder) -> dict[str, Any]:
    about = folder.about
    return {
        "id": cell.id,
        "scale": cell.scale,
        "status": status,
        "keys": dict(cell.keys),
        "explained": cell.explained,
        "experiment": about["experiment"],
        "commit": commit(),
        "versions": versions(),
        "command": command,
        "threads": torch.get_num_threads(),
    }


def _rounded(value: Any, digits: int = 5) -> Any:
    return round(value, digits) if isinstance(value, float) else value


def _rounds(folder: RunFolder) -> dict[str, list[Any]]:
    """Public measurements and each client's spending, round by round."""
    lines = folder.read_lines("rounds.jsonl")

    def of_clients(name: str) -> list[list[Any]]:
        return [[_rounded(c[name]) for c in line["clients"]] for line in lines]

    return {
        "f1": [_rounded(line["validation_macro_f1"]) for line in lines],
        "road": [_rounded(line["road_validation"]) for line in lines],
        "seconds": [line["seconds"] for line in lines],
        "share": of_clients("share_spent"),
        "sigma": of_clients("mean_sigma"),
        "signal": of_clients("mean_signal"),
    }


def explained_subset(groups: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """`count` test images that show as many groups as they can: one of each in turn."""
    generator = np.random.default_rng([DATA_SEED, 17])
    shuffled = generator.permutation(len(groups))
    turn = np.zeros(len(groups), dtype=np.int64)  # how many of its group come before it
    seen: dict[int, int] = {}
    for i in shuffled:
        turn[i] = seen.get(int(groups[i]), 0)
        seen[int(groups[i])] = int(turn[i]) + 1
    order = shuffled[np.argsort(turn[shuffled], kind="stable")]
    return np.sort(order[:count])


def test_set_of(federation: Federation) -> TestSet:
    data = federation.data
    return TestSet(
        f"{data.name}-{data.test.pixels.shape[1]}px",
        data.classes,
        data.group_name,
        data.test.labels,
        group_numbers(data.test.groups),
    )


def measure(
    folder: RunFolder, federation: Federation, explained: int, measuring: Measuring
) -> dict[str, Any]:
    """What pairs of cells are compared by: predictions, how images rank, ROAD of images."""
    data, experiment = federation.data, federation.experiment
    model = build_network(experiment, len(data.classes))
    found = read_tensors(folder.path / "model.safetensors")
    assert found is not None
    model.load_state_dict(found[0])
    device = experiment.device
    model.to(device).eval()
    test = data.test
    with np.load(folder.path / "predictions.npz") as answers:
        values: dict[str, Any] = {
            "test_set": test_set_of(federation).name,
            "predicted": pack(answers["predicted"].astype(np.uint8)),
            "ranks": pack(rank_images(answers["probabilities"])),
        }
    if explained == 0:
        return values
    chosen = explained_subset(test.groups, explained)
    inputs = to_tensor(np.asarray(test.pixels[chosen])).to(device)
    choice = map_for(experiment, model, lambda: data.validation, experiment.map_method)
    temperature = temperature_of(model, federation)
    maps = measuring.maps(model, inputs, choice.method)
    scores = road(measuring.answering(model), inputs, maps, RoadSettings())
    values |= {
        "road": _rounded(scores.road),
        "road_logit_percent": _rounded(scores.road_logit_percent, 3),
        "road_images": pack(chosen.astype(np.int32)),
        "road_scores": packed_scores(scores.scores),
        "constant_maps": scores.constant_maps,
    }
    if temperature is not None:
        matched = scores.matched(temperature)
        values |= {"temperature": _rounded(temperature), "road_matched": _rounded(matched.mean())}
        values["road_matched_scores"] = packed_scores(matched)
    if choice.method != DEFAULT:
        values["map_method"] = choice.method
    return values | measuring.further(model, federation, inputs, temperature)


def packed_scores(scores: NDArray[np.float64]) -> str:
    """ROAD of each image, in steps of `ROAD_STEP`."""
    return pack(np.round(scores / ROAD_STEP).astype(np.int16))


def _end_with(alive: int) -> None:
    """Wait until nobody holds the other end of the pipe `alive` any more, then end at once."""

    def wait() -> None:
        while os.read(alive, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _held(lock: Path) -> bool:
    """Whether the cell is this process's own from now to its end, however it ends."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def carry_out(orders: dict[str, Any], measuring: Measuring | None = None) -> int:
    """One cell, from its orders to its result; the exit code of its process."""
    cell = Cell(orders["scale"], orders["keys"], orders["explained"], orders["variant"])
    work, results = Path(orders["work"]), Results(Path(orders["results"]))
    talk = Talk()
    lock = work.with_name(f"{work.name}.lock")
    # A result that came since this process was started is another runner's work too.
    if not _held(lock) or results.has(cell):
        return BUSY
    try:
        values, test = run_cell(cell, work, orders["command"], talk, orders["changes"], measuring)
    except FolderBusy:  # `xcal run --resume` of a user
        return BUSY
    except UserError as error:
        talk.tell(error=str(error))
        return FAILED
    results.write(cell.scale, values, test)
    if not orders["keep"]:
        shutil.rmtree(work, ignore_errors=True)
    lock.unlink(missing_ok=True)  # who waits at it still, sees the result
    talk.tell(
        finished=values["status"],
        macro_f1=values.get("macro_f1"),
        road=values.get("road"),
        seconds=values.get("seconds_in_all"),
    )
    return 0


def _try_network(orders: dict[str, Any]) -> None:
    """Check the cell's images and try its network here, once for all cells that share them."""
    keys = orders["keys"]
    if any(":" in str(keys.get(key, "")) for key in ("network", "method", "data", "loss")):
        return  # code of the user's own runs in the cell's process only
    with suppress(Exception):  # the cell meets it again, and says so
        experiment = with_constants(
            Cell(orders["scale"], keys, 0, "").experiment(orders["changes"])
        )
        data = open_dataset(experiment.data, experiment.pixels)
        check_network(experiment, len(data.classes), experiment.pixels)


def _forked(orders: dict[str, Any], measuring: Measuring | None) -> int:
    """The cell in a child of this process: its exit code, or an end together with the runner."""
    _try_network(orders)
    alive, held = os.pipe()  # the child sees its end when this process is gone
    child = os.fork()
    if child == 0:
        os.close(held)
        _end_with(alive)
        os.dup2(os.open(orders["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), 2)
        code = 1
        try:
            code = carry_out(orders, measuring)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(alive)
    try:
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            # Orders come one at a time: what can be read now is the runner's end.
            if select.select([0], [], [], 0.1)[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os._exit(1)
    finally:
        os.close(held)
    return os.waitstatus_to_exitcode(ended[1])


def main(measuring: Measuring | None = None) -> int:
    torch.set_num_threads(1)
    # What torch imports only with the first optimizer.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    for line in iter(sys.stdin.buffer.readline, b""):
        print(json.dumps({"code": _forked(json.loads(line), measuring)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
