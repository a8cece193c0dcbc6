"""What do selective updates buy under a guarantee that holds? Accuracy at epsilon 1 to 4, beside the published table.

usage: python bench/selective.py --data DIR [--device cuda] [--tf32] [--jobs 14] [--budget-seconds 450]
                                 [--datasets ...] [--methods ...] [--epsilons ...] [--seeds 3] [--out selective.json]
       python bench/selective.py --out selective.json --into docs/results/selective.md

Every cell (dataset, method, epsilon, seed) is one run and is written when it is done; started again with the same
--out, only the missing ones are run. Selective methods give two accuracies: where the valid accountant has spent
epsilon, and, further on in the same run, where the papers' accepted-only claim has. Runs for epsilon 4 say too how
accurate they were on their way, where they had spent 1, 2 and 3. Settings are those of the papers (batch, noise, rate,
clip, momentum); nothing was tuned here. At epsilon 1 the buffer's size is varied too. The second form runs nothing: it
writes the tables, and keeps the page's cells behind which there are more seeds than in --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import vestige
from vestige import accounting, tasks
from vestige.accounting.odometers_and_filters import FilteredBudget
from vestige.compare.paper_presets import published
from vestige.files import write_json
from vestige.methods.base import Method
from vestige.methods.registry import make_method
from vestige.optim.gates import BufferedRejection
from vestige.optim.progress_driven_decay import PhasedDecay
from vestige.optim.rules import named
from vestige.training import planning
from vestige.training.loop import accuracy

DELTA = 1e-5
EPSILONS = (1, 2, 3, 4)
DATA = {"mnist": "mnist.npz", "fmnist": "fashion_mnist.npz", "imdb": "imdb.jsonl.gz", "cifar10": "cifar10.npz"}
TITLE = {"mnist": "MNIST", "fmnist": "Fashion-MNIST", "imdb": "IMDb", "cifar10": "CIFAR-10"}
STILL = "dpsgd-br without decay"
METHODS = ("dpsgd", "dpsgd-ts", "dpsgd-hf", "dpsur", "dpsgd-br", STILL)
BUFFERS = {f"dpsgd-br, buffer {size}": size for size in (1, 3, 4)}
"""Other sizes of DPSGD-BR's buffer, which is 2; with 1 only the decay is left. At epsilon 1 alone."""
SELECTIVE = ("dpsur", "dpsgd-br", STILL, *BUFFERS)
DECAYING = ("dpsgd-br", *BUFFERS)
TASK = {"dpsgd": "cnn", "dpsgd-ts": "ts"}
"""The model: a small CNN, DPSGD-TS's tanh CNN, and for the others scattering features with a CNN; IMDb has one."""

BATCH = {"mnist": 1024, "fmnist": 2048, "imdb": 1024, "cifar10": 8192}
END_TO_END = {"mnist": (512, 0.5, 40), "fmnist": (2048, 4.0, 40), "cifar10": (1024, 1.0, 30)}
"""Batch, rate and epochs of the end-to-end CNNs (Tramer & Boneh 2021)."""
RATE = {
    "dpsgd-ts": {"imdb": 0.02},
    "dpsgd-hf": {"mnist": 1.0, "fmnist": 4.0, "cifar10": 4.0},
    "dpsur": {"mnist": 2.0, "fmnist": 4.0, "imdb": 0.02, "cifar10": 4.0},
    "dpsgd-br": {"mnist": 2.75, "fmnist": 6.0, "imdb": 0.03, "cifar10": 4.8},
}
SIGMA_T = {
    "mnist": (2.0, 1.5, 1.35, 1.35),
    "fmnist": (4.0, 2.15, 2.15, 2.15),
    "imdb": (2.0, 1.8, 1.35, 1.23),
    "cifar10": (11.0, 9.0, 5.67, 5.67),
}
SIGMA_V = {
    "mnist": (1.3, 1.0, 0.9, 0.8),
    "fmnist": (1.3, 1.3, 0.8, 0.8),
    "imdb": (1.3, 1.2, 1.0, 0.9),
    "cifar10": (1.3, 1.3, 1.1, 1.1),
}
"""DPSUR's noise by epsilon; DPSGD-HF takes the same sigma_t, and as many steps as it then affords."""
BUFFERED = {"mnist": (3.0, 1.37), "fmnist": (6.0, 1.3), "imdb": (2.3, 1.37), "cifar10": (14.0, 1.4)}
"""DPSGD-BR's noise at epsilon 1 (its Table 4); at larger epsilon it shrinks as DPSUR's does, since none is printed."""
EXAMPLES_OF = {"mnist": 60_000, "fmnist": 60_000, "imdb": 25_000, "cifar10": 50_000}
VALIDATION = {"mnist": 256, "fmnist": 256, "imdb": 128, "cifar10": 256}
CLAIM_SEEDS = {"dpsur": 3, "dpsgd-br": 1}
"""So many seeds go on to the published claim, which for a buffer takes three times as many trials as epsilon buys."""


