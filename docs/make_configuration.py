"""Writes docs/configuration.md from the experiment's own fields; a test keeps the two together."""

from __future__ import annotations

from pathlib import Path

from xcal.experiments import experiment_type
from xcal.methods.registry import METHODS

HEAD = """# Configuration

An experiment is a flat TOML file, and `--set key=value` on top of it. This page is generated from
`xcal.config.Experiment` and the methods' own keys by `python docs/make_configuration.py`. A key
that the method does not use is accepted and named as unused.

| key | default | what it is | used by |
|---|---|---|---|
"""


def page() -> str:
    lines = []
    for name, field in experiment_type().model_fields.items():
        users = [m for m, method in METHODS.items() if name in method.uses]
        used = "all" if len(users) == len(METHODS) else ", ".join(users)
        default = "–" if field.default is None else f"`{field.default}`"
        lines.append(f"| `{name}` | {default} | {field.description} | {used} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("configuration.md").write_text(page())
