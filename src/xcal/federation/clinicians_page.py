"""The page that shows a site's clinicians how a model did on their own patients. It stays there."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xcal.data.normalize import to_tensor
from xcal.errors import UserError
from xcal.explain.gradcam import gradcam_maps
from xcal.explain.overlay import overlay, picture
from xcal.federation.files import write_bytes

if TYPE_CHECKING:
    from xcal.federation.local_evaluation import Measured

EXPLAINED = 8  # images, half of them answered wrongly where there are as many
NAMES = {
    "macro_f1": "macro F1",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "calibration_error": "calibration error (ECE)",
}
# Read on a phone too: as wide as it is, and only tables may be moved sideways.
_HEAD = "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
_WIDE = ".wide{overflow-x:auto}@media(max-width:40rem){.wide{font-size:.85rem}}"
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#111;background:#fff}table{border-collapse:collapse;margin:.5rem 0 1.5rem}"
    "th,td{border:1px solid #999;padding:.25rem .6rem;text-align:right}"
    "th:first-child,td:first-child{text-align:left}figure{display:inline-block;margin:.5rem}"
    "figcaption{font-size:.85rem;max-width:16rem}img{width:8rem;image-rendering:pixelated}"
)


def safe(value: object) -> str:
    return html.escape(str(value))


def page_html(title: str, style: str, parts: Iterable[str], head: str = "") -> str:
    """A page that loads and runs nothing."""
    return (
        f"<!doctype html>\n<html lang=en><head>{_HEAD}{head}<title>{safe(title)}</title>"
        f"<style>{style}{_WIDE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def table_html(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    titles = "".join(f"<th scope=col>{safe(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{safe(c)}</td>" for c in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=wide tabindex=0>{table}</div>"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def write_page(
    path: Path, site: str, run: str, records: Sequence[Mapping[str, Any]], measured: Measured
) -> None:
    """All records of a run in one page that needs nothing else."""
    newest = records[-1]
    who = newest["unit"]
    apart = (
        f"None of these {who}s was trained on."
        if newest["apart"]
        else "Nobody says whose these images are: the same people may have been trained on, and"
        " then these numbers flatter the model."
    )
    interval = newest["accuracy_interval"]
    between = "" if interval is None else f" (95 % interval {interval[0]:.3f} to {interval[1]:.3f})"
    parts = [
        f"<h1>{safe(run)} at {safe(site)}</h1>",
        f"<p>Measured on {newest['images']} held-out images of {newest['units']} {safe(who)}s of"
        f" this site. {safe(apart)} This page stays here: its numbers have no privacy guarantee."
        "</p>",
        "<h2>Models</h2>",
        table_html(
            ["model", "after round", *NAMES.values()],
            (
                [r["model"], r["round"], *(number(r[name]) for name in NAMES)]
                for r in sorted(records, key=lambda r: (r["round"], r["model"]))
            ),
        ),
        f"<p>Below: the {safe(newest['model'])} model after round {newest['round']}, right in"
        f" {newest['accuracy']:.1%} of the images{between}.</p>",
        "<h2>Classes</h2>",
        table_html(
            ["class", "sensitivity", "specificity"],
            (
                [name, number(newest["sensitivity"][k]), number(newest["specificity"][k])]
                for k, name in enumerate(newest["classes"])
            ),
        ),
        "<h2>Confidence against truth</h2>",
        table_html(
            ["mean confidence", "share right", "images"],
            (
                [f"{b['confidence']:.2f}", f"{b['right']:.2f}", b["images"]]
                for b in newest["reliability"]
            ),
        ),
    ]
    for column, values in newest["subgroups"].items():
        parts += [f"<h2>By {safe(column)}</h2>", _subgroup_table(column, who, values)]
    parts += ["<h2>What the model looked at</h2>", _explanations(measured)]
    write_bytes(path, page_html(f"{run} at {site}", _STYLE, parts).encode())


def _subgroup_table(column: str, who: str, values: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in values:
        if "fewer_than" in one:
            rows.append([one["value"], f"fewer than {one['fewer_than']}", *[""] * 6])
        else:
            numbers = (number(one[name]) for name in NAMES)
            rows.append([one["value"], one["units"], one["images"], *numbers])
    return table_html([column, f"{who}s", "images", *NAMES.values()], rows)


def _explanations(measured: Measured) -> str:
    images, found = measured.held.images, measured.predictions
    wrong = np.flatnonzero(found.predicted != images.labels)[: EXPLAINED // 2]
    right = np.flatnonzero(found.predicted == images.labels)[: EXPLAINED - len(wrong)]
    chosen = np.concatenate([wrong, right])
    if not len(chosen):
        return "<p>No image to explain.</p>"
    device = next(measured.model.parameters()).device
    inputs = to_tensor(np.asarray(images.pixels[chosen])).to(device)
    try:
        maps = gradcam_maps(measured.model, inputs)
    except UserError as error:
        return f"<p>{safe(error)}</p>"
    figures = []
    for k, index in enumerate(chosen):
        plain = torch.from_numpy(np.array(images.pixels[index])).permute(2, 0, 1) / 255
        truth = measured.held.classes[images.labels[index]]
        said = measured.held.classes[found.predicted[index]]
        drawn = (picture(plain, side=128), overlay(plain, maps[k].cpu(), side=128))
        pictures = "".join(f'<img alt="" src="{_data_uri(one)}">' for one in drawn)
        told = f"{images.ids[index]}: {truth}, said {said} ({found.confidence[index]:.0%})"
        figures.append(f"<figure>{pictures}<figcaption>{safe(told)}</figcaption></figure>")
    return "".join(figures)


def _data_uri(drawn: Any) -> str:
    out = io.BytesIO()
    drawn.save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