class Cell(NamedTuple):
    dataset: str
    method: str
    epsilon: int
    seed: int

    @property
    def task(self) -> str:
        return "imdb-lstm" if self.dataset == "imdb" else f"{self.dataset}-{TASK.get(self.method, 'hf')}"

    @property
    def turn(self) -> tuple[int, int]:
        """Which cells come first: the five rows on grey images, then the ablation, then IMDb, then CIFAR-10."""
        if self.dataset == "cifar10":
            return 5, self.seed
        if self.dataset == "imdb":
            return 3, self.seed
        if self.method in BUFFERS:
            return 4, self.seed
        return (4 if self.seed else 2) if self.method == STILL else int(self.method == "dpsgd-br"), self.seed

    @property
    def family(self) -> str:
        """Whose settings it has."""
        return "dpsgd-br" if self.method.startswith("dpsgd-br") else self.method

    @classmethod
    def of(cls, row: dict[str, Any]) -> Cell:
        return cls(row["dataset"], row["method"], row["epsilon"], row["seed"])


@dataclass(frozen=True)
class Setting:
    """Where and how a cell is run."""

    data: Path
    device: str
    engine: str
    progress: str
    accounting: str
    examples: int | None
    tf32: bool
    finish_by: float
    """On the clock of time.time(): a run that has its valid accuracy by then does not go on to the claim."""


def method_of(cell: Cell, given: Setting) -> Method:
    """A method with the noise of its paper at this epsilon."""
    dataset, place = cell.dataset, EPSILONS.index(cell.epsilon)
    sigma_t, sigma_v = SIGMA_T[dataset][place], SIGMA_V[dataset][place]
    if cell.method not in SELECTIVE:
        made = vestige.dp_sgd(max_grad_norm=0.1, momentum=0.9)
    else:
        options: dict[str, Any] = {"accounting": given.accounting, "validation_batch": VALIDATION[dataset]}
        if cell.method != "dpsur":
            first_t, first_v = BUFFERED[dataset]
            sigma_t, sigma_v = first_t * sigma_t / SIGMA_T[dataset][0], first_v * sigma_v / SIGMA_V[dataset][0]
            options["progress"] = "none" if cell.method == STILL else given.progress
            options["buffer"] = BUFFERS.get(cell.method, 2)
        made = make_method(cell.family, sigma_t=sigma_t, sigma_v=sigma_v, **options)
    return replace(made, rule=named("adam", {})) if dataset == "imdb" else made


def decay_of(method: Method) -> list[float] | None:
    """What tells two versions of DPSGD-BR apart: results with other factors are not resumed."""
    decay = method.gate.decay if isinstance(method.gate, BufferedRejection) else None
    return [decay.fast, decay.slow] if isinstance(decay, PhasedDecay) else None


class Passing:
    """A budget that is noted when it is first exceeded, and lets the run go on: past it there is no guarantee."""

    def __init__(self, limit: Any, note: Callable[[], None]) -> None:
        self.limit, self.note, self.passed = limit, note, False

    def allows(self, spent: accounting.History, question: Any) -> bool:
        if not self.passed and not self.limit.allows(spent, question):
            self.passed = True
            self.note()
        return True


class Every:
    """Several budgets that note when they are exceeded."""

    def __init__(self, passing: list[Passing]) -> None:
        self.passing = passing

    def allows(self, spent: accounting.History, question: Any) -> bool:
        return all([each.allows(spent, question) for each in self.passing])


