"""How is the report of a comparison, of a run, or of audits written from the terminal? `vestige report`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vestige.cli.errors import refuse_if_given
from vestige.cli.models.card import statement_of
from vestige.cli.terminal import stdout

if TYPE_CHECKING:
    from vestige.compare.folder import ComparisonFolder


def report(
    context: typer.Context,
    folder: Annotated[
        list[Path],
        typer.Argument(help="The folder of a comparison, or of a run; or results of `vestige audit --out FILE.json`."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page (default: FOLDER/report.html; of a run, .md; of audits, audit.html beside them)."),
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write every figure here, as SVG and PNG.")] = None,
    title: Annotated[str | None, typer.Option(help="Headline of the page.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Allowed failure probability, for the ledger of a loop of your own.")
    ] = None,
) -> None:
    """Write one page about a comparison or audits (HTML), or the privacy statement of a run (Markdown).

    The page of a comparison opens from disk, without a network. Of a run, also one of a Trainer or of a loop of your
    own with its ledger in the folder, it is what `vestige card` prints. The page of audits shows epsilon at least and
    at most, and the attackers' curves.

    Examples:

        vestige report runs/compare-20260101-120000 --figures figures

        vestige report my-run

        vestige report trainer-output --delta 1e-6

        vestige report audits/*.json --out audit.html
    """
    if all(path.is_file() and path.suffix == ".json" for path in folder):
        refuse_if_given(context, ("delta",), "an audit was judged at its own")
        write_audits(folder, out, figures, title)
    elif len(folder) > 1:
        raise ValueError(
            "give one folder, of a comparison or a run; several files are results of vestige audit (.json)"
        )
    else:
        _of_folder(context, folder[0], out, figures, title, delta)


def _of_folder(
    context: typer.Context,
    folder: Path,
    out: Path | None,
    figures: Path | None,
    title: str | None,
    delta: float | None,
) -> None:
    if (folder / "ledger.jsonl").exists():
        refuse_if_given(context, ("figures", "title"), "the report of a run is its privacy statement, without figures")
        path = out or folder / "report.md"
        path.write_text(statement_of(folder, delta), encoding="utf-8")
        stdout.print(f"wrote {path}", markup=False)
    else:
        refuse_if_given(context, ("delta",), "the runs of a comparison were planned and stopped at their own")
        write_report(folder, out, figures, title)


def write_report(folder: Path, out: Path | None, figures: Path | None, title: str | None) -> Path:
    from vestige.compare.folder import ComparisonFolder
    from vestige.compare.report import page as page
    from vestige.compare.summary import price_lines, reported_records, summarised
    from vestige.files import make_folder

    comparison = ComparisonFolder(folder)
    specification = comparison.specification()
    if not comparison.records():
        raise ValueError(f"{str(folder)!r} holds no finished run yet: make some with vestige compare --resume {folder}")
    summary = summarised(comparison)
    content: dict[str, Any] = {
        "title": title or "Private optimizers at one budget",
        "specification": specification.to_json(),
        "summary": {**summary, "price_lines": price_lines(summary["prices"])},
        "records": reported_records(comparison),
    }
    content["paper"] = _paper(comparison, content)
    path = out or folder / "report.html"
    make_folder(path.parent)
    if figures is not None:
        make_folder(figures, "figures")
    path.write_text(page.page(content), encoding="utf-8")
    stdout.print(f"wrote {path} ({_size(path.stat().st_size)})", markup=False)
    if figures is not None:
        for line in page.export(content, figures):
            stdout.print(line, markup=False)
    return path


NEEDED = ("method", "epsilon", "epsilon_lower_bound", "confidence", "delta", "contradicts")
"""What every result of an audit that bounds epsilon holds."""


def write_audits(files: list[Path], out: Path | None, figures: Path | None, title: str | None) -> Path:
    from vestige.compare.report import audits_page as report
    from vestige.files import make_folder

    audits = [_audit(path) for path in files]
    path = out or files[0].parent / "audit.html"
    make_folder(path.parent)
    if figures is not None:
        make_folder(figures, "figures")
    path.write_text(report.page(audits, title or "Audits of differential privacy"), encoding="utf-8")
    stdout.print(f"wrote {path} ({_size(path.stat().st_size)})", markup=False)
    if figures is not None:
        for line in report.export(audits, figures):
            stdout.print(line, markup=False)
    return path


def _audit(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or any(name not in content for name in NEEDED):
        raise ValueError(f"{str(path)!r} is no result of an audit: write one with vestige audit --out FILE.json")
    return content


LARGE = 5_000_000
"""In bytes: a larger page is slow to open, and mail servers refuse it."""


def _size(bytes_: int) -> str:
    size = f"{bytes_ / 1e6:.2f} MB"
    if bytes_ <= LARGE:
        return size
    return f"{size}, more than the {LARGE / 1e6:g} MB a page should have: compare fewer tasks or budgets in one folder"


def _paper(comparison: ComparisonFolder, content: Mapping[str, Any]) -> dict[str, object] | None:
    """The paper's printed values beside ours, and its figures, if the folder was made by `vestige reproduce`."""
    from vestige.compare import paper_presets as known
    from vestige.compare.paper_figures import paper_figures

    made = known.of_folder(comparison.path)
    if made is None:
        return None
    preset, small = made
    return {
        "title": f"{preset.paper}: {preset.what}",
        "beside": known.beside(preset, comparison.records().values()),
        "notes": preset.assumed(comparison.specification(), small),
        "small": small,
        "figures": list(paper_figures(preset.figures, content)),
    }
