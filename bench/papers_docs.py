"""What do the papers claim, what did we run, and what is the verdict? docs/reproduction.md, written from tables alone.

    python bench/papers_docs.py [--results OUT/results.json ...] [--out docs/reproduction.md] [--check]

Every number comes from runs of `bench/papers_gpu.py` (docs/results/papers.json, and what `--results` adds to it: the
rows are kept there), from tables that earlier versions measured with code that has not changed since
(docs/results/*.md, named where they are used), or is computed here. A verdict is one of four words, decided by `verdict`
below; what was not run says so. `--check` writes nothing and fails if the page is not what would be written.
"""

# ruff: noqa: E501 (claims are sentences)

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import papers_gpu
from vestige import accounting
from vestige.audit.claimed import STUDIES
from vestige.compare import presets
from vestige.compare.presets import published
from vestige.compare.statistics import paired
from vestige.files import write_json
from vestige.questions import SampledGaussian

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "results" / "papers.json"
REPRODUCED, PARTLY, NOT, REFUTED = (
    "reproduced",
    "partly",
    "not reproduced with our guesses",
    "refuted by a proof or a certified bound",
)
NOT_RUN = "not run"
NOT_AS_PRINTED = "not run with the printed algorithm"
ENOUGH = papers_gpu.SEEDS

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Found:
    """One comparison: ours, its 95% interval, and how many seeds it has."""

    mean: float
    low: float
    high: float
    seeds: int
    source: str

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


def verdict(found: Sequence[Found | None], printed: float | None = None) -> str:
    """Of differences that a paper says are positive, or that have a printed size: how many intervals agree?"""
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return NOT_RUN
    agree = [each.low > 0 for each in known]
    if printed is not None and all(agree):
        return REPRODUCED if all(each.low <= printed <= each.high for each in known) else PARTLY
    return REPRODUCED if all(agree) else PARTLY if any(agree) else NOT


# --- what was measured -------------------------------------------------------------------------------------------------


def difference(rows: Rows, one: str, other: str, task: str = "cifar10-mlp", key: str = "accuracy") -> Found | None:
    """Points by which one label is above another on the paper's own terms, paired by seed."""
    values: dict[str, dict[int, float]] = {one: {}, other: {}}
    for row in rows:
        if row["label"] in values and row["task"] == task and _own_terms(row) and row["stacked"] > 1:
            values[row["label"]][row["seed"]] = 100 * row[key]
    between = paired(values[one], values[other])
    if between is None or between.low is None or between.high is None:
        return None
    return Found(between.mean, between.low, between.high, len(values[one].keys() & values[other].keys()), "papers.json")


def _own_terms(row: Mapping[str, Any]) -> bool:
    return row["stage"] == "given" and row["budget"].startswith("the paper's sigma 1.1")


def at_epsilon(rows: Rows, one: str, other: str, level: float, task: str) -> Found | None:
    """The same where both have spent at most `level`: accuracy at the last evaluation before it, paired by seed."""
    values: dict[str, dict[int, float]] = {one: {}, other: {}}
    for row in rows:
        if row["label"] in values and row["task"] == task and _own_terms(row):
            reached = [accuracy for _, accuracy, spent in row["curve"] if spent is not None and spent <= level]
            if reached:
                values[row["label"]][row["seed"]] = 100 * reached[-1]
    between = paired(values[one], values[other])
    if between is None or between.low is None or between.high is None:
        return None
    return Found(between.mean, between.low, between.high, len(values[one].keys() & values[other].keys()), "papers.json")


def carried(preset: str, one: str, other: str, task: str = "cifar10-mlp", column: int = 0) -> Found | None:
    """The same from a table of an earlier version, five seeds: intervals of two means, taken as independent."""
    page = (DOCS / "results" / "reproduction-tables.md").read_text()
    section = page.partition(f"## {preset}:")[2].partition("\n## ")[0]
    table = section.partition(f"| {task} |")[2].partition("\n\n")[0]
    cells = {}
    for label in (one, other):
        line = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", table, re.MULTILINE)
        number = line and re.match(r"\s*([\d.]+) ± ([\d.]+)", line[1].split("|")[column])
        if not number:
            return None
        cells[label] = float(number[1]), float(number[2])
    mean, half = cells[one][0] - cells[other][0], sqrt(cells[one][1] ** 2 + cells[other][1] ** 2)
    return Found(mean, mean - half, mean + half, 5, "results/reproduction-tables.md, before 0.3")


