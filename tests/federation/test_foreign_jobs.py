"""Jobs that are not ours, refused at a site as they arrive: one sentence for owner and lead."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from commands import xcal_forked as xcal
from xcal.federation.logbook import LOG
from xcal.federation.nvflare.foreign import CODE, foreign_class, refuse_foreign
from xcal.federation.nvflare.hardening import EXECUTOR
from xcal.federation.nvflare.jobs import write_job

pytest.importorskip("nvflare", reason="the extra `nvflare` is not installed")


@pytest.fixture
def party(tmp_path: Path) -> Path:
    folder = tmp_path / "hospital-a"
    for name in ("site", "kit/startup", "kit/local"):
        (folder / name).mkdir(parents=True)
    return folder


@pytest.fixture
def deploy(party: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """FLARE's own deployment at the site, as its process has it, of a job's folder."""
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.workspace import Workspace
    from nvflare.private.fed.utils.app_deployer import AppDeployer

    monkeypatch.setattr(AppDeployer, "deploy", AppDeployer.deploy)  # put back afterwards
    refuse_foreign(party / "kit", "site")
    workspace = Workspace(str(party / "kit"), "hospital-a")

    def deployed(job: Path) -> tuple[str | None, Path]:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as file:
            for path in sorted((job / "app").rglob("*.*")):
                file.write(path, path.relative_to(job / "app"))
        said = AppDeployer().deploy(workspace, "job-1", {}, "app", packed.getvalue(), FLContext())
        return said, Path(workspace.get_run_dir("job-1"))

    return deployed


def job(tmp_path: Path, executor: dict[str, Any]) -> Path:
    folder = write_job(tmp_path / "job", "first", {"sites": {}}, 3)
    path = folder / "app" / "config" / "config_fed_client.json"
    values = json.loads(path.read_text())
    values["executors"][0]["executor"] = executor
    path.write_text(json.dumps(values))
    return folder


def test_our_own_job_is_taken(deploy: Any, party: Path, tmp_path: Path) -> None:
    said, folder = deploy(write_job(tmp_path / "job", "first", {"sites": {}}, 3))
    assert not said and folder.is_dir()
    assert not (party / "site" / "refusals.jsonl").exists()


@pytest.mark.parametrize(
    ("executor", "named"),
    [
        ({"path": "subprocess.Popen", "args": {"args": ["touch", "x"]}}, "subprocess.Popen"),
        ({"class_path": "os.system", "args": {}}, "os.system"),
        ({"path": EXECUTOR, "args": {}, "more": [{"path": "a.B"}]}, "a.B"),
    ],
)
def test_a_class_that_is_not_ours_is_refused_before_anything_starts(
    deploy: Any, party: Path, tmp_path: Path, executor: dict[str, Any], named: str
) -> None:
    said, folder = deploy(job(tmp_path, executor))
    assert named in said and EXECUTOR in said and not folder.exists()
    (last,) = (party / "site" / "refusals.jsonl").read_text().splitlines()
    assert json.loads(last) | {"time": ""} == {
        "time": "",
        "code": CODE,
        "detail": said,
        "job": "job-1",
    }
    assert "Traceback" not in (party / "site" / LOG).read_text()


@pytest.mark.slow
def test_the_owner_is_shown_what_was_refused(deploy: Any, party: Path, tmp_path: Path) -> None:
    words = "--client hospital-a --data smear --population people --epsilon 5 --delta 1e-4"
    done = xcal("site", "init", str(party / "site"), *words.split(), "--unit", "record")
    assert done.returncode == 0, done.stderr
    deploy(job(tmp_path, {"path": "subprocess.Popen", "args": {}}))
    shown = xcal("site", "show", str(party / "site"))
    assert shown.returncode == 0 and CODE in shown.stdout and "Popen" in shown.stdout


def test_code_is_refused_in_our_words(
    deploy: Any, party: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvflare.private.fed.utils.app_authz import AppAuthzService

    refused = staticmethod(lambda **_: (False, "BYOC not permitted"))  # as a kit of ours has it
    monkeypatch.setattr(AppAuthzService, "authorize_app_info", refused)
    said, folder = deploy(job(tmp_path, {"path": EXECUTOR, "args": {}}))
    assert "code of its own" in said and "BYOC" not in said and not folder.exists()
    refusal = json.loads((party / "site" / "refusals.jsonl").read_text())
    assert refusal["code"] == CODE and refusal["engine"] == "BYOC not permitted"


def test_a_configuration_that_cannot_be_read_is_not_ours(tmp_path: Path) -> None:
    assert foreign_class(tmp_path, "site") is not None
    (tmp_path / "config_fed_client.json").write_text("[" * 100_000)
    assert foreign_class(tmp_path, "site") is not None
