"""Which sites were lost in a job: noted by the server's process, read by the job's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xcal.federation.files import read_json, write_json

RESTARTS = 3  # of one site's worker in one job


@dataclass(frozen=True)
class Lost:
    """A site that died, or its worker: how often, and whether it is still gone."""

    times: int
    gone: bool
    what: str = "worker"  # or "site": all of it

    @property
    def for_good(self) -> bool:
        """Whether nobody starts it again."""
        return self.gone and self.what == "worker" and self.times > RESTARTS

    def text(self, site: str) -> str:
        """What happened, for who watches the run."""
        again = f" ({self.times} times)" if self.times > 1 else ""
        if self.what == "site" and not self.times:
            return f"{site} came later and takes part from now on."
        what = f"{site} was lost{again}" if self.what == "site" else f"{site}'s worker died{again}"
        if self.gone:
            return f"{what}; the round goes on with its quorum."
        return f"{what}; it was started again and takes part."


def _file(server: Path, job_id: str) -> Path:
    return server / "lost" / f"{Path(job_id).name}.json"


def note_lost(
    server: Path, job_id: str, site: str, times: int, *, gone: bool, what: str = "worker"
) -> None:
    path = _file(server, job_id)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    found = read_json(path) if path.exists() else {}
    write_json(path, {**found, site: {"times": times, "gone": gone, "what": what}})


def lost_in(server: Path, job_id: str) -> dict[str, Lost]:
    path = _file(server, job_id)
    return {s: Lost(**v) for s, v in read_json(path).items()} if path.exists() else {}