def best(rows: Rows, preset: str, one: str, other: str, task: str = "cifar10-mlp") -> Found | None:
    return difference(rows, one, other, task) or carried(preset, one, other, task)


# --- claims --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A row of the page: what a paper shows, the command, what we found, from how many seeds, and the verdict."""

    what: str
    command: str
    found: str
    seeds: str
    verdict: str

    def line(self) -> str:
        return f"| {self.what} | `{self.command}` | {self.found} | {self.seeds} | **{self.verdict}** |"


def above(
    rows: Rows, what: str, preset: str, pairs: Sequence[tuple[str, str, str]], printed: float | None = None
) -> Claim:
    """A claim that the first of each pair is above the second on a task, on the paper's own terms."""
    found = [best(rows, preset, *pair) for pair in pairs]
    said = [
        f"{one} less {other}, {task.partition('-')[0]}: {each or 'not run'}"
        for (one, other, task), each in zip(pairs, found, strict=True)
    ]
    seeds = {f"{each.seeds} ({each.source})" for each in found if each is not None}
    return Claim(
        what,
        f"vestige reproduce {preset} --data DATA",
        "; ".join(said),
        ", ".join(sorted(seeds)) or "-",
        verdict(found, printed),
    )


def equal(what: str, preset: str, pairs: Sequence[tuple[str, str, str]]) -> Claim:
    """The same comparison where both spend one epsilon, at the automatic rate: from tables of an earlier version."""
    found = [carried(preset, *pair, column=3) for pair in pairs]
    said = [
        f"{one} less {other}, {task.partition('-')[0]}: {each or 'not run'}"
        for (one, other, task), each in zip(pairs, found, strict=True)
    ]
    return Claim(
        what,
        f"vestige reproduce {preset} --data DATA",
        "; ".join(said),
        "5 (results/reproduction-tables.md, before 0.3)",
        verdict(found),
    )


def against_epsilon(
    rows: Rows, what: str, preset: str, pairs: Sequence[tuple[str, str, str]], levels: Sequence[float]
) -> Claim:
    """A claim about accuracy against the epsilon spent so far, at one sigma."""
    found = {(pair, level): at_epsilon(rows, pair[0], pair[1], level, pair[2]) for pair in pairs for level in levels}
    said = [
        f"{one}, {task.partition('-')[0]}, at epsilon {level:g}: {each}"
        for ((one, _, task), level), each in found.items()
        if each is not None
    ]
    seeds = {str(each.seeds) for each in found.values() if each is not None}
    return Claim(
        what, f"vestige reproduce {preset} --data DATA --seeds {ENOUGH}", "; ".join(said) or NOT_RUN,
        ", ".join(sorted(seeds)) or "-", verdict(list(found.values())),
    )  # fmt: skip


def not_as_printed(
    what: str, preset: str, rows: Rows = (), pairs: Sequence[tuple[str, str, str]] = (), printed: float | None = None
) -> Claim:
    """A claim about an algorithm whose code changed: judged from new runs alone."""
    found = [difference(rows, *pair) for pair in pairs]
    command = f"vestige reproduce {preset} --data DATA"
    if not found or None in found:
        return Claim(what, command, "-", "-", NOT_AS_PRINTED)
    said = "; ".join(
        f"{one} less {other}, {task.partition('-')[0]}: {each}"
        for (one, other, task), each in zip(pairs, found, strict=True)
    )
    return Claim(what, command, said, str(min(each.seeds for each in found if each)), verdict(found, printed))


def epsilon(sigma: float, groups: int = 1) -> float:
    """Of the protocol: 6,250 steps at rate 0.04, delta 1e-5."""
    return accounting.epsilon({SampledGaussian(0.04, sigma / sqrt(groups)): 6250}, 1e-5)


