"""`xcal data`: import real image sets, see what they hold, see how they would be spread."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import typer
from typer import Argument, Option

from xcal.cli.show import LiveProgress, make_table, plain_console
from xcal.data.catalog import load, show_dataset

app = typer.Typer(
    help="Real image sets: import, list, show, partition, constants.", no_args_is_help=True
)


@app.command("import")
def import_command(
    path: Path = Argument(..., help="A folder, a zip, a CSV or an .npz file; images may be DICOM."),
    name: str | None = Option(None, help="What to call it; taken from the set if not given."),
    kind: str = Option(
        "auto",
        help="auto, blood-cells, blood-cells-as-shipped, chest-xray14, isic, medmnist, csv,"
        " folders or dicom.",
    ),
    pixels: int = Option(128, help="Side of the square images that are kept."),
    task: str | None = Option(
        None, help="What to tell apart, where a set has several; findings: all at once."
    ),
    skip_bad: bool = Option(False, "--skip-bad", help="Leave files out that cannot be used."),
    replace: bool = Option(False, "--replace", help="Replace a set of this name and size."),
    path_column: str | None = Option(None, help="A CSV's column that names the image file."),
    label_column: str | None = Option(
        None,
        help="A CSV's column that holds the class; of findings with a column of 0 and 1 each, all"
        " of them with commas between.",
    ),
    group_column: str | None = Option(
        None, help="A CSV's column that says whose image it is, such as the patient's number."
    ),
    one_image_per_person: bool = Option(
        False,
        "--one-image-per-person",
        help="Declare that no two images show one person, where the set names nobody.",
    ),
    all_train: bool = Option(
        False, "--all-train", help="Hold no images back for validation and test."
    ),
) -> None:
    """Read a data set as hospitals and Kaggle give it; decoded once, kept for `data=NAME`."""
    from xcal.data.importing import import_dataset

    with LiveProgress(plain_console()) as shown:
        summary = import_dataset(
            path,
            name=name,
            kind=kind,  # type: ignore[arg-type]  # checked by import_dataset
            pixels=pixels,
            task=task,
            skip_bad=skip_bad,
            replace=replace,
            progress=partial(shown.count, "decoding", "images"),
            path_column=path_column,
            label_column=label_column,
            group_column=group_column,
            one_image_per_person=one_image_per_person,
            all_train=all_train,
        )
    if summary.already_there:
        typer.echo("This content was imported before, in the same way: nothing had to be done.")
    found = show_dataset(summary.info.name, pixels=summary.info.pixels)
    typer.echo(found.to_text())
    typer.echo(
        f"Train on it with `xcal run --set data={summary.info.name}"
        f" --set pixels={summary.info.pixels} --out DIR`."
    )


@app.command("list")
def list_command() -> None:
    """List the imported sets."""
    from xcal.data.image_store import list_datasets
    from xcal.data.listing import SPLITS
    from xcal.data.synthetic import CLASSES, smear

    sizes = inspect.signature(smear).parameters
    counts = [f"{sizes[split].default:,}" for split in SPLITS]
    rows: list[tuple[object, ...]] = [
        ("smear", "any", "embedded", len(CLASSES), *counts, "patient"),
    ]
    for info in list_datasets():
        counts = [f"{info.splits[split].images:,}" for split in SPLITS]
        rows.append(
            (info.name, info.pixels, info.kind, len(info.classes), *counts, info.group_name)
        )
    heads = ("name", ">pixels", "kind", ">classes", *(f">{s}" for s in SPLITS), ">groups")
    plain_console().print(make_table(None, heads, rows))


@app.command("show")
def show_command(
    name: str = Argument(..., help="An imported set's name, or smear."),
    pixels: int | None = Option(None, help="Which size, where there are several."),
    sheet: Path | None = Option(None, help="Also write a contact sheet to this PNG."),
) -> None:
    """Show counts per split, class and group, sizes, license; and a contact sheet."""
    from xcal.data.pictures import contact_sheet

    found = show_dataset(name, pixels=pixels)
    typer.echo(found.to_text())
    if sheet is not None:
        contact_sheet(found.data, sheet)
        typer.echo(f"Contact sheet: {sheet}")


@app.command("partition")
def partition_command(
    name: str = Argument(..., help="An imported set's name, or smear."),
    pixels: int | None = Option(None, help="Which size, where there are several."),
    clients: int = Option(3, help="Number of clients."),
    kind: str = Option("iid", help="iid, label, label-extreme or covariate."),
    concentration: float = Option(0.5, help="Dirichlet concentration of a label shift."),
    seed: int = Option(0, help="Of the partition."),
    unit: str | None = Option(
        None, help="record or group; by default group where the set names groups."
    ),
    keep_groups: bool = Option(True, help="Keep a group's images at one client."),
    out: Path = Option(Path("partition.png"), help="Where the picture goes."),
) -> None:
    """Draw the federation: what each client would hold."""
    from xcal.data.partition import partition
    from xcal.data.pictures import partition_picture
    from xcal.experiments import make_experiment
    from xcal.federation.setup import with_unit

    checked = make_experiment(
        {
            "clients": clients,
            "partition": kind,
            "concentration": concentration,
            "seed": seed,
            "unit": unit,
            "keep_groups": keep_groups,
        },
        "the options",
    )
    data = load(name, pixels=pixels)
    parts = partition(
        data.train,
        checked.clients,
        kind=checked.partition,
        concentration=checked.concentration,
        seed=checked.seed,
        keep_groups=checked.keep_groups,
        unit=with_unit(checked, data).privacy_unit,
    )
    partition_picture(data.train, data.classes, parts, out)
    for client, shard in enumerate(parts.shards):
        typer.echo(f"client {client}: {len(shard.indices):,} images")
    typer.echo(f"Picture: {out}")


@app.command("constants")
def constants_command(
    name: str = Argument(..., help="An imported set's name, or smear."),
    weights: Path = Option(..., help="Published weights, .safetensors or .pth."),
    out: Path = Option(..., help="Where weights and constants go, .safetensors."),
    pixels: int = Option(128, help="Side of the images."),
    head_reads: str = Option("stages:4-6", help="What the head reads, as in an experiment."),
    network: str = Option("efficientnet_b0", help="The network that the weights are of."),
    pool_views: str = Option("none", help="As in an experiment."),
    whiten: float = Option(0.0, help="As in an experiment."),
) -> None:
    """Add the constants of a set's public validation images to a weights file.

    `xcal run` does so by itself; clients elsewhere need the file, as they need any weights.
    """
    from xcal.errors import UserError
    from xcal.experiments import make_experiment
    from xcal.federation.constants import public_images, write_constants

    if out.suffix != ".safetensors":
        raise UserError(f"--out {out} should end in .safetensors, which is what is written.")
    keys = {
        "data": name,
        "pixels": pixels,
        "network": network,
        "norm": "frozen",
        "weights": str(weights),
        "head_reads": head_reads,
        "pool_views": pool_views,
        "whiten": whiten,
    }
    experiment = make_experiment(keys, "the options")
    images = public_images(experiment)
    write_constants(experiment, images, out)
    typer.echo(
        f"{out} holds {weights.name} and constants of {len(images)} public images of {name}:"
        f" train with `--set weights={out} --set head_reads={head_reads}"
        f" --set pool_views={pool_views} --set whiten={whiten:g}`."
    )
