"""How near are the published records, under a guarantee that holds? Recipes on whole datasets, run and verified.

usage: python bench/records.py --data DIR [--device cuda] [--only NAME ...] [--budget-seconds S] [--seeds N]
                               [--runs DIR] [--json FILE] [--prior-seconds S] [--bfloat16] [--fit] [--full]
       python bench/records.py --list
       python bench/records.py --json FILE --into docs/results/records.md

DIR holds mnist.npz, fashion_mnist.npz, imdb.jsonl.gz and the whole CIFAR-10 as cifar10.npz. Rows are made in the order
of the list, seed by seed; each is a run folder, so that a row that is cut short by the budget goes on where it was when
the script is called again with the same --runs. First a few steps are timed, on made-up images; with --fit a row that
would not end within the budget is not begun. Every finished run is verified from its ledger. --full adds the rows at
the papers' own length, which take an hour or more. The third form runs nothing: it writes the table of a page, and
keeps the rows that --json knows nothing of, or has fewer seeds of.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from vestige.files import write_json
from vestige.priors.contrastive import Plan, make
from vestige.recipes import find
from vestige.recipes.throughput import seconds_a_step
from vestige.tasks.features.starting_weights import read
from vestige.training.job import Job, complete, load, method_of, start
from vestige.training.run_folder import RunFolder
from vestige.training.verify import verify

DELTA = 1e-5
SIZES = {"mnist": 60_000, "fmnist": 60_000, "imdb": 25_000, "cifar10": 50_000}
FILES = {"mnist": "mnist.npz", "fmnist": "fashion_mnist.npz", "imdb": "imdb.jsonl.gz", "cifar10": "cifar10.npz"}
TITLES = {"mnist": "MNIST", "fmnist": "Fashion-MNIST", "imdb": "IMDb", "cifar10": "CIFAR-10"}
ROWS_AT_ONCE = 4096
"""Views that a large GPU computes at once."""
TIMED = {"wrn16-4": 4, "wrn40-4": 2}
"""Steps that are timed, by network; two more come before them."""


@dataclass(frozen=True)
class Row:
    """A recipe at an epsilon, with what should be reached at least, and what was published."""

    recipe: str
    epsilon: float
    least: float
    published: float
    printed_by: str
    valid: str
    full: bool = False
    """Whether it is at the paper's own length, which takes an hour or more."""
    broken: bool = False
    """Whether it is stopped in its middle and resumed, to show that this changes nothing."""

    @property
    def name(self) -> str:
        return f"{self.recipe}-eps{self.epsilon:g}{'-resumed' if self.broken else ''}"

    @property
    def dataset(self) -> str:
        return self.recipe.split("-")[0]


DE = ("De et al.", "no (shuffled)")
DE_AT_1 = ("De et al., from 56.4 on", "no (shuffled)")
BR = ("DPSGD-BR", "no (refuted)")
RANDP = ("DP-RandP", "yes")
ROWS = (
    Row("imdb-words", 1, 66.0, 66.91, *BR),
    Row("fmnist-scattering-linear", 1, 86.5, 88.93, *BR),
    Row("mnist-scattering-linear", 1, 98.0, 98.39, *BR),
    Row("cifar10-scattering-linear", 1, 60.0, 65.63, *BR),
    Row("cifar10-scattering", 3, 69.0, 71.5, *BR),
    Row("cifar10-scattering-large", 3, 69.0, 71.5, *BR),
    Row("cifar10-scattering", 2, 66.0, 70.0, *BR),
    Row("cifar10-wrn16-4-short", 8, 75.0, 79.5, *DE),
    Row("cifar10-wrn16-4-prior-short", 1, 60.0, 72.3, *RANDP),
    Row("cifar10-wrn16-4-short", 1, 52.0, 60.6, *DE_AT_1),
    Row("mnist-scattering", 1, 98.0, 98.39, *BR),
    Row("fmnist-scattering", 1, 86.5, 88.93, *BR),
    Row("cifar10-scattering", 1, 60.0, 65.63, *BR),
    Row("cifar10-scattering-linear", 3, 69.0, 71.5, *BR),
    Row("cifar10-scattering-linear", 2, 66.0, 70.0, *BR),
    Row("cifar10-features", 1, 60.0, 72.3, *RANDP),
    Row("mnist-scattering-least-squares", 1, 98.0, 98.39, *BR),
    Row("fmnist-scattering-least-squares", 1, 86.5, 88.93, *BR),
    Row("cifar10-scattering-least-squares", 1, 60.0, 65.63, *BR),
    Row("cifar10-scattering-least-squares", 2, 66.0, 70.0, *BR),
    Row("cifar10-scattering-least-squares", 3, 69.0, 71.5, *BR),
    Row("fmnist-scattering-linear", 1, 86.5, 88.93, *BR, broken=True),
    Row("mnist-ts", 1, 98.0, 98.39, *BR),
    Row("fmnist-ts", 1, 86.5, 88.93, *BR),
    Row("cifar10-ts", 8, 60.0, 66.2, "Papernot et al., epsilon 7.53", "not known"),
    Row("cifar10-wrn16-4", 8, 75.0, 79.5, *DE, full=True),
    Row("cifar10-wrn16-4-prior", 1, 60.0, 72.3, *RANDP, full=True),
    Row("cifar10-wrn16-4", 1, 52.0, 60.6, *DE_AT_1, full=True),
    Row("cifar10-wrn40-4", 8, 75.0, 81.4, *DE, full=True),
)