def fo(rows: Rows) -> list[Claim]:
    beta, plain, c10, c100, svhn = "fo beta 0.90", "fo beta 1.00", "cifar10-mlp", "cifar100-mlp", "svhn-mlp"
    spent = ", ".join(f"{epsilon(1.1 / b):.1f} at beta {b:g}" for b in (1, 0.95, 0.9, 0.8, 0.65))
    rivals = ["dp-sam", "dp-sat", "dp-adam", "dp-adamw", "dp-adam-ac"]
    betas = [f"fo beta {b}" for b in ("0.95", "0.90", "0.80", "0.65")]
    levels = (2.0, 4.0, 8.0)
    return [
        Claim("the guarantee: T steps of the subsampled Gaussian at `sigma/beta`", "vestige account --sample-rate 0.04 --paper-sigma 1.1 --beta 0.9 --steps 6250", f"epsilon of the protocol: {spent}", "computed", REPRODUCED),
        Claim("\"not merely post-processing\" (Proposition B.2)", "pytest tests/optim/test_memory.py", "a bijection of DP-SGD's releases at `sigma/beta`, walked in a test", "proof", REFUTED),
        _runtime(rows),
        above(rows, "Table 3: 36.5 with the memory, 32.4 without: +4.1 points", "fo-table3", [(beta, plain, c10)], 4.1),
        equal("(beyond the paper) the same at one epsilon, 17.4, and the automatic rate", "fo-table3", [(beta, plain, c10)]),
        above(rows, "Table 3: above every rival (all at rate 0.8, which the paper gives for its own method alone)", "fo-table3", [(beta, each, c10) for each in rivals]),
        above(rows, "Figure 1: final accuracy above DP-SGD on three datasets", "fo-fig1", [(beta, plain, task) for task in (c10, svhn, c100)]),
        against_epsilon(rows, "Figures 2, 3: accuracy against the epsilon spent at one sigma, beta below 1 above beta 1", "fo-fig2", [(each, plain, task) for task in (c10, svhn, c100) for each in betas], levels),
        above(rows, "Figure 3, left: final accuracy above beta 1 on CIFAR-100", "fo-fig3", [(each, plain, c100) for each in betas[:3]]),
        Claim("Figure 3, right: epsilon grows more slowly at smaller beta", "vestige account --paper-sigma 1.1 --beta 0.65 --sample-rate 0.04 --steps 6250", spent, "computed", REPRODUCED),
        equal("(beyond the paper) beta below 1 above beta 1 at one epsilon, 17.4, and the automatic rate", "fo-fig2", [(each, plain, task) for task in (c10, svhn, c100) for each in betas]),
        above(rows, "Figure 4: K = 8 above K = 1 and the rest", "fo-fig4", [("fo K 8", f"fo K {k}", c10) for k in (1, 2, 32)]),
        above(rows, "Figures 5, 6: FO-DP-SGD above Post-FM above DP-SGD, final accuracy", "fo-fig6", [(beta, "post-fm", c10), ("post-fm", "dp-sgd", c10)]),
        against_epsilon(rows, "Figure 5: the same against the epsilon spent", "fo-fig5", [(beta, "post-fm", c10), ("post-fm", "dp-sgd", c10)], levels),
        above(rows, "Figure 8: fractional above exponential and uniform, all above none", "fo-fig8", [(beta, "exponential-memory", c10), (beta, "uniform-memory", c10), ("uniform-memory", "dp-sgd", c10), ("exponential-memory", "dp-sgd", c10)]),
        Claim("Figure 7: best at every clip", "vestige reproduce fo-fig7 --data DATA", *_clips()),
    ]  # fmt: skip


def _clips() -> tuple[str, str, str]:
    found = []
    for column, sigma in ((2, "1.5"), (0, "2")):
        for clip in ("0.5", "1", "1.5", "2"):
            each = carried("fo-fig7", f"fo beta 0.90, C {clip}", f"fo beta 1.00, C {clip}", column=column)
            found.append((f"C {clip}, sigma {sigma}: {each}", each))
    return (
        "beta 0.9 less beta 1, " + "; ".join(said for said, _ in found),
        "5 (before 0.3)",
        verdict([each for _, each in found]),
    )


def _runtime(rows: Rows) -> Claim:
    """The ratio of seconds with and without the memory: timed runs, or the table of step costs."""
    seconds: dict[str, list[float]] = {}
    for row in rows:
        if row["stacked"] == 1 and not row["curve"]:
            seconds.setdefault(row["label"], []).append(row["seconds"])
    what, command = "Tables 1, 2: the memory takes 1.02 of DP-SGD's runtime", "vestige reproduce fo-table2 --data DATA"
    mine, plain = seconds.get("fo beta 0.90"), seconds.get("fo beta 1.00")
    if mine and plain:
        ratio = sum(mine) / len(mine) * len(plain) / sum(plain)
        return Claim(what, command, f"{ratio:.2f}", str(len(mine)), REPRODUCED if ratio < 1.05 else NOT)
    page = (DOCS / "results" / "step-costs.md").read_text()
    line = re.search(r"FO-DP-SGD step over it, K=8 .*?\| ([\d.]+) \| ([\d.]+) \|", page)
    assert line is not None, "docs/results/step-costs.md has no ratio of FO-DP-SGD's step"
    said = f"{line[1]} beside our fast step on a CPU, {line[2]} beside the reference engine's (results/step-costs.md)"
    return Claim(what, command, said, "1", PARTLY)


