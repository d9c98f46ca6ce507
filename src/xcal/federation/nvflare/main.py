"""FLARE's process of a party, with one more question: was the key of who comes revoked?

FLARE asks everybody for a signature with their certificate's key, in one place: the server asks
sites and people, a site asks the server. That is where the list of members is looked at.

`python -m xcal.federation.nvflare.main MODULE -m KIT …`
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from xcal.errors import UserError
from xcal.federation.nvflare.members import fingerprint_of_key, known


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


def main() -> None:
    module, *words = sys.argv[1:]
    refuse_revoked(Path(words[words.index("-m") + 1]))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
