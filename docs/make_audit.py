"""Write docs/audit.md from the results of `xcal audit` and of the planted mutants.

python docs/make_audit.py benchmarks/results/audit
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from xcal.audit.inversion import Inverted, psnr
from xcal.audit.parts import draw_inversion, load_inverted

HERE = Path(__file__).parent

HEAD = """# What attacks found

A written guarantee is a promise; that attacks have failed to break it is evidence, as strong as the
attacks are. So every attack here is also run where it must succeed: on training
without privacy, and on mechanisms broken on purpose. All figures below come from
`benchmarks/results/audit`, made by the commands named, on `smear` at 32 pixels (seed 0, one client,
δ = 1e-5); this page is generated from them by `python docs/make_audit.py benchmarks/results/audit`.

"""

ONE_RUN = """## Canaries in one run

Steinke, Nasr and Jagielski (2023): m canaries, each included with probability ½; an observer
guesses which, or abstains; too many right guesses refute (ε, δ) at 95 % confidence. Canaries go
through the real round: sampler, clipping, noise, filter, ledger. A canary that is left out remains
a unit which contributes zero, as in the neighbors of our guarantee, and the number of units is the
declared one.

- *gradient*: a fixed direction of norm C, the most that a unit can do, orthogonal to all others.
- *mislabeled*: a real image under another label, through network, clipping and signal.
- *client*: a whole client's update of norm C, for methods whose noise a trusted server adds. At
  record level there is no guarantee against that server, and mislabeled images are found or not as
  in plain training.

*Seen* is the attacker's view: every **step**'s release (what the guarantee covers, and more than
any server gets); every **round**'s weights (the honest-but-curious server; for client canaries,
what clients get); the **final** model alone. *At best* is the ε found if every guess were right:
with this many canaries no audit can show more. *Expected* is what an ideal auditor finds on average
against exactly the noise that was charged: the theorem is far from tight for subsampled Gaussians
at small δ, so a bound near it means that the audit works and that there is nothing more to find.
*p* is the probability of as many right guesses if no more leaked than was charged: this is the
sharper test, and a p below 1e-4, less noise than charged in any release, or ε found above ε claimed
are reported as a broken guarantee. Methods without a guarantee (ε = ∞) are attacked as well.

"""

MEMBERSHIP = """## Membership inference

A pool of images, a random half of them in each model; the loss alone (Yeom et al. 2018) and
likelihood ratios with the other models as shadows (LiRA, Carlini et al. 2022), on the final model;
in plain training it has memorized its images. Intervals are 95 %, by resampling images. *Allowed*
is the highest true positive rate that (ε, δ) admits at 1 % false positives. `dp-fedavg` has no
guarantee per image (its guarantee is per client, by a trusted server): what that server sees is
plain training.

"""

INVERSION = """## Gradient inversion