def sma(rows: Rows) -> list[Claim]:
    ratios = [epsilon(1.1 / b, 3) / epsilon(1.1 / b) for b in (1, 0.9, 0.7, 0.5)]
    joint = ", ".join(
        f"{epsilon(1.1 / b, 3):.1f} where the axis has {epsilon(1.1 / b):.1f} (beta {b:g})" for b in (1, 0.9, 0.7, 0.5)
    )
    mine, plain, c10 = "sma", "dp-sgd", "cifar10-mlp"
    return [
        Claim("Figures 3, 5: epsilon axes by `sigma/beta`, which the paper calls a diagnostic", "vestige account --groups 3 --paper-sigma 1.1 --beta 0.9 --sample-rate 0.04 --steps 6250", f"the joint epsilon of three layers is {min(ratios):.1f} to {max(ratios):.1f} times that: {joint}", "computed", REPRODUCED),
        not_as_printed("Table 2: 34.6, DP-SGD 33.8: +0.8 points", "sma-table2", rows, [(mine, plain, c10)], 0.8),
        not_as_printed("Figure 2: best on CIFAR-100, strong on CIFAR-10 and MNIST", "sma-fig2", rows, [(mine, plain, task) for task in ("cifar100-mlp", c10, "mnist-mlp")]),
        not_as_printed("Figure 3: smaller beta, the same accuracy at less epsilon", "sma-fig3"),
        _depths(rows),
        not_as_printed("Figure 4: stages of a ResNet-18 have spectral regimes of their own", "sma-fig4"),
        not_as_printed("Table 4: 2.94 times the runtime of DP-SGD", "sma-table4"),
        not_as_printed("contribution 4, nothing printed: alpha 0.7 above other orders", "sma-alpha", rows, [(mine, f"sma alpha {a}", c10) for a in ("0.3", "0.5", "0.9")]),
        not_as_printed("contribution 4, nothing printed: K = 4 above other windows", "sma-window", rows, [(mine, f"sma K {k}", c10) for k in (2, 8, 16)]),
        not_as_printed("contribution 4, nothing printed: spectra of their own above shuffled ones", "sma-shuffled", rows, [(mine, "sma shuffled", c10), ("sma 0.55", "sma 0.55 shuffled", c10)]),
        not_as_printed("(open in the paper) C / sqrt(G) above C for each layer", "sma-clip", rows, [(mine, "sma, C per layer", c10)]),
    ]  # fmt: skip


def _depths(rows: Rows) -> Claim:
    printed = published()["sma_dp_sgd"]["table3_interval"]
    ours = {}
    for name in printed:
        values = [row["effective_depth"] for row in rows if row["label"] == f"sma {name}" and _own_terms(row)]
        if values:
            ours[name] = sum(values) / len(values), len(values)
    what, command = "Table 3: effective depth by spectral interval", "vestige reproduce sma-table3 --data DATA"
    if len(ours) < len(printed):
        return Claim(what, command, "-", "-", NOT_AS_PRINTED)
    off = max(abs(ours[name][0] - depth) for name, (depth, _) in printed.items())
    order = sorted(printed, key=lambda name: printed[name][0]) == sorted(ours, key=lambda name: ours[name][0])
    said = ", ".join(
        f"[{name.replace('-', ', ')}] {ours[name][0]:.2f} (printed {depth:.2f})" for name, (depth, _) in printed.items()
    )
    word = REPRODUCED if off < 0.1 and order else PARTLY if off < 0.5 else NOT
    return Claim(
        what,
        command,
        said + ("; in the printed order" if order else "; in another order"),
        str(min(n for _, n in ours.values())),
        word,
    )


def br(rows: Rows) -> list[Claim]:
    claims = []
    for name, study in STUDIES.items():
        bounds = list(study.rows(published()))
        said = ", ".join(
            f"{row['dataset']}: at least {row['epsilon']:.2f} for {row['updates']} updates" for row in bounds
        )
        word = (
            REFUTED
            if all(row["refuted"] for row in bounds)
            else f"{REFUTED} (on {', '.join(r['dataset'] for r in bounds if r['refuted'])})"
        )
        claims.append(
            Claim(
                f"{study.paper}: rejected candidates cost nothing, epsilon 1",
                f"vestige reproduce {name}",
                said,
                "computed",
                word,
            )
        )
    shown = {"br-table2": "Table 2: best on four datasets", "br-table3": "Table 3: membership inference near chance", "br-fig4": "Figure 4: two candidates above one", "br-fig5": "Figure 5: most updates at epsilon 1", "br-fig6": "Figure 6: accuracy rises faster with epsilon", "br-fig7": "Figure 7: buffer and decay together are best", "br-fig8": "Figure 8: flat in T_max, p and k"}  # fmt: skip
    return [*claims, *(not_as_printed(what, name) for name, what in shown.items())]


