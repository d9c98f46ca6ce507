"""FLARE's process of a party, with four things added.

Was the key of who comes, or who is connected already, revoked (`revoked`)? Does a job bring code,
or name a class that is not ours (`foreign`)? And of the server: one site whose worker or whose
whole machine dies does not end the run, and it comes back (`rejoin`).

`python -m xcal.federation.nvflare.main MODULE -m KIT …`
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from xcal.federation.nvflare.foreign import refuse_foreign
from xcal.federation.nvflare.rejoin import survive_sites
from xcal.federation.nvflare.revoked import end_revoked, refuse_revoked


def main() -> None:
    module, *words = sys.argv[1:]
    kit = Path(words[words.index("-m") + 1])
    refuse_revoked(kit)
    server = ".server." in module
    refuse_foreign(kit, "server" if server else "site")
    if server:
        end_revoked(kit)
        survive_sites(kit)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