class Clock:
    """The seconds that are left of the budget."""

    def __init__(self, budget: float | None) -> None:
        self._end = None if budget is None else time.monotonic() + budget

    def left(self) -> float:
        return float("inf") if self._end is None else self._end - time.monotonic()


def job_of(row: Row, seed: int, options: argparse.Namespace) -> Job:
    """The job of a row: its recipe's, on this device."""
    recipe = find(row.recipe)
    settings = recipe.settings(row.epsilon)
    if options.device.startswith("cuda") and recipe.rows_at_once is not None:
        settings["physical_batch"] = part(settings["sample_rate"] * SIZES[row.dataset], settings["augment"] or 1)
    if recipe.needs is not None:  # a prior to start from, or to see with
        settings[recipe.needs] = str(options.runs / "prior.pt")
    data = options.data / FILES[row.dataset]
    wide = options.bfloat16 and recipe.augment is not None
    return Job(
        **settings,
        delta=DELTA,
        data=str(data),
        seed=seed,
        device=options.device,
        evaluate_every=10**9,
        bfloat16=wide,
    )


def part(batch: float, views: int) -> int:
    """How many examples are computed at once: as many as fit, in parts of one size that a sample seldom exceeds."""
    largest = batch + 4 * batch**0.5
    return ceil(largest / max(1, ceil(batch * views / ROWS_AT_ONCE)))


# --- throughput -------------------------------------------------------------------------------------------------------


def measured(rows: list[Row], options: argparse.Namespace) -> dict[str, float]:
    """Seconds of each row's whole run, where images are augmented; the others take seconds."""
    found: dict[tuple[str, int | None], float] = {}
    times: dict[str, float] = {}
    print(
        "| row | steps | views a step | ms a step | views a second | minutes |\n|---|---|---|---|---|---|", flush=True
    )
    for row in rows:
        recipe, job = find(row.recipe), job_of(row, 0, options)
        if recipe.network is None or recipe.augment is None or job.steps is None:
            continue
        key = recipe.network, job.augment
        if key not in found:
            found[key] = seconds_a_step(
                recipe.network,
                (3, 32, 32),
                batch=round(job.sample_rate * 50_000),
                method=method_of(replace(job, head_steps=0)),
                device=options.device,
                physical_batch=job.physical_batch if isinstance(job.physical_batch, int) else None,
                steps=TIMED.get(recipe.network, 4),
                bfloat16=job.bfloat16,
            )
        times[row.name] = found[key] * job.steps
        viewed = job.sample_rate * 50_000 * (job.augment or 1)
        print(
            f"| {row.name} | {job.steps} | {viewed:,.0f} | {1000 * found[key]:.0f} | {viewed / found[key]:,.0f} | "
            f"{times[row.name] / 60:.1f} |",
            flush=True,
        )
    return times


# --- runs -------------------------------------------------------------------------------------------------------------


def prior_of(options: argparse.Namespace, clock: Clock) -> None:
    """Make the prior that rows start from, once."""
    path = options.runs / "prior.pt"
    if path.exists():
        return
    plan = Plan(generator=options.generator, images=options.prior_images, steps=10**6)
    seconds = min(options.prior_seconds, max(1.0, clock.left()))
    print(f"making a prior of {options.generator} for {seconds:.0f} s", flush=True)
    made = make(plan, options.device, seconds=seconds)
    made.save(path)
    print(json.dumps(dict(made.statement)), flush=True)


