"""What a kit allows: the settings we write, and the sentences about settings that are looser.

FLARE's stock kit lets the coordinator's people send code, read files and stream logs. Ours lets
them submit a configuration that names our two classes, watch it and stop it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xcal.federation.files import read_json, write_json
from xcal.federation.nvflare.parties import Party

EXECUTOR = "xcal.federation.nvflare.executor.XcalExecutor"
CONTROLLER = "xcal.federation.nvflare.controller.XcalController"

ROLES = ("project_admin", "org_admin", "lead", "member")
# Rights that nobody needs for training, at any party.
NEVER = ("byoc", "shell_commands", "operate", "clone_job", "server-predeployed-flwr")


def authorization(role: str) -> dict[str, Any]:
    """Who may do what, as a party of `role` enforces it on its own machine."""
    nothing = dict.fromkeys(NEVER, "none")
    # What a site tells about itself travels in replies, where it is charged; FLARE's own views
    # (error texts, statistics) would be a second way out.
    view = "any" if role == "server" else "none"
    watch = {"view": view, "app_command": view}  # our one such command answers `status`
    silent = {"submit_job": "none", "manage_job": "none", "download_job": "none", **watch}
    own = "n:submitter"
    lead = {"submit_job": "any", "manage_job": own, "download_job": own, **watch}
    rights = {who: {**nothing, **(lead if who == "lead" else silent)} for who in ROLES}
    return {"format_version": "1.0", "permissions": rights}


def _part(name: str, path: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"id": name, "path": f"nvflare.{path}"}
    return part if args is None else {**part, "args": args}


def site_resources() -> dict[str, Any]:
    """A site's `resources.json`: exactly our executor, no log streaming."""
    none = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300}
    manager = "app_common.resource_managers.gpu_resource_manager.GPUResourceManager"
    consumer = "app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"
    launcher = "app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [EXECUTOR],
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "components": [
            _part("resource_manager", manager, none),
            _part("resource_consumer", consumer, {}),
            _part("process_launcher", launcher, {}),
        ],
    }


def server_resources(store: Path) -> dict[str, Any]:
    """The server's `resources.json`: exactly our controller; jobs are kept under `store`."""
    storage = "app_common.storages.filesystem_storage.FilesystemStorage"
    persistor = "app_common.state_persistors.storage_state_persistor.StorageStatePersistor"
    scheduler = "app_common.job_schedulers.job_scheduler.DefaultJobScheduler"
    launcher = "app_common.job_launcher.server_process_launcher.ServerProcessJobLauncher"
    snapshots = {"root_dir": str(store / "snapshots"), "uri_root": "/"}
    jobs = {"uri_root": str(store / "jobs"), "job_store_id": "job_store"}
    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [CONTROLLER],
        "allow_log_streaming": False,
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": 1000,
                "heart_beat_timeout": 60,
                "admin_timeout": 10.0,
            }
        ],
        "snapshot_persistor": {
            "path": f"nvflare.{persistor}",
            "args": {
                "uri_root": "/",
                "storage": {"path": f"nvflare.{storage}", "args": snapshots},
            },
        },
        "components": [
            _part("job_scheduler", scheduler, {"max_jobs": 1, "min_schedule_interval": 0.5}),
            _part("job_manager", "apis.impl.job_def_manager.SimpleJobDefManager", jobs),
            _part("job_store", storage),
            _part("process_launcher", launcher, {}),
        ],
    }


def _resources_of(party: Party) -> dict[str, Any]:
    if party.about.role == "server":
        return server_resources(party.folder / "store")
    if party.about.role == "site":
        return site_resources()
    admin = {
        "idle_timeout": 900.0,
        "login_timeout": 10.0,
        "with_debug": False,
        "authenticate_msg_timeout": 2.0,
        "prompt": "> ",
    }
    return {"format_version": 1, "admin": admin}


