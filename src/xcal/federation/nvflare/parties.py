"""Who takes part: the federation's file, invitations, and the folder each party holds."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from xcal.config import read_toml, to_toml
from xcal.errors import UserError
from xcal.federation.files import (
    check_unused,
    own_folder,
    read_json,
    read_table,
    write_bytes,
    write_json,
)

Role = Literal["server", "site", "lead", "viewer"]

_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HOST = re.compile(
    r"([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
)
_PERSON = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}")


def _like(told: str, *patterns: re.Pattern[str]) -> AfterValidator:
    def check(value: str) -> str:
        if not any(pattern.fullmatch(value) for pattern in patterns):
            raise ValueError(told)
        return value

    return AfterValidator(check)


Plain = Annotated[str, _like("letters, digits, - and _ only", _SITE)]
Host = Annotated[str, _like("a host name without scheme and port", _HOST)]
Person = Annotated[str, _like("an address such as lead@hospital.example", _PERSON)]


class FederationFile(BaseModel):
    """FEDERATION.toml: what the coordinator decides once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Plain = Field(description="the federation's name")
    server: Host = Field(
        "localhost", description="host name under which the sites reach the server"
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(8002, description="the server's port")
    sites: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="names of the hospitals"
    )
    lead: Person = Field("lead@federation.example", description="who may submit, as an address")
    viewers: tuple[Person, ...] = Field((), description="who may look and not submit, as addresses")
    organization: Plain = Field("coordinator", description="the coordinator's organization")
    certificate_days: Annotated[int, Field(ge=1, le=1095)] = Field(
        360, description="how long a certificate lasts"
    )

    @field_validator("sites")
    @classmethod
    def _sites(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not _SITE.fullmatch(value) or value[0].isdigit():  # FLARE would read a number
                raise ValueError(f"{value!r}: a letter, then letters, digits, - and _ only")
            if value in ("server", "coordinator"):
                raise ValueError(f"{value!r} is taken by the coordinator")
        if len({v.lower() for v in values}) < len(values):
            raise ValueError("a name stands twice")
        return values


def read_federation(path: Path) -> FederationFile:
    """The coordinator's file, checked; the first problem becomes one sentence."""
    return read_table(FederationFile, path, "federation file", "check the path")


@dataclass(frozen=True)
class Invitation:
    """What a party must know before it makes its key: public, but its fingerprint is compared."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    federation: Plain
    role: Role
    name: Annotated[str, _like("a name", _SITE, _PERSON, _HOST)]
    organization: str
    server: Host
    port: StrictInt
    fingerprint: str  # of the federation's root certificate

    def write(self, path: Path) -> None:
        text = (
            "# An invitation to a federation. It holds no secret; compare the fingerprint with\n"
            "# the coordinator over another channel (telephone) before you join.\n"
        )
        write_bytes(path, (text + to_toml(asdict(self))).encode())

    @staticmethod
    def read(path: Path) -> Invitation:
        try:
            return TypeAdapter(Invitation).validate_python(read_toml(path, "invitation"))
        except ValidationError:
            raise UserError(f"{path} is not an invitation: ask the coordinator for it.") from None


@dataclass(frozen=True)
class Party:
    """A folder that one party holds: key, kit, and a site directory or the server's runs.

    Nothing in it is shared: the private key is made in it and never leaves it.
    """

    folder: Path
    about: Invitation

    @staticmethod
    def create(folder: Path, about: Invitation) -> Party:
        check_unused(folder)
        own_folder(folder)
        write_json(folder / "party.json", asdict(about))
        return Party(folder, about)

    @staticmethod
    def find(folder: Path) -> Party:
        path = folder / "party.json"
        if not path.exists():
            raise UserError(
                f"{folder} is not a party's folder: make one with `xcal federation join` or"
                " `xcal federation init`."
            )
        try:
            about = Invitation(**read_json(path))
        except TypeError:
            raise UserError(f"{path} cannot be read: it is damaged.") from None
        return Party(folder.resolve(), about)

    @property
    def request_folder(self) -> Path:
        """Where the key is made; after `accept` it lives in the kit alone."""
        return self.folder / "request"

    @property
    def request_file(self) -> Path:
        return self.request_folder / f"{self.about.name}.request.zip"

    @property
    def kit(self) -> Path:
        return self.folder / "kit"

    @property
    def startup(self) -> Path:
        return self.kit / "startup"

    @property
    def local(self) -> Path:
        return self.kit / "local"

    @property
    def site_dir(self) -> Path:
        """A site's directory: data reference, ledger, policy, refusal log."""
        return site_dir_in(self.folder)

    @property
    def runs(self) -> Path:
        """The server's runs: checkpoints and results."""
        return self.folder / "runs"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def certificate(self) -> Path:
        return self.startup / ("server.crt" if self.about.role == "server" else "client.crt")

    @property
    def key(self) -> Path:
        return self.startup / ("server.key" if self.about.role == "server" else "client.key")

    @property
    def root(self) -> Path:
        return self.startup / "rootCA.pem"

    def accepted(self) -> bool:
        return self.key.exists()

    def require_kit(self) -> None:
        if not self.accepted():
            raise UserError(
                f"{self.folder} has no kit yet: bring the coordinator's answer and run"
                f" `xcal federation accept`."
            )


def site_dir_in(folder: Path) -> Path:
    """The site directory beside a kit; a folder of the first edition calls it `home`."""
    old, new = folder / "home", folder / "site"
    return old if old.exists() and not new.exists() else new


def organization_of(name: str) -> str:
    """FLARE's organisations know letters, digits and _ only."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)