def performed(row: Row, seed: int, options: argparse.Namespace, clock: Clock) -> dict[str, Any] | None:
    """Run a row, or go on with it; None if the budget ended first."""
    folder = options.runs / f"{row.name}-seed{seed}"
    known = RunFolder(folder)
    if folder.exists() and known.result() is not None:
        return result_of(row, seed, folder, options)
    job = load(known) if (folder / "run.json").exists() else job_of(row, seed, options)
    resume = (folder / "run.json").exists()
    seconds = _seconds(folder)
    if row.broken and not resume:
        half = (job.steps or 2) // 2
        stop = lambda training, record, accuracy: record.step + 1 < half  # noqa: E731
        begin = time.perf_counter()
        task, training = start(job, folder)
        complete(job, task, training, stop)
        seconds += time.perf_counter() - begin
        resume = True
    begin = time.perf_counter()
    task, training = start(job, folder, resume=resume)
    begun = time.perf_counter()
    result = complete(job, task, training, lambda *seen: clock.left() > 0)
    write_json(
        folder.parent / f"{folder.name}.time.json",
        {"seconds": seconds + time.perf_counter() - begin, "training": _trained(folder) + time.perf_counter() - begun},
    )
    if result.stopped == "interrupted":
        print(f"{folder.name}: interrupted after step {result.steps}; call again to go on", flush=True)
        return None
    return result_of(row, seed, folder, options)


def _seconds(folder: Path) -> float:
    path = folder.parent / f"{folder.name}.time.json"
    return float(json.loads(path.read_text())["seconds"]) if path.exists() else 0.0


def _trained(folder: Path) -> float:
    path = folder.parent / f"{folder.name}.time.json"
    return float(json.loads(path.read_text())["training"]) if path.exists() else 0.0


