"""FEDERATION.toml and invitations: whatever is wrong is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from xcal.errors import UserError
from xcal.federation.nvflare.hardening import NEVER, ROLES, authorization
from xcal.federation.nvflare.parties import Invitation, Party, read_federation

GOOD = 'name = "three"\nsites = ["a", "b"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('sites = ["a"]', "lacks name"),
        ('name = "x"', "lacks sites"),
        (GOOD + "port = 80", "port = 80"),
        (GOOD + 'server = "https://x"', "host name"),
        (GOOD + 'sitez = ["a"]', "Did you mean 'sites'"),
        ('name = "x"\nsites = ["a", "A"]', "twice"),
        ('name = "x"\nsites = ["../a"]', "letters"),
        ('name = "x"\nsites = ["server"]', "taken"),
        ('name = "x"\nsites = []', "sites = []"),
        (GOOD + 'lead = "me"', "address"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_bad_federation_file_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "FEDERATION.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_federation(path)
    assert said in str(error.value)
    assert str(error.value).count("\n") == 0 or "TOML" in said


def test_a_missing_federation_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="check the path"):
        read_federation(tmp_path / "none.toml")


def test_an_invitation_comes_back_as_written(tmp_path: Path) -> None:
    made = Invitation("three", "site", "a", "a", "localhost", 8002, "SHA256:00")
    made.write(tmp_path / "a.toml")
    assert Invitation.read(tmp_path / "a.toml") == made


@pytest.mark.parametrize("text", ["x = 1", 'name = "../../x"', ""])
def test_what_is_no_invitation(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(UserError, match="is not an invitation"):
        Invitation.read(tmp_path / "a.toml")


def test_no_role_may_bring_code_or_a_shell() -> None:
    for party in ("server", "site"):
        permissions = authorization(party)["permissions"]
        assert set(permissions) == set(ROLES)
        for rights in permissions.values():
            assert all(rights[never] == "none" for never in NEVER)
    site = authorization("site")["permissions"]
    assert all(rights["view"] == "none" for rights in site.values())


def test_a_folder_that_is_no_party(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a party's folder"):
        Party.find(tmp_path)