def remove_scripts(startup: Path) -> None:
    """FLARE's own scripts would start it with another Python and look for code to load."""
    for stock in (*startup.glob("*.sh"), *startup.glob("*.ipynb")):
        stock.unlink()


def harden(party: Party) -> None:
    """Replace the stock policies of a fresh kit by ours; nothing of the stock ones is left."""
    local = party.local
    remove_scripts(party.startup)
    for stock in (*local.glob("*.default"), *local.glob("*.sample")):
        if stock.name == "log_config.json.default":
            stock.rename(local / "log_config.json")
        else:
            stock.unlink()
    role = party.about.role
    if role in ("server", "site"):
        write_json(local / "authorization.json", authorization(role))
    write_json(local / "resources.json", _resources_of(party))
    party.key.chmod(0o600)


def looser_than_ours(party: Party) -> list[str]:
    """One sentence for every setting of the kit that allows more than ours does."""
    role = party.about.role
    found = _connection(party)
    if role not in ("server", "site"):
        return found
    local = party.local
    for stray in sorted(
        p.name for p in local.glob("*.default") if p.name != "log_config.json.default"
    ):
        found.append(f"{local / stray} is a stock policy that would be used again: delete it.")
    if (local / "custom").exists():
        found.append(f"{local / 'custom'} holds code that FLARE would load: delete it.")
    found += _authorization(local / "authorization.json", role)
    found += _resources(local / "resources.json", party)
    return found


def _connection(party: Party) -> list[str]:
    names = {"server": "fed_server.json", "site": "fed_client.json"}
    path = party.startup / names.get(party.about.role, "fed_admin.json")
    text = json.dumps(read_json(path))
    found = []
    if '"connection_security": "mtls"' not in text:
        found.append(f"{path} does not ask for mutual TLS: set connection_security to mtls.")
    if '"scheme": "grpc"' not in text:
        found.append(f"{path} does not use gRPC: set scheme to grpc.")
    return found


def _authorization(path: Path, role: str) -> list[str]:
    if not path.exists():
        return [f"{path} is missing: run `xcal federation accept` again."]
    ours = authorization(role)["permissions"]
    theirs = read_json(path).get("permissions", {})
    found = []
    for who, rights in theirs.items():
        known = ours.get(who, {})
        if not isinstance(rights, dict):
            found.append(f"{path} gives {who} the right to everything: list its rights one by one.")
            continue
        for right, given in rights.items():
            if given != "none" and given != known.get(right, "none"):
                found.append(f"{path} gives {who} the right {right} = {given!r}: set it to 'none'.")
    for who in ROLES:
        if who not in theirs:
            found.append(f"{path} does not name {who}: list its rights.")
    return found


def _resources(path: Path, party: Party) -> list[str]:
    if not path.exists():
        return [f"{path} is missing: run `xcal federation accept` again."]
    values = read_json(path)
    ours = CONTROLLER if party.about.role == "server" else EXECUTOR
    found = []
    if values.get("class_list_enforcement_mode") != "enforce":
        found.append(f"{path} does not enforce the class list: set the mode to enforce.")
    if values.get("class_allow_list") != [ours]:
        found.append(f"{path} allows other classes than {ours}: name exactly this one.")
    if values.get("allow_log_streaming") is not False:
        found.append(f"{path} lets logs go to the server: set allow_log_streaming to false.")
    known = {part["path"] for part in _resources_of(party)["components"]}
    for part in values.get("components", []):
        if part.get("path") not in known:
            found.append(f"{path} starts {part.get('path')}, which training does not need.")
    if party.about.role == "server":
        stores = [
            part.get("args", {}).get("uri_root", "")
            for part in values.get("components", [])
            if part.get("id") == "job_manager"
        ]
        if any(not Path(s).is_relative_to(party.folder) for s in stores):
            found.append(f"{path} keeps jobs outside {party.folder}: move the job store into it.")
    return found