def result_of(row: Row, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a finished run says, once its ledger was verified."""
    verdict = verify(folder)
    result = RunFolder(folder).result()
    request = RunFolder(folder).request()
    assert result is not None
    plan, job = request["public"], request["job"]
    trained = _trained(folder)
    viewed = plan["sample_rate"] * plan["population"] * (job["augment"] or 1) * plan["steps"]
    return {
        "row": row.name,
        "recipe": row.recipe,
        "dataset": row.dataset,
        "seed": seed,
        "accuracy": result["accuracy"],
        "epsilon": verdict.guarantee.epsilon,
        "delta": verdict.guarantee.delta,
        "verified": True,
        "attempts": verdict.attempts,
        "sampling": plan["sampling"],
        "steps": plan["steps"],
        "noise_multiplier": plan["noise_multiplier"],
        "lr": plan["lr"],
        "bfloat16": job.get("bfloat16", False),
        "seconds": round(_seconds(folder), 1),
        "views_per_second": round(viewed / trained) if trained else None,
        "least": row.least,
        "published": row.published,
        "published_by": row.printed_by,
        "published_valid": row.valid,
        "prior": (request.get("prior") or {}).get("generator"),
        "device": _device(options.device),
    }


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


def due(options: argparse.Namespace) -> Iterator[tuple[Row, int]]:
    """Rows in order, all of the first seed before the next."""
    for seed in range(options.seeds):
        for row in ROWS:
            wanted = row.name in options.only or row.recipe in options.only if options.only else True
            if wanted and (options.full or not row.full or options.only) and not (row.broken and seed):
                yield row, seed


# --- the table --------------------------------------------------------------------------------------------------------

HEAD = (
    "| task | epsilon | recipe | ours | at least | published | sampled as priced | device, minutes, views / s |",
    "|---|---|---|---|---|---|---|---|",
)


def results_of(path: Path) -> list[dict[str, Any]]:
    """The results of a file, if they are such as a page may show."""
    try:
        results = json.loads(path.read_text())["results"]
        for each in results:
            row = next((row for row in ROWS if row.name == each["row"]), None)
            if row is None:
                raise ValueError(f"{each['row']!r} is no row of the list (--list)")
            if each["verified"] is not True or not each["epsilon"] <= row.epsilon * (1 + 1e-9):
                raise ValueError(f"{row.name}: not verified at epsilon {row.epsilon:g}")
            if not 0 <= each["accuracy"] <= 1:
                raise ValueError(f"{row.name}: accuracy={each['accuracy']} is no share")
        if len({(each["row"], each["seed"]) for each in results}) < len(results):
            raise ValueError("a seed of a row comes twice")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: no results of this script: {error!r}") from error
    return results


def write_into(page: Path, results: list[dict[str, Any]]) -> None:
    """Put the table in the place of the page's own; the text around it stays."""
    lines = page.read_text().splitlines() if page.exists() else []
    if HEAD[0] not in lines:
        raise SystemExit(f"{page}: there is no table of records in it, to be replaced")
    start = lines.index(HEAD[0])
    stop = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    made = table(results, lines[start + 2 : stop])
    page.write_text("\n".join([*lines[:start], made, *lines[stop:]]) + "\n")


def seeds_of(line: str) -> int:
    """How many runs stand behind a row."""
    found = re.search(r", (\d+) seeds\)", line)
    return int(found[1]) if found else 1


def table(results: list[dict[str, Any]], before: Sequence[str] = ()) -> str:
    """The rows of these results; of the lines `before` those that are not run again, or stand for more seeds."""
    kept = list(before)
    lines = list(HEAD)
    for row in ROWS:
        begin = f"| {TITLES[row.dataset]} | {row.epsilon:g} | `{row.recipe}`"
        there = [line for line in kept if line.startswith(begin) and row.broken == (" attempts" in line)]
        kept = [line for line in kept if line not in there]
        mine = [each for each in results if each["row"] == row.name]
        if mine and all(seeds_of(line) <= len(mine) for line in there):
            lines.append(_line(row, mine))
        else:
            lines += there
    return "\n".join([*lines, *kept])


def _line(row: Row, mine: list[dict[str, Any]]) -> str:
    accuracies = [100 * each["accuracy"] for each in mine]
    mean = sum(accuracies) / len(accuracies)
    spread = f" ({min(accuracies):.1f} to {max(accuracies):.1f}, {len(mine)} seeds)" if len(mine) > 1 else ""
    pace = [each["views_per_second"] for each in mine if each["views_per_second"]]
    minutes = sum(each["seconds"] for each in mine) / len(mine) / 60
    note = ", `--bfloat16`" if mine[0].get("bfloat16") else ""
    note += f", {mine[0]['attempts']} attempts" if row.broken else ""
    cells = [
        TITLES[row.dataset],
        f"{row.epsilon:g}",
        f"`{row.recipe}`{note}",
        f"{mean:.1f}{spread}",
        f"{row.least:g}",
        f"{row.published:g} ({row.printed_by})",
        row.valid,
        f"{mine[0]['device']}, {minutes:.1f}, {max(pace, default=0):,}",
    ]
    return "| " + " | ".join(cells) + " |"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", default=[], help="rows or recipes, by name")
    parser.add_argument("--budget-seconds", type=float, help="end after so long; what is left goes on next time")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fit", action="store_true", help="begin only what ends within the budget")
    parser.add_argument("--full", action="store_true", help="also at the papers' own length")
    parser.add_argument("--runs", type=Path, default=Path("runs/records"))
    parser.add_argument("--json", type=Path, help="where the results are written, after every row")
    parser.add_argument("--generator", default="mixed", help="what draws the prior's images")
    parser.add_argument("--prior-images", type=int, default=100_000)
    parser.add_argument("--prior-seconds", type=float, default=150.0)
    parser.add_argument("--precision", choices=["tf32", "torch"], default="tf32")
    parser.add_argument("--bfloat16", action="store_true", help="large networks under autocast; sums stay float32")
    parser.add_argument("--no-timing", action="store_true", help="begin at once, without an estimate")
    parser.add_argument("--list", action="store_true", help="print the rows, and run nothing")
    parser.add_argument("--into", type=Path, help="write the table of --json to this page, and run nothing")
    options = parser.parse_args()
    if options.into is not None and options.json is None:
        parser.error("--into needs --json, the results to write")
    if options.into is None and options.data is None and not options.list:
        parser.error("give --data, the folder of the datasets")
    return options


def main() -> None:
    options = parsed()
    if options.list:
        for row in ROWS:
            steps = round(find(row.recipe).settings(row.epsilon)["steps"])
            print(f"{row.name}: {steps} steps, at least {row.least}, published {row.published} ({row.printed_by})")
        return
    if options.into is not None:
        write_into(options.into, results_of(options.json))
        return
    if options.precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    options.runs.mkdir(parents=True, exist_ok=True)
    clock, wanted = Clock(options.budget_seconds), list(due(options))
    print(f"torch {torch.__version__}, {_device(options.device)}", flush=True)
    times = {} if options.no_timing else measured(list(dict.fromkeys(row for row, _ in wanted)), options)
    results: list[dict[str, Any]] = []
    for row, seed in wanted:
        there = (options.runs / f"{row.name}-seed{seed}").exists()
        if clock.left() <= 0:
            break
        if options.fit and not there and times.get(row.name, 0.0) > clock.left():
            print(f"{row.name}, seed {seed}: not begun, {times[row.name]:.0f} s would not fit", flush=True)
            continue
        if not (options.data / FILES[row.dataset]).exists():
            print(f"{row.name}: no {FILES[row.dataset]} in {options.data}", flush=True)
            continue
        try:
            if find(row.recipe).needs is not None:
                prior_of(options, clock)
            result = performed(row, seed, options, clock)
        except RuntimeError as error:  # of memory, say: the other rows need not suffer
            print(f"{row.name}, seed {seed}: failed: {str(error).splitlines()[0]}", flush=True)
            result = None
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
        if result is None:
            continue
        results.append(result)
        print(json.dumps(result), flush=True)
        if options.json is not None:
            prior = options.runs / "prior.pt"
            made = dict(read(prior).statement) if prior.exists() else None
            write_json(options.json, {"torch": str(torch.__version__), "results": results, "prior": made})
    print(table(results), flush=True)


if __name__ == "__main__":
    main()
