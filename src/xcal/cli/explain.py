"""`xcal explain`: what a trained model says of images, and why."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from typer import Argument, Option

from xcal import plotting
from xcal.cli.show import LiveProgress, make_table, plain_console
from xcal.errors import UserError

PAGE = "explanations.html"


def explain_command(
    run: Path = Argument(..., help="The folder of a finished run."),
    images: list[str] = Argument(
        ..., help="Image files, folders of them, or test:ID or test:N of the run's test split."
    ),
    out: Path = Option(Path("explanations"), help="Where the pictures and the page go."),
    maps: str = Option(
        "auto",
        "--maps",
        "--map",
        help="How maps are made: gradcam, gradcam++, hirescam, layercam, occlusion, cell-occlusion,"
        " rise, two joined by +; or auto, the best by ROAD on public validation images.",
    ),
    finding: str | None = Option(
        None, help="Which finding, of a run that tells several; the likeliest if not given."
    ),
) -> None:
    """Explain images: prediction, map, what covering its top does, and the ROAD curve.

    Writes a PNG for each image and one HTML page with all of them that needs no other file.
    """
    from xcal.federation.files import write_bytes
    from xcal.federation.folder import RunFolder
    from xcal.report.drawing import answer_text, explanations_page, save_explanation
    from xcal.report.explaining import explain_pictures, file_names, find_pictures
    from xcal.report.runs import load_run, map_of_run

    loaded = load_run(run)
    pictures = find_pictures(loaded, images)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {out} cannot be made: {error.strerror}.") from None
    console = plain_console()
    with LiveProgress(console) as shown:
        choice = map_of_run(loaded, maps, partial(shown.measure, "choosing a map"))
        found = explain_pictures(
            loaded,
            pictures,
            method=choice.method,
            finding=finding,
            on_images=partial(shown.measure, "images"),
        )
        drawn = zip(file_names(pictures), found, strict=True) if plotting.available() else ()
        for done, (name, explanation) in enumerate(drawn):
            save_explanation(out / name, explanation)
            shown.measure("pictures drawn", done + 1, len(found))
    page = explanations_page(loaded, found, choice, RunFolder.find(run).result or {})
    write_bytes(out / PAGE, page.encode())

    rows = (
        (
            item.name,
            item.truth or "–",
            answer_text(item.answer),
            answer_text(item.covered_answer),
            f"{item.road:+.3f}",
        )
        for item in found
    )
    title = f"{loaded.experiment.method} on {loaded.experiment.data}"
    heads = ("image", "truth", "prediction", "with its top covered", ">ROAD")
    console.print(make_table(title, heads, rows))
    for item in found:
        for note in item.notes:
            console.print(f"{item.name}: {note}")
    console.print(choice.sentence())
    where = f"One picture each and the page {PAGE} are in {out}."
    if not plotting.available():
        where = f"The page {PAGE} is in {out}. {plotting.NEEDED}"
    console.print(where)