def plain(cell: Cell, task: tasks.Task, given: Setting) -> dict[str, Any]:
    method, examples, dataset = method_of(cell, given), len(task.train[1]), cell.dataset
    if cell.method in TASK and dataset in END_TO_END:
        batch, lr, epochs = END_TO_END[dataset]
        plan: dict[str, Any] = {"steps": epochs * examples // min(batch, examples // 4), "epsilon": cell.epsilon}
    else:
        batch, lr = BATCH[dataset], RATE[cell.method][dataset]
        noise = SIGMA_T[dataset][EPSILONS.index(cell.epsilon)]
        plan = {"steps": None, "noise_multiplier": noise, "epsilon": cell.epsilon}
    rate = min(batch, examples // 4) / examples
    common: dict[str, Any] = {"delta": DELTA, "engine": given.engine}
    training = vestige.train(
        task.model, task.loss, task.train, method=method, sample_rate=rate, lr=lr, **plan, **common
    )
    asked: dict[Any, int] = {}
    met: dict[int, int] = {}
    passed: dict[int, float] = {}
    for _ in training:
        if not asked:
            asked = dict(training.ledger.spent)
            met = {planning.affordable(asked, below, DELTA, "pld"): below for below in waypoints(cell, asked)}
        if training.state.step in met:
            passed[met[training.state.step]] = accuracy(task.model, task.test)
    facts = {"epsilon_valid": training.guarantee().epsilon, "steps": training.state.step, "on_the_way": passed}
    return {"accuracy": accuracy(task.model, task.test), **facts}


def waypoints(cell: Cell, one: accounting.History) -> list[int]:
    """The budgets at which a run says how accurate it is before it ends, where they pay for a step: only the longest
    runs do."""
    if cell.epsilon < EPSILONS[-1]:
        return []
    return [below for below in EPSILONS[:-1] if accounting.epsilon(one, DELTA, "rdp") < below]


def selective(cell: Cell, task: tasks.Task, given: Setting) -> dict[str, Any]:
    method, examples, epsilon = method_of(cell, given), len(task.train[1]), cell.epsilon
    rate = min(BATCH[cell.dataset], examples // 4) / examples
    gate = method.gate.at(examples)
    asked = gate.questions(method.probe.questions(rate, method.noise_multiplier or 0.0))
    one = {question: 1 for question in asked}
    adaptive = gate.adaptive
    trials = planning.affordable(one, epsilon, DELTA, "rdp" if adaptive else "pld")
    training = vestige.train(
        task.model,
        task.loss,
        task.train,
        method=method,
        sample_rate=rate,
        lr=RATE[cell.family][cell.dataset],
        delta=DELTA,
        steps=50 * trials,
        epsilon=1000.0 if adaptive else None,
        engine=given.engine,
    )
    result: dict[str, Any] = {"decay": decay_of(method)}

    def note(suffix: str = "") -> None:
        seen = training.selection()
        result.update({f"{key}{suffix}": getattr(seen, key) for key in ("trials", "accepted", "updates", "degraded")})
        result[f"accuracy{suffix}"] = accuracy(task.model, task.test)
        result[f"published_claim_epsilon{suffix}"] = seen.published_claim_epsilon

    def limit(spend: int) -> Any:
        if adaptive:
            return FilteredBudget(spend, DELTA, one)
        most = planning.affordable(one, spend, DELTA, "pld")
        return accounting.Budget(spend, DELTA, {question: most for question in one})

    passed: dict[int, float] = {}
    on_the_way = {
        below: Passing(limit(below), lambda below=below: passed.update({below: accuracy(task.model, task.test)}))
        for below in waypoints(cell, one)
    }
    passing = Passing(limit(epsilon), note)
    training.ledger.budget = Every([*on_the_way.values(), passing])
    claimed = cell.seed >= CLAIM_SEEDS.get(cell.method, 0)
    for record in training:
        if record.accepted and not claimed and training.selection().published_claim_epsilon >= epsilon:
            claimed = True
            note("_at_claim")
            result["renyi_epsilon_at_claim"] = accounting.epsilon(training.ledger.spent, DELTA, "rdp")
            if not adaptive:
                result["epsilon_at_claim"] = accounting.epsilon(training.ledger.spent, DELTA)
        if passing.passed and (claimed or time.time() > given.finish_by):
            break
    accountant = "renyi filter" if adaptive else "pld"
    return {"epsilon_valid": epsilon, "accountant": accountant, "on_the_way": passed, **result}


# --- running cells ---------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, tuple[Any, Any]] = {}


def load(cell: Cell, given: Setting) -> tasks.Task:
    """The task with this seed's initial weights; its examples are moved to the device once per process."""
    task = tasks.load(cell.task, given.data / DATA[cell.dataset], cell.seed)
    kind = cell.task if cell.task.endswith("hf") else cell.dataset
    if kind not in EXAMPLES:
        first = slice(given.examples)
        train, test = (tuple(part[first].to(given.device) for part in parts) for parts in (task.train, task.test))
        EXAMPLES[kind] = (train, test)
    train, test = EXAMPLES[kind]
    return replace(task, model=task.model.to(given.device), train=train, test=test)


def run(cell: Cell, given: Setting) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = given.tf32
    task = load(cell, given)
    since = time.perf_counter()
    found = (selective if cell.method in SELECTIVE else plain)(cell, task, given)
    seconds = round(time.perf_counter() - since, 1)
    how = {"examples": len(task.train[1]), "progress": given.progress, "accounting": given.accounting}
    return {**cell._asdict(), **how, **found, "seconds": seconds}


def prepare(task: str, file: Path, threads: int) -> None:
    """Fill the cache of scattering features."""
    torch.set_num_threads(threads)
    tasks.load(task, file)


def run_all(
    cells: list[Cell],
    given: Setting,
    jobs: int,
    deadline: float,
    usual: dict[Cell, float],
    done: Callable[[Future[dict[str, Any]], Cell], None],
) -> None:
    """Cells side by side, the first ones first; none that usually takes longer than what is left."""
    features = sorted({(cell.task, given.data / DATA[cell.dataset]) for cell in cells if cell.task.endswith("hf")})
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        preparing = {pool.submit(prepare, *what, max(1, jobs // 2)): what[0] for what in features}
        running: dict[Future[Any], Cell] = {}
        while time.perf_counter() < deadline:
            left = deadline - time.perf_counter()
            for cell in list(cells):
                if len(running) + len(preparing) >= jobs:
                    break
                if cell.task not in preparing.values() and usual.get(cell, 0.0) < left:
                    cells.remove(cell)
                    running[pool.submit(run, cell, given)] = cell
            if not running and not preparing:
                break
            finished, _ = wait([*preparing, *running], timeout=min(left, 60.0), return_when=FIRST_COMPLETED)
            for future in finished:
                if future in preparing:
                    future.result()
                    del preparing[future]
                else:
                    done(future, running.pop(future))
        for child in multiprocessing.active_children():
            child.terminate()  # what is not finished at the deadline is left for the next time


# --- tables ----------------------------------------------------------------------------------------------------------


Page = dict[tuple[str, str, str], str]
"""What a page's tables say, by the table's name, the row's and the column's."""


def tables(results: list[dict[str, Any]], page: Page) -> str:
    """Mean test accuracy in percent over (n) seeds; the DPSGD-BR paper's Table 2 in brackets. Then what buffers do."""
    printed = published()["dpsgd_br"]["table2_accuracy_percent"]
    parts = []
    for dataset in DATA:
        known = [row for row in results if row["dataset"] == dataset]
        title = TITLE[dataset]
        if not known and not any(name == title for name, _, _ in page):
            continue
        columns = [f"epsilon {EPSILONS[0]}", *map(str, EPSILONS[1:])]
        lines = []
        for method in METHODS:
            if dataset == "imdb" and method not in IMDB:
                continue
            rows = [("", "accuracy")] + [(", until the claim", "accuracy_at_claim")] * (method in CLAIM_SEEDS)
            for label, key in rows:
                cells = []
                for place, epsilon in enumerate(EPSILONS):
                    mine = [row for row in known if (row["method"], row["epsilon"]) == (method, epsilon)]
                    beside = f" [{printed[dataset][method][place]:.2f}]" if method in printed[dataset] else ""
                    ours = mean_of(mine, key)
                    before = page.get((title, f"{method}{label}", columns[place]), f"not run{beside}")
                    cells.append(f"{ours}{beside}" if seeds_of(ours) >= seeds_of(before) and ours else before)
                lines.append([f"{method}{label}", *cells])
        parts.append(drawn([title, *columns], lines))
    if any(Cell.of(row).epsilon == 1 and "updates" in row for row in results) or any(
        name == PARTS for name, _, _ in page
    ):
        parts.append(buffers(results, page))
    if any(row.get("on_the_way") for row in results) or any(name == WAY for name, _, _ in page):
        parts.append(way(results, page))
    return "\n\n".join(parts)


IMDB = ("dpsgd-ts", "dpsur", "dpsgd-br", STILL)
SIZES = ("dpsur", STILL, "dpsgd-br, buffer 1", "dpsgd-br", "dpsgd-br, buffer 3", "dpsgd-br, buffer 4")
PARTS = "Parts of DPSGD-BR at epsilon 1"


def buffers(results: list[dict[str, Any]], page: Page) -> str:
    """Accuracy, and the updates made of how many trials, by the size of the buffer and without the decay."""
    lines = []
    for method in SIZES:
        cells = []
        for dataset, title in TITLE.items():
            known = [row for row in results if Cell.of(row)[:3] == (dataset, method, 1) and "updates" in row]
            updates, trials = (mean_of(known, key, 1.0, 0) for key in ("updates", "trials"))
            now = f"{mean_of(known, 'accuracy')}: {updates} of {trials}" if known else ""
            before = page.get((PARTS, method, title), "not run")
            cells.append(now if now and seeds_of(now) >= seeds_of(before) else before)
        lines.append([method, *cells])
    return drawn([PARTS, *TITLE.values()], lines)


WAY = "On the way to epsilon 4"


def way(results: list[dict[str, Any]], page: Page) -> str:
    """How accurate the runs for the largest budget were where they had spent less; "-" where that pays for no step."""
    lines = []
    columns = [f"{below} spent" for below in EPSILONS]
    for dataset, title in TITLE.items():
        for method in METHODS if dataset != "imdb" else IMDB:
            known = [
                {**row["on_the_way"], str(EPSILONS[-1]): row["accuracy"]}
                for row in results
                if Cell.of(row)[:3] == (dataset, method, EPSILONS[-1]) and row.get("on_the_way")
            ]
            cells = []
            for below, column in zip(EPSILONS, columns, strict=True):
                now = mean_of(known, str(below)) or ("-" if known else "")
                before = page.get((WAY, f"{title}, {method}", column), "not run")
                cells.append(now if now and seeds_of(now) >= seeds_of(before) else before)
            lines.append([f"{title}, {method}", *cells])
    return drawn([WAY, *columns], lines)


def drawn(head: list[str], lines: list[list[str]]) -> str:
    every = [head, ["---"] * len(head), *lines]
    return (
        "\n".join("| " + " | ".join(cells) + " |" for cells in every).replace("| --- ", "|---").replace("--- |", "---|")
    )


def seeds_of(cell: str) -> int:
    """How many runs stand behind a number."""
    found = re.search(r"\((\d+)\)", cell)
    return int(found[1]) if found else 0


def mean_of(rows: list[dict[str, Any]], key: str, scale: float = 100.0, digits: int = 2) -> str:
    found = [scale * row[key] for row in rows if key in row]
    if not found:
        return ""
    return f"{sum(found) / len(found):,.{digits}f}" + (f" ({len(found)})" if digits else "")


def results_of(path: Path) -> list[dict[str, Any]]:
    """The results of a file, each of a cell of its own."""
    try:
        results = json.loads(path.read_text())
        for row in results:
            if (
                row["dataset"] not in DATA
                or row["method"] not in (*METHODS, *BUFFERS)
                or row["epsilon"] not in EPSILONS
            ):
                raise ValueError(f"{Cell.of(row)} is none of the cells")
            if not all(0 <= row[key] <= 1 for key in ("accuracy", "accuracy_at_claim") if key in row):
                raise ValueError(f"{Cell.of(row)}: an accuracy is no share")
        if len({Cell.of(row) for row in results}) < len(results):
            raise ValueError("a cell comes twice")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: no results of this script: {error!r}") from error
    return results


def require_whole(results: list[dict[str, Any]]) -> None:
    """Refuse what a page does not show: rehearsals, and other ways than the usual ones."""
    for row in results:
        usual = {"examples": EXAMPLES_OF[row["dataset"]], "progress": "noisy-loss", "accounting": "trial-level"}
        for key, value in usual.items():
            if row.get(key, value) != value:
                raise SystemExit(f"{Cell.of(row)}: {key} is {row[key]!r}, and the page is of {value!r}")
        if not row["epsilon_valid"] <= row["epsilon"] * (1 + 1e-9):
            raise SystemExit(f"{Cell.of(row)}: spent {row['epsilon_valid']}")


BEGIN, END = "<!-- selective tables: begin -->", "<!-- selective tables: end -->"


def of_page(page: Path | None) -> Page:
    """The cells that the tables of a page have."""
    found: Page = {}
    head: list[str] = []
    text = page.read_text() if page else BEGIN + END
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page}: no place for the tables in it: {BEGIN} and {END}")
    for line in text.split(BEGIN)[1].split(END)[0].splitlines():
        cells = [each.strip() for each in line.strip("| ").split(" | ")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif not line.startswith("|---"):
            found |= {(head[0], cells[0], column): cell for column, cell in zip(head[1:], cells[1:], strict=True)}
    return found


def write_into(page: Path, text: str) -> None:
    """Put the tables between their marks in a Markdown page."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help=f"folder with {', '.join(DATA.values())}; without it nothing is run")
    parser.add_argument("--out", type=Path, default=Path("selective.json"))
    parser.add_argument("--into", type=Path, help="Markdown page whose tables are replaced")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", default="bookkeeping")
    parser.add_argument("--tf32", action="store_true", help="a GPU's products in TF32")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--datasets", nargs="*", default=list(DATA), choices=list(DATA))
    parser.add_argument("--methods", nargs="*", default=[*METHODS, *BUFFERS], choices=[*METHODS, *BUFFERS])
    parser.add_argument("--epsilons", nargs="*", type=int, default=list(EPSILONS), choices=EPSILONS)
    parser.add_argument("--progress", default="noisy-loss", help="what DPSGD-BR's decay listens to")
    parser.add_argument("--accounting", default="trial-level", choices=("trial-level", "every-trial"))
    parser.add_argument("--examples", type=int, help="only the first so many training examples: a rehearsal")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    begin = time.perf_counter()

    if options.data is None and not options.out.exists():
        parser.error(f"--out {options.out}: there is no such file, and without --data nothing is run")
    known = results_of(options.out) if options.out.exists() else []
    if options.into:
        require_whole(known)
    now = decay_of(make_method("dpsgd-br"))
    results = [row for row in known if row["method"] not in DECAYING or row.get("decay") == now]
    if len(results) < len(known):
        print(f"{len(known) - len(results)} results of dpsgd-br had other decay factors and are dropped", flush=True)

    failed: list[Cell] = []

    def done(finished: Future[dict[str, Any]], cell: Cell) -> None:
        error = finished.exception()
        if error is not None:
            failed.append(cell)
            print(f"{cell} failed: {error!r}", flush=True)
            return
        row = json.loads(json.dumps(finished.result()))  # as it will be read
        results.append(row)
        write_json(options.out, results)
        print(json.dumps(row), flush=True)

    if options.data:
        device = (options.device, options.engine)
        chosen = (options.progress, options.accounting, options.examples, options.tf32)
        given = Setting(options.data, *device, *chosen, finish_by=time.time() + options.budget_seconds - 10)
        usual = {Cell.of(row)._replace(seed=seed): row["seconds"] for row in results for seed in range(options.seeds)}
        cells = missing(options, {Cell.of(row) for row in results}, usual)
        run_all(cells, given, options.jobs, begin + options.budget_seconds, usual, done)
    made = tables(results, of_page(options.into))
    print(made)
    if options.into:
        write_into(options.into, made)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {failed}")


def missing(options: argparse.Namespace, known: set[Cell], usual: dict[Cell, float]) -> list[Cell]:
    """The cells to run, most wanted first; of equals the longest, so that none is left alone at the end."""
    wanted = {
        Cell(dataset, method, epsilon, seed)
        for dataset in options.datasets
        if (options.data / DATA[dataset]).exists()
        for method in (options.methods if dataset != "imdb" else {*IMDB, *BUFFERS} & set(options.methods))
        for epsilon in options.epsilons
        if method not in BUFFERS or epsilon == EPSILONS[0]
        for seed in range(options.seeds)
    }
    return sorted(wanted - known, key=lambda cell: (cell.turn, -usual.get(cell, 100.0 * cell.epsilon), cell))


if __name__ == "__main__":
    main()