The server treats a client's update as a gradient and searches for images that produce it: DLG (Zhu
et al. 2019; L-BFGS on the squared distance) and the angle with a total-variation prior (Geiping et
al. 2020). *One step*: one image, batch 1, the label read off the last layer. *Whole round*: two
images, two Poisson steps; the attacker is even told labels and how often each image was drawn. The
network on which the attack succeeds is a LeNet with sigmoids and no normalization
(`xcal.audit.networks:lenet32`): its gradients contain the image, including its brightness. `small`
standardizes its input and has ReLUs after GroupNorm; its reconstructions are given the originals'
mean and standard deviation per channel before they are compared, which favors the attack, and it
still finds nothing. The private updates are those of `fl-dp` at a client with only these images: no
other gradients hide them. The attacker's settings are the same everywhere; a smoother prior would
turn its noise into gray, which has {gray:.1f} dB (each picture's own mean color).

![Reconstructions beside originals](inversion.png)

"""

MUTANTS = """## Mechanisms broken on purpose

Each mutant replaces real code while the check runs (`tests/audit/mutants.py`); a check that fails
has caught it. `python tests/audit/run_mutants.py`, part of `make test-audit`, runs all of this, and
that every check passes without a mutant.

"""

TAIL = """## What this does not show

An audit bounds ε from below. It tries what we thought of, at these settings, on one synthetic data
set; it says nothing about timing or a client's own machine. One-run audits at δ = 1e-5 find about a
fifth to a third of ε even with an ideal canary; *p* and the mutants show what they can detect
nevertheless.
"""


def number(value: float | None, digits: int, missing: str = "–") -> str:
    return missing if value is None else f"{value:.{digits}f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n\n"


def one_run(rows: list[dict[str, Any]]) -> str:
    head = [
        "method",
        "canaries",
        "seen",
        "ε claimed",
        "ε found",
        "expected",
        "at best",
        "right",
        "p",
    ]
    return table(
        head,
        [
            [
                f"`{r['method']}`" + (", level client" if r.get("level") == "client" else ""),
                f"{r['canaries']} {r['canary']}",
                r["view"],
                "∞" if r["epsilon_claimed"] is None else f"{r['epsilon_claimed']:g}",
                number(r["epsilon_found"], 2),
                number(r["expected"], 2),
                number(r["strongest"], 2),
                f"{100 * r['accuracy']:.0f} %",
                number(r["p_charged"], 2),
            ]
            for r in rows
        ],
    )


def membership(rows: list[dict[str, Any]]) -> str:
    head = ["method", "attack", "ε", "AUC", "TPR at 1 % FPR", "allowed", "right in/out"]
    return table(
        head,
        [
            [
                f"`{r['method']}`",
                r["attack"],
                "∞" if r["epsilon_claimed"] is None else f"{r['epsilon_claimed']:g}",
                f"{r['auc']:.2f} ({r['auc_low']:.2f}–{r['auc_high']:.2f})",
                f"{r['tpr']:.3f} ({r['tpr_low']:.3f}–{r['tpr_high']:.3f})",
                number(r["tpr_limit"], 2),
                f"{r['train_accuracy']:.2f}/{r['outside_accuracy']:.2f}",
            ]
            for r in rows
        ],
    )


def inversion(rows: list[dict[str, Any]]) -> str:
    head = ["update of", "network", "attack", "ε", "PSNR (dB), each", "median SSIM", "≥ 20 dB"]
    return table(
        head,
        [
            [
                r["setting"],
                r["network"].rpartition(":")[2],
                r["attack"],
                "∞" if r["epsilon"] is None else f"{r['epsilon']:g}",
                ", ".join(f"{v:.1f}" for v in r["psnr"]),
                number(r["median_ssim"], 2),
                f"{100 * r['recovered']:.0f} %",
            ]
            for r in rows
        ],
    )


def mutants(found: dict[str, Any]) -> str:
    rows = []
    for row in found["mutants"]:
        for check, caught in row["caught"].items():
            where = check.replace("::", "<br>")
            rows.append([row["what"], f"`{row['mutant']}`", where, "yes" if caught else "no"])
    return table(["what is broken", "mutant", "check", "caught"], rows)


def made_by(results: list[dict[str, Any]], attack: str) -> str:
    """Commands and the code that was run."""
    lines = []
    for r in results:
        if attack in r:
            code = r.get("code") or f"commit {(r['commit'] or 'unknown')[:9]}"
            lines.append(f"`{r['command']}` ({code})")
    return "Made by " + "; ".join(lines) + ".\n\n" if lines else ""


def gray(found: list[Inverted]) -> float:
    """The median PSNR of answering with each original's own mean color."""
    originals = found[0].originals
    return float(
        psnr(originals, originals.mean((2, 3), keepdim=True).expand_as(originals)).median()
    )


def inverted(folder: Path) -> list[Any]:
    """What inversions left as arrays."""
    return [r for path in sorted(folder.glob("*.npz")) for r in load_inverted(path)]


def page(folder: Path) -> str:
    """The page on these results; the picture of inversions stands beside it."""
    results = [
        json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if p.stem != "mutants"
    ]
    if not results:
        raise SystemExit(f"{folder} has no results of an audit: the page stays as it is.")
    found = inverted(folder)
    text = HEAD
    for attack, lead, show in (
        ("one-run", ONE_RUN, one_run),
        ("membership", MEMBERSHIP, membership),
        ("inversion", INVERSION, inversion),
    ):
        rows = [
            {**row, "level": r["settings"].get("level")}
            for r in results
            for row in r.get(attack, ())
        ]
        if attack == "inversion":
            rows.sort(key=lambda r: (r["network"] == "small", -(r["epsilon"] or 1e9), r["setting"]))
        if rows:
            lead = lead.replace("{gray:.1f}", f"{gray(found):.1f}") if found else lead
            text += lead + show(rows) + made_by(results, attack)
    path = folder / "mutants.json"
    if path.exists():
        text += MUTANTS + mutants(json.loads(path.read_text()))
    return text + TAIL


def main(folder: Path) -> None:
    (HERE / "audit.md").write_text(page(folder))
    if found := inverted(folder):
        draw_inversion(found, HERE / "inversion.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
