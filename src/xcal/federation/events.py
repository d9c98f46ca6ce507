"""A run's released quantities for TensorBoard (extra `loggers`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xcal.errors import UserError, how_to_install

# What of a round's record may be drawn: measured on public images, or released by a client.
MEASURED = ("validation_macro_f1", "validation_loss", "road_validation", "answered")
RELEASED = ("share_spent", "epsilon_spent", "mean_sigma", "mean_signal")


def scalars_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a round's record that may be drawn, by tag."""
    for name in MEASURED:
        if record.get(name) is not None:
            yield f"server/{name}", float(record[name])
    for report in record.get("clients", []):
        for name in RELEASED:
            if report.get(name) is not None:
                yield f"{report['client']}/{name}", float(report[name])


class EventFile:
    """An event file in a folder; every round is flushed, so that a watcher sees it at once."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(f"Event files need TensorBoard: {how_to_install('loggers')}.") from None
        try:
            self._writer: Any = SummaryWriter(str(folder))
        except OSError as error:
            raise UserError(f"{folder} could not be written: {error.strerror}.") from None

    def round(self, record: Mapping[str, Any]) -> None:
        self.log(dict(scalars_of(record)), int(record["round"]) + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
