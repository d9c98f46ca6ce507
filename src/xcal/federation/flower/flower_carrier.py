"""Messages over Flower's grid, and what a client does with one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from xcal.errors import UserError
from xcal.federation.answer import answer
from xcal.federation.rounds import OnStep, SetAside
from xcal.federation.site_directory import SiteDirectory
from xcal.federation.waiting import Waiting, listed

STOPPING = "stopping"  # a file in a simulated run's folder: its clients keep their step and stop
RECORD = "xcal"
PULL_SECONDS = 0.05
NAMELESS_SECONDS = 10.0


class Stopped(Exception):
    """The run was interrupted from outside."""


class GridCarrier:
    """Carries bytes to the nodes of a grid. Nodes are known by the names their sites give them."""

    def __init__(
        self,
        grid: Grid,
        *,
        sites: Path | None = None,
        stop: threading.Event | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`sites`: of a simulation, whose nodes have none of their own but a number."""
        self._grid = grid
        self._say = say
        self._homes = sites
        self._stop = stop or threading.Event()
        self._nodes: dict[str, int] = {}
        self._waiting: dict[str, str] = {}  # messages without an answer, by id: their clients
        self._late: list[str] = []

    def find(self, count: int, timeout: float | None = None) -> tuple[str, ...]:
        """The names of `count` clients, once so many nodes have come and said them, in order."""
        end = None if timeout is None else time.monotonic() + timeout
        waiting = Waiting(self._say)
        asked: dict[str, int] = {}  # by message
        nameless: dict[int, float] = {}  # until when a node without a site is left alone
        while True:
            now = time.monotonic()
            known = {*self._nodes.values(), *asked.values()}
            known |= {node for node, until in nameless.items() if until > now}
            new = [node for node in self._grid.get_node_ids() if node not in known]
            queries = [self._message(node, MessageType.QUERY, b"", "names") for node in new]
            asked |= dict(zip(self._push(queries), new, strict=True))
            for reply in self._grid.pull_messages(set(asked)) if asked else ():
                node = asked.pop(reply.metadata.reply_to_message_id)
                name = _bytes_of(reply).decode(errors="replace")
                if name in self._nodes:
                    raise UserError(
                        f"Two nodes go by the name {name!r}: every client needs its own."
                    )
                if name:
                    self._nodes[name] = node
                else:
                    nameless[node] = now + NAMELESS_SECONDS
            if len(self._nodes) >= count:
                return tuple(sorted(self._nodes, key=lambda name: (len(name), name)))
            if end is not None and now > end:
                raise UserError(
                    f"{len(self._nodes)} of {count} clients have come"
                    f" ({', '.join(sorted(self._nodes)) or 'none'}): start the others, and resume"
                    " the run."
                )
            here = f": {listed(sorted(self._nodes))}" if self._nodes else ""
            waiting.look(f"Waiting for clients, {len(self._nodes)} of {count} are here{here}")
            self._sleep(PULL_SECONDS)

    def exchange(
        self, round_number: int, messages: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes]:
        """The answers that came in time; who is not there now is not waited for."""
        here = {c: m for c, m in messages.items() if c in self._nodes}
        pushed = self._push(
            [
                self._message(self._nodes[client], MessageType.TRAIN, data, str(round_number))
                for client, data in here.items()
            ]
        )
        asked = dict(zip(pushed, here, strict=True))
        self._collect_late()
        came = self._pull(round_number, asked, timeout)
        self._waiting |= {i: client for i, client in asked.items() if client not in came}
        return {client: data for client, data in came.items() if data}

    def late(self) -> list[str]:
        self._collect_late()
        found, self._late = self._late, []
        return found

    def _message(self, node: int, kind: str, data: bytes, group: str) -> Message:
        record: dict[str, Any] = {"message": data}
        if self._homes is not None:
            record["sites"] = str(self._homes)
        content = RecordDict({RECORD: ConfigRecord(record)})
        return Message(content, dst_node_id=node, message_type=kind, group_id=group)

    def _push(self, messages: list[Message]) -> list[str]:
        return list(self._grid.push_messages(messages)) if messages else []

    def _pull(
        self, round_number: int, asked: Mapping[str, str], timeout: float | None
    ) -> dict[str, bytes]:
        """Answers by who was asked; empty bytes where Flower itself reports an error."""
        end = None if timeout is None else time.monotonic() + timeout
        waiting = Waiting(self._say)
        came: dict[str, bytes] = {}
        left = set(asked)
        while left and (end is None or time.monotonic() < end):
            for reply in self._grid.pull_messages(left):
                told = reply.metadata.reply_to_message_id
                left.discard(told)
                came[asked[told]] = _bytes_of(reply)
            if left:
                silent = listed([client for told, client in asked.items() if told in left])
                waiting.look(f"Round {round_number + 1} waits for {silent}")
                self._sleep(PULL_SECONDS)
        return came

    def _collect_late(self) -> None:
        for reply in self._grid.pull_messages(set(self._waiting)) if self._waiting else ():
            self._late.append(self._waiting.pop(reply.metadata.reply_to_message_id))

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped


def _bytes_of(message: Message) -> bytes:
    if message.has_error():
        return b""
    record = message.content.config_records.get(RECORD)
    data = None if record is None else record.get("message")
    return data if isinstance(data, bytes) else b""


def reply_with(message: Message, data: bytes) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord({"message": data})}), reply_to=message)


def site_of(message: Message, context: Context) -> Path | None:
    """Whose site this node speaks for: the one its operator named when starting it.

    Only in a simulation, where nodes have numbers and no operators, the message says where the
    sites are; and then only a site that holds a part of a simulated partition is used, never one
    with data of its own.
    """
    named = context.node_config.get("site")
    if named is not None:
        return Path(str(named)).expanduser()
    record = message.content.config_records.get(RECORD)
    sites = None if record is None else record.get("sites")
    if not isinstance(sites, str) or "partition-id" not in context.node_config:
        return None
    site_dir = Path(sites) / str(int(context.node_config["partition-id"]))
    try:
        return site_dir if SiteDirectory.open(site_dir).about.data is None else None
    except UserError:
        return site_dir  # `answer` says what is wrong with it


def answer_train(message: Message, context: Context) -> Message:
    """A round at this client. Nothing is raised: an error's text would travel to the server."""
    site_dir = site_of(message, context)
    if site_dir is None:
        return reply_with(message, b"")
    simulated = "site" not in context.node_config
    try:
        on_step = _until_stopping(site_dir.parent.parent) if simulated else None
        return reply_with(message, answer(site_dir, _bytes_of(message), on_step))
    except SetAside:
        return reply_with(message, b"")


def _until_stopping(run: Path) -> OnStep:
    """After a Ctrl-C a simulation's clients keep the step they are at, and stop."""
    sign = run / STOPPING

    def on_step(_: int) -> None:
        if sign.exists():
            raise SetAside

    return on_step


def answer_name(message: Message, context: Context) -> Message:
    """This client's name; nothing where its site cannot be read."""
    site_dir = site_of(message, context)
    try:
        name = "" if site_dir is None else SiteDirectory.open(site_dir).about.client
    except UserError:
        name = ""
    return reply_with(message, name.encode())
