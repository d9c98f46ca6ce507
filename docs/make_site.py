"""Builds the documentation site: python docs/make_site.py --out site

Pages of docs/ and of the root, notebooks, and a reference made of docstrings, keys and commands,
put together in a folder of their own and built by mkdocs-material (extra `docs`), where every
warning is an error. The site needs no network and may be opened as files.
"""

from __future__ import annotations

import argparse
import base64
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def _title(notebook: Path) -> str:
    """The heading of its first cell."""
    first = "".join(json.loads(notebook.read_text())["cells"][0]["source"])
    return first.splitlines()[0].removeprefix("# ")


# Four parts: learn, do, look up, understand. Every page stands in one of them.
NAV: dict[str, dict[str, str]] = {
    "Tutorials": {
        "First steps": "index.md",
        "Your own training loop": "library.md",
        **{_title(path): f"notebook-{path.stem}.md" for path in NOTEBOOKS},
    },
    "How-to": {
        "Import images": "data.md",
        "Choose settings": "recipes.md",
        "Compare methods": "studies.md",
        "Deploy between hospitals": "deploy.md",
        "From an empty server to a site": "server.md",
        "Run a site": "federation.md",
        "Use Flower": "flower.md",
        "Bring your own app": "own-apps.md",
        "Extend it": "extending.md",
        "Survive faults": "faults.md",
    },
    "Reference": {
        "Public names": "names.md",
        "Commands": "commands.md",
        "Configuration": "configuration.md",
        "Messages": "messages.md",
        "Methods": "methods.md",
        "Metrics": "metrics.md",
        "Maps": "maps.md",
        "Results": "results.md",
        "Results where models learn": "results-probe.md",
        "Architecture": "architecture.md",
        "Changes": "changelog.md",
    },
    "Explanation": {
        "The guarantee": "guarantee.md",
        "The method": "method.md",
        "Threat model": "security.md",
        "What attacks found": "audit.md",
        "Findings": "findings.md",
        "Where models learn": "findings-probe.md",
        "Findings at the laptop scale": "findings-laptop.md",
        "Common pitfalls": "pitfalls.md",
        "Glossary": "glossary.md",
    },
}
FROM_ROOT = {"README.md": "index.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


# --- the reference --------------------------------------------------------------------------------


def names_page() -> str:
    """The public names and what their docstrings say."""
    import xcal

    lines = ["# Public names", "", "Made of the docstrings of `xcal` and `xcal.explain`.", ""]
    for module, prefix in ((xcal, "xcal"), (xcal.explain, "xcal.explain")):
        for name in sorted(module.__all__):
            found = getattr(module, name)
            if name.startswith("__") or isinstance(found, ModuleType):
                continue
            lines += _described(found, f"{prefix}.{name}", "##")
            if inspect.isclass(found):
                for method, member in inspect.getmembers(found, callable):
                    if not method.startswith("_") and inspect.getdoc(member):
                        lines += _described(member, f"{name}.{method}", "###")
    return "\n".join(lines) + "\n"


def _described(found: Any, name: str, level: str) -> list[str]:
    try:
        signature = str(inspect.signature(found)).replace("'", "")
    except (TypeError, ValueError):
        signature = ""
    text = inspect.getdoc(found) or ""
    return [f"{level} {name}", "", "```text", f"{name}{signature}", "", text, "```", ""]


def commands_page() -> str:
    """Every command of `xcal` with its arguments and options."""
    import click
    from typer.main import get_command

    from xcal.cli.app import app

    lines = [
        "# Commands",
        "",
        "Made of the commands themselves; `xcal COMMAND --help` says the same.",
        "",
    ]

    def tell(command: Any, words: str) -> None:
        if isinstance(command, click.Group):
            for name in sorted(command.commands):
                if not command.commands[name].hidden:
                    tell(command.commands[name], f"{words} {name}")
            return
        lines.extend([f"## {words}", "", _plain(inspect.cleandoc(command.help or "")), ""])
        rows = []
        for each in command.params:
            if isinstance(each, click.Argument):
                shown = f"`{each.name.upper()}`"
            else:
                shown = ", ".join(f"`{name}`" for name in each.opts if name.startswith("-"))
            rows.append(f"| {shown} | {_plain(getattr(each, 'help', None) or '')} |")
        if rows:
            lines.extend(["| | |", "|---|---|", *rows, ""])

    tell(get_command(app), "xcal")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def notebook_page(path: Path, images: Path) -> str:
    """A notebook as Markdown, with the output that it keeps."""
    lines: list[str] = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        lines += ["```python", source, "```", ""]
        for output in cell["outputs"]:
            text = "".join(output.get("text", ()))
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{number}.png"
                (images / name).write_bytes(base64.b64decode("".join(data["image/png"])))
                lines += [f"![What the cell shows]({name})", ""]
            elif text or "text/plain" in data:
                shown = text or "".join(data["text/plain"])
                lines += ["```text", shown.rstrip(), "```", ""]
    lines.append(f"The file: `examples/notebooks/{path.name}`.")
    return "\n".join(lines) + "\n"


# --- putting it together --------------------------------------------------------------------------


def gather(folder: Path) -> None:
    """All pages in one folder, with links that lead to pages of the site or to none."""
    sources = {path.name: path for path in DOCS.glob("*.md")}
    sources |= {new: ROOT / old for old, new in FROM_ROOT.items()}
    for name, path in sources.items():
        text = path.read_text(encoding="utf-8")
        (folder / name).write_text(_relinked(text, path, sources), encoding="utf-8")
    for picture in DOCS.glob("*.png"):
        shutil.copyfile(picture, folder / picture.name)
    (folder / "names.md").write_text(names_page(), encoding="utf-8")
    (folder / "commands.md").write_text(commands_page(), encoding="utf-8")
    for path in NOTEBOOKS:
        page = notebook_page(path, folder)
        (folder / f"notebook-{path.stem}.md").write_text(page, encoding="utf-8")


def _relinked(text: str, page: Path, sources: dict[str, Path]) -> str:
    """Links to pages stay; a link to another file of the repository becomes its name."""
    name_of = {path.resolve(): name for name, path in sources.items()}

    def target(address: str) -> str | None:
        path, mark, anchor = address.partition("#")
        found = (page.parent / path).resolve() if path else page.resolve()
        if found in name_of:
            return f"{name_of[found]}{mark}{anchor}"
        return found.name if found.suffix == ".png" and found.parent == DOCS else None

    def link(match: re.Match[str]) -> str:
        picture, words, address = match.groups()
        if re.match(r"[a-z]+:", address):
            return match[0]
        found = target(address)
        if found is not None:
            return f"{picture}[{words}]({found})"
        where = str((page.parent / address.partition("#")[0]).resolve().relative_to(ROOT))
        return words if where in words else f"{words} (`{where}`)"

    def reference(match: re.Match[str]) -> str:
        found = target(match[2])
        return f"[{match[1]}]: {found or '#'}"

    text = LINK.sub(link, text)
    return re.sub(r"^\[([a-z0-9-]+)\]: (?!https?:)(\S+)$", reference, text, flags=re.MULTILINE)


def settings(docs: Path, out: Path) -> dict[str, Any]:
    return {
        "site_name": "XCal-FL",
        "docs_dir": str(docs),
        "site_dir": str(out),
        "use_directory_urls": False,
        "theme": {
            "name": "material",
            "font": False,  # the reader's own: nothing is fetched
            "features": ["navigation.tabs", "navigation.top", "content.code.copy"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "plugins": ["search"],
        "markdown_extensions": [
            "tables",
            "fenced_code",
            "sane_lists",
            {"toc": {"permalink": True}},
        ],
        "validation": {"links": {"anchors": "warn"}, "nav": {"omitted_files": "warn"}},
        "nav": [{part: [{t: p} for t, p in pages.items()]} for part, pages in NAV.items()],
    }


def build(out: Path) -> None:
    """Build, or end with mkdocs' own exit code."""
    with tempfile.TemporaryDirectory() as made:
        docs = Path(made) / "docs"
        docs.mkdir()
        gather(docs)
        file = Path(made) / "mkdocs.yml"
        file.write_text(json.dumps(settings(docs, out.resolve())))  # JSON is YAML
        words = ["build", "--strict", "--quiet", "--config-file", str(file)]
        quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement
        done = subprocess.run([sys.executable, "-m", "mkdocs", *words], check=False, env=quiet)
    if done.returncode:
        sys.exit(done.returncode)


def fetched(out: Path) -> list[str]:
    """What pages of a built site would ask other machines for."""
    found = set()
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        found |= set(re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:[^\"\s>]+)", text))
        for tag in re.findall(r"<link[^>]*>", text):
            if re.search(r"rel=\"?(stylesheet|preconnect|preload|icon)", tag):
                found |= set(re.findall(r"href=\"?(https?:[^\"\s>]+)", tag))
    return sorted(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    chosen = parser.parse_args().out
    build(chosen)
    if asked := fetched(chosen):
        sys.exit(f"The site would fetch {', '.join(asked)}.")
    print(
        f"The site is in {chosen}: open index.html; its search needs `python -m http.server"
        f" --directory {chosen}`."
    )
