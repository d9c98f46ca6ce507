"""Small things that tests share: a data set and a network that train in a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xcal.data.images import ImageData, Images
from xcal.dp.clipping import Bound, ClippingEngine
from xcal.dp.filter import RenyiFilter
from xcal.dp.mechanism import ChargedStep, Mechanism
from xcal.dp.noise import SeededNoise
from xcal.federation import local
from xcal.federation.folder import RunFolder
from xcal.federation.loaded_site import LoadedSite
from xcal.federation.setup import Federation
from xcal.methods.client_data import LocalData
from xcal.methods.context import Optimizer, StepContext
from xcal.methods.fl_dp import StaticNoise
from xcal.methods.step_parts import gradient_release

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def _images(rng: np.random.Generator, count: int, pixels: int, split: str, first: int) -> Images:
    labels = np.arange(count, dtype=np.int64) % 3
    pictures = rng.integers(90, 110, (count, pixels, pixels, 3), dtype=np.uint8)
    for i, label in enumerate(labels):  # a bright square whose place tells the class
        x = 2 + int(label) * (pixels - 6) // 3
        pictures[i, 3:8, x : x + 5] = 230
    return Images(
        pixels=pictures,
        labels=labels,
        groups=first + np.arange(count, dtype=np.int64) // 3,
        ids=np.array([f"secret-{split}-{i}" for i in range(count)]),
    )


def tiny(*, pixels: int = 16, seed: int = 0, train: int = 150) -> ImageData:
    """Three classes, 16 pixels, groups of three images; learnt in a few steps."""
    rng = np.random.default_rng(seed)
    return ImageData(
        name="tiny",
        classes=("left", "middle", "right"),
        group_name="patient",
        license="none",
        train=_images(rng, train, pixels, "train", 0),
        validation=_images(rng, 30, pixels, "validation", 10_000),
        test=_images(rng, 45, pixels, "test", 20_000),
    )


def colored(*, pixels: int = 16, seed: int = 0) -> ImageData:
    """`tiny` with a tint that tells the class, so that even `micro` learns it nearly perfectly."""
    data = tiny(pixels=pixels, seed=seed)
    for _, images in data.splits():
        for i, label in enumerate(images.labels):
            images.pixels[i, :, :, int(label)] += 60
    return data


class Micro(nn.Module):
    cam_layer = "act"
    head_layer: str | None = "head"

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.act = nn.ReLU()
        self.head = nn.Linear(8 * 1, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.act(self.norm(self.conv(images)))
        return self.head(features.mean(dim=(2, 3)))


def micro(classes: int, *, seed: int | None = None) -> nn.Module:
    """Some 300 parameters; initialized without touching the global generator."""
    model = Micro(classes)
    generator = torch.Generator().manual_seed(seed or 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("norm"):
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


# A method of one's own, as a user would add one: static noise under another name.
own_method = StaticNoise(name="own")


TINY: dict[str, Any] = {
    "data": "support:tiny",
    "network": "support:micro",
    "pixels": 16,
    "clients": 3,
    "unit": "record",
    "rounds": 3,
    "batch": 10,
    "epsilon": 8.0,
    "delta": 1e-3,
    "lr": 0.5,
    "threads": 1,
    "workers": 1,  # spies and faults that tests put in are in this process
}


def make_sites(folder: RunFolder, federation: Federation) -> list[LoadedSite]:
    """The clients of a simulated federation, before its first round."""
    return [c.held.site for c in local.make_clients(folder, federation, set())]


def sets(**changes: Any) -> list[str]:
    """TINY with changes, as --set arguments."""
    words = []
    for key, value in {**TINY, **changes}.items():
        words += ["--set", f"{key}={value}"]
    return words


def xcal_process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command in a real process."""
    return _process("xcal", words, options)


