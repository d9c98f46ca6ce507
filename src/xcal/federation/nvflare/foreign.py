"""Jobs that bring code, or name a class that is not ours: refused as they arrive, in our words.

FLARE would refuse them too, a class only once a worker has been started for it, and in its own
words and tracebacks. Here both ends read one sentence, and a site's owner finds it among the
refusals.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xcal.federation.logbook import note
from xcal.federation.nvflare.hardening import CONTROLLER, EXECUTOR
from xcal.federation.site_directory import log_refusal

CODE = "foreign-code"
_CONFIG = {"site": "config_fed_client.json", "server": "config_fed_server.json"}
_ALLOWED = {"site": EXECUTOR, "server": CONTROLLER}
_NAMES = ("path", "class_path")  # keys under which a job names a class


def refuse_foreign(kit: Path, role: str) -> None:
    """From now on no such job is unpacked at this party, a `site` or a `server`."""
    from nvflare.private.fed.utils.app_deployer import AppDeployer

    engine = AppDeployer.deploy

    def deploy(
        self: Any,
        workspace: Any,
        job_id: str,
        job_meta: Any,
        app_name: str,
        *rest: Any,
        **more: Any,
    ) -> Any:
        said = engine(self, workspace, job_id, job_meta, app_name, *rest, **more)
        if said:
            brings = "BYOC" in said
            words = "it brings code of its own" if brings else "FLARE does not accept it"
            kept = {"engine": str(said)[:500]}
        else:
            named = foreign_class(Path(workspace.get_app_dir(job_id)), role)
            if named is None:
                return said
            shutil.rmtree(workspace.get_run_dir(job_id), ignore_errors=True)
            words, kept = f"it names {named[:200]!r}", {}
        told = f"Refused a job: {words}, and this {role} runs {_ALLOWED[role]} alone. Nothing ran."
        party = kit.parent
        if role == "site":
            log_refusal(party / "site", CODE, told, job=job_id, **kept)
        else:
            note(party, "refused", code=CODE, detail=told, job=job_id, **kept)
        return told

    AppDeployer.deploy = deploy


def foreign_class(app: Path, role: str) -> str | None:
    """A class other than ours that a job's configuration names; None if there is none."""
    found = sorted(app.rglob(_CONFIG[role]))
    for path in found:
        try:
            names = list(_classes(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError):
            return f"a {path.name} that cannot be read"
        if foreign := [name for name in names if name != _ALLOWED[role]]:
            return foreign[0]
    return None if found else f"no {_CONFIG[role]}"


def _classes(value: Any) -> Iterator[str]:
    """Every class that a configuration names; what stands in `args` of ours is data."""
    if isinstance(value, list):
        for part in value:
            yield from _classes(part)
    elif isinstance(value, dict):
        own = [value[key] for key in _NAMES if isinstance(value.get(key), str)]
        yield from own
        for key, part in value.items():
            if key != "args" or not set(own) <= set(_ALLOWED.values()):
                yield from _classes(part)