# --- the page ------------------------------------------------------------------------------------------------------------

HEAD = """# Reproduction

What the papers print, what we ran, what we found. This page is written by `python bench/papers_docs.py`, from tables:
nothing on it is edited by hand. `vestige presets` lists every table and figure as a runnable preset; a preset is the
paper's protocol, cuts the subset itself and prints what had to be assumed.

A verdict is one of four words: **reproduced**, **partly**, **not reproduced with our guesses** (what the papers leave
open is listed below, and another guess might do it), **refuted by a proof or a certified bound**. Differences are in
points of test accuracy on the paper's own terms (its sigma, rate 0.8), paired by seed with a 95% interval; from tables
made before version 0.3, of five seeds and not paired. What says *not run* is in the table of runs at the end.
Best accuracy over a run stands beside the final one in docs/results/papers.json."""
COLUMNS = ("", "| what the paper shows | command | what we found | seeds | verdict |", "|---|---|---|---|---|")
AUTHORS = """## For the authors

What would settle it: FO-DP-SGD's lambda, tau, gamma, kappa and zeta, the learning rates of its rivals, and the rows of
its subsets; SMA-DP-SGD's model, sigma, clip of each group, learning rate and length, gamma_ema, tau_warm, xi_max,
c_lambda and how spectra were shuffled; DPSGD-BR's networks, decay factors, batch of the loss test, T_max, p and its
unit, what Figure 4 counts, and whether equation 16's sign is meant. Code, or any of these numbers, in an issue: we run
it and say here what came out."""


def page(rows: Rows, out: Path | None = None) -> str:
    parts = [HEAD]
    judges: dict[str, tuple[str, Callable[[Rows], list[Claim]]]] = {
        "fo": ("FO-DP-SGD (arXiv:2605.09890)", fo),
        "sma": ("SMA-DP-SGD (arXiv:2605.20450)", sma),
        "br": ("DPSGD-BR (Sci Rep 2026) and DPSUR", br),
    }
    notes = {name.partition("-")[0]: preset for name, preset in presets.PRESETS.items()}
    for key, (title, judge) in judges.items():
        claims = [claim.line() for claim in judge(rows)]
        assumed = [f"- {' '.join(note.split())}" for note in notes[key].notes if note in _common(key)]
        parts += ["", f"## {title}", *COLUMNS, *claims, "", "What had to be assumed:", "", *assumed]
    parts += ["", "Earlier results of DPSGD-BR and SMA-DP-SGD ([selective](results/selective.md), [SMA](results/sma-tables.md)) were of",
              "our variants `dpsgd-br-stepped` and `sma-dp-sgd-epoch`, not of the printed algorithms.", "", AUTHORS, "",
              "## Runs, and what is left", "",
              "`python bench/papers_gpu.py run --data DATA --out OUT --minutes N` makes them in this order; seconds are estimates.", "",
              *papers_gpu.planned(papers_gpu.PIECES, None, done=made_of(rows))]  # fmt: skip
    return "\n".join(parts) + "\n"


def _common(key: str) -> set[str]:
    """Notes that every preset of a paper has."""
    mine = [set(preset.notes) for name, preset in presets.PRESETS.items() if name.startswith(f"{key}-")]
    return set.intersection(*mine)


def made_of(rows: Rows) -> set[str]:
    return {row["id"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, nargs="*", default=[], help="results.json of bench/papers_gpu.py")
    parser.add_argument("--out", type=Path, default=DOCS / "reproduction.md")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    kept = {row["id"]: row for row in (json.loads(KEPT.read_text())["rows"] if KEPT.exists() else [])}
    for path in arguments.results:
        kept |= {row["id"]: row for row in json.loads(path.read_text())["rows"]}
    written = page(list(kept.values()))
    if arguments.check:
        if arguments.out.read_text() != written:
            raise SystemExit(f"{arguments.out} is not what bench/papers_docs.py writes: run it")
        return
    if arguments.results:
        write_json(KEPT, {"rows": list(kept.values())})
    arguments.out.write_text(written)


if __name__ == "__main__":
    main()