def reproduce_process(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m reproduce` in a real process."""
    return _process("reproduce", words, options)


def _process(
    module: str, words: tuple[str, ...], options: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=xcal_environment(),
        **options,
    )


class ForkedXcal:
    """The entry point of the real command in a fork of this process.

    It spares the seconds of importing torch. `prepare` is called in the fork, before the command.
    """

    def __init__(
        self, words: list[str], log: Path, prepare: Callable[[], object] | None = None
    ) -> None:
        import torch._dynamo  # noqa: F401 - what a first optimizer imports, for seconds

        from xcal.__main__ import main

        self._code: int | None = None
        self._log = log
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        outputs = [os.open(p, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for p in self._outputs()]
        # A Ctrl-C that comes early waits until the child is ready for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for number, handle in enumerate(outputs, start=1):
                    os.dup2(handle, number)
                sys.stdout, sys.stderr = (os.fdopen(n, "w") for n in (1, 2))
                os.environ["COLUMNS"] = "120"
                sys.argv = ["xcal", *words]
                if prepare is not None:
                    prepare()
                try:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                except KeyboardInterrupt:
                    sys.exit(130)  # before the command's first line
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for handle in outputs:
            os.close(handle)

    def _outputs(self) -> list[Path]:
        return [self._log.with_suffix(s) for s in (".out", ".err")]

    def ended(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._code is None:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
            self._code = os.waitstatus_to_exitcode(status)

    def interrupt(self) -> None:
        """Ctrl-C; it may take its time."""
        if self._code is None:
            os.kill(self._pid, signal.SIGINT)

    def wait(self, limit: float = 120.0) -> tuple[int, str, str]:
        """Exit code, standard output and standard error; a command that hangs is killed."""
        end = time.monotonic() + limit
        while self.ended() is None:
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"the command hung for {limit:g} s")
            time.sleep(0.002)
        assert self._code is not None
        out, err = (path.read_text(errors="replace") for path in self._outputs())
        return self._code, out, err


def warm_up(**changes: Any) -> None:
    """Calibrate here what forks of this process would each calibrate for themselves."""
    from xcal.experiments import make_experiment
    from xcal.federation.setup import prepare

    prepare(make_experiment({**TINY, **changes}))


def die_at(owner: Any, name: str, count: int) -> None:
    """Have this process kill itself (−9) right before the count-th call of `owner.name`."""
    original, calls = getattr(owner, name), [0]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, deadly)


def xcal_environment() -> dict[str, str]:
    path = os.pathsep.join(
        [str(TESTS), str(ROOT / "src"), str(ROOT)]
    )  # this checkout's code, not another's
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def tiny_site(folder: Path, client: int = 0, *, experiment: Any = None, **policy: Any) -> Path:
    """A simulated site with its shard of TINY; `policy` overrides its terms."""
    from xcal.config import to_toml
    from xcal.experiments import make_experiment
    from xcal.federation.policy import Policy
    from xcal.federation.site_directory import SiteTable, create_site

    made = experiment or make_experiment({**TINY, "method": "xcal"})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(to_toml(made.resolved()))
    about = SiteTable(
        client=str(client),
        population=f"simulated client {client}",
        experiment="../experiment.toml",
        shard=client,
        threads=1,
        message_log=True,
        simulated=True,
        seed=made.seed,
    )
    terms = {
        "epsilon_total": 20.0,
        "delta_total": 1e-2,
        "epsilon_run": 8.0,
        "delta_run": 1e-3,
        "sigma_min": 0.0,
        "methods": ("xcal", "fl-dp", "xcal-paper"),
        "networks": (made.network,),
        "unit": made.unit,
        **policy,
    }
    return create_site(folder / str(client), about, Policy(**terms), unit=made.unit).path


class FreeAccount:
    """An account that lets everything pass, for looking at sums."""

    filter = RenyiFilter(2.0, 1e300)

    def pay(self, *args: Any, **kwargs: Any) -> None:
        return None


def charged(
    context: StepContext, step: int, sigma: float, bound: Bound | None = None
) -> ChargedStep:
    """What a charge for one gradient would have given: for tests without an account."""
    bound = bound or Bound(context.clip)
    mechanism = Mechanism(context.rate, sigma, (gradient_release(bound, sigma),))
    return ChargedStep(mechanism, context.noise, partial(context.key, step))


def tiny_bench(model: nn.Module | None = None, **changes: Any) -> StepContext:
    """A client's tools for steps on the tiny data set, without an account unless one is given."""
    network = micro(3, seed=1) if model is None else model
    parts: dict[str, Any] = {
        "client": "0",
        "method": "test",
        "round": 0,
        "first_step": 0,
        "model": network,
        "engine": ClippingEngine(network),
        "data": LocalData(tiny().train, unit="record", images_per_unit=1),
        "noise": SeededNoise(3),
        "account": None,
        "optimizer": Optimizer(network, "sgd", 1.0, 0.0),
        "batch": 20,
        "clip": 1.0,
    }
    return StepContext(**parts | changes)
