"""Keys that were revoked: nobody proves an identity with one, and no connection outlives it.

FLARE asks everybody for a signature with their certificate's key, in one place: the server asks
sites and people, a site asks the server. After that a site shows a token with every message. So
the list of members is looked at in both places; the server writes down which key a token was for.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

from xcal.errors import UserError
from xcal.federation.files import read_json, write_json
from xcal.federation.nvflare.members import FILE, Members, fingerprint_of_key, known

TOKENS = "tokens.json"  # of a server: the key that each token was given for, tokens as hashes
MOST_TOKENS = 1000


def refuse_revoked(kit: Path) -> None:
    """From now on no revoked key proves anybody's identity to this process."""
    from nvflare.private.fed.utils import identity_utils

    verifier = identity_utils.IdentityVerifier
    ask = verifier.verify_common_name

    def verify_common_name(self: Any, *words: Any, asserter_cert: Any, **named: Any) -> Any:
        key = fingerprint_of_key(asserter_cert.public_key())
        try:
            members = known(kit.parent, kit / "startup" / "rootCA.pem")
        except UserError as error:  # a list that somebody changed admits nobody
            raise identity_utils.InvalidAsserterCert(str(error)) from None
        if members is not None and key in members.revoked:
            raise identity_utils.InvalidAsserterCert(f"the key {key} was revoked")
        return ask(self, *words, asserter_cert=asserter_cert, **named)

    verifier.verify_common_name = verify_common_name


class Tokens:
    """Which key every token was given for, and what the list of members says of it now."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder, root
        self._lock = threading.Lock()
        path = folder / TOKENS
        self._keys: dict[str, str] = read_json(path) if path.exists() else {}
        self._seen: object = None
        self._members: Members | None = None

    def given(self, token: str, key: str) -> None:
        with self._lock:
            self._keys[_hashed(token)] = key
            self._keys = dict(list(self._keys.items())[-MOST_TOKENS:])
            write_json(self._folder / TOKENS, self._keys)

    def refusal(self, name: str, token: str) -> str | None:
        """Why who shows this token is not listened to; None where nothing speaks against it."""
        try:
            members = self._now()
        except UserError as error:
            return str(error)
        if members is None:
            return None
        key = self._keys.get(_hashed(token))
        if key in members.revoked or name in members.shut_out():
            return f"{name}'s key was revoked"
        return None

    def _now(self) -> Members | None:
        """The list, read again only where its file changed: this is asked for every message."""
        path = self._folder / FILE
        with self._lock:
            about = path.stat() if path.exists() else None
            seen = about and (about.st_mtime_ns, about.st_size, about.st_ino)
            if seen != self._seen:
                self._members = known(self._folder, self._root)
                self._seen = seen
            return self._members


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def end_revoked(kit: Path) -> None:
    """From now on this server answers no message of a revoked key, however long it is connected."""
    from nvflare.fuel.f3.cellnet.defs import IdentityChallengeKey
    from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
    from nvflare.fuel.f3.cellnet.utils import make_reply
    from nvflare.private.defs import CellMessageHeaderKeys
    from nvflare.private.fed.server.fed_server import FederatedServer
    from nvflare.private.fed.utils.identity_utils import load_crt_chain_bytes

    tokens = Tokens(kit.parent, kit / "startup" / "rootCA.pem")
    register, validate = FederatedServer.register_client, FederatedServer._validate_auth_headers

    def register_client(self: Any, request: Any) -> Any:
        reply = register(self, request)
        token = token_in(reply)
        if token is not None:
            shown = load_crt_chain_bytes(request.payload[IdentityChallengeKey.CERT])[0]
            tokens.given(token, fingerprint_of_key(shown.public_key()))
        return reply

    def validate_auth_headers(self: Any, message: Any) -> Any:
        reply = validate(self, message)
        if reply is not None:
            return reply
        name = message.get_header(CellMessageHeaderKeys.CLIENT_NAME)
        token = message.get_header(CellMessageHeaderKeys.TOKEN)
        why = tokens.refusal(name, token) if name and token else None
        if why is None:
            return None
        if token in self.client_manager.clients:  # once: then it is no client any more
            self.logger.warning(f"{why}: its connection is ended.")
            threading.Thread(target=self.logout_client, args=(token,), daemon=True).start()
        return make_reply(CellReturnCode.UNAUTHENTICATED, why)

    FederatedServer.register_client = register_client
    FederatedServer._validate_auth_headers = validate_auth_headers


def token_in(reply: Any) -> str | None:
    """The token that a registration was answered with; None where it was refused."""
    from nvflare.private.defs import CellMessageHeaderKeys

    found = reply.payload if isinstance(reply.payload, dict) else {}
    token = found.get(CellMessageHeaderKeys.TOKEN)
    return token if isinstance(token, str) else None
