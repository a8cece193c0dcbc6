"""Which runs reproduce a paper's table or figure? Presets by name, with what the paper printed and left unsaid.

The presets are data, in data/presets.toml; this module reads them and sets our numbers beside the printed ones.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from vestige.checks import check_steps
from vestige.compare.execute_run import Source, task_of
from vestige.compare.specification import Specification
from vestige.files import read_json
from vestige.methods.registry import METHODS, nearest
from vestige.run_records import CompletedRun, PrivacyTarget, RunRecord, completed


@dataclass(frozen=True)
class Printed:
    """One printed number: what it is called, its value, and the label, task, budget and quantity of ours."""

    name: str
    value: float
    label: str
    quantity: str = "accuracy"
    task: str | None = None
    budget: PrivacyTarget | None = None
    rate: str = "given"
    """Which of our rows follows the paper: at the rate it gives, or at the automatic one where it gives none."""


@dataclass(frozen=True)
class Preset:
    """A table or figure: the runs it takes, what was printed, and what had to be assumed."""

    name: str
    what: str
    paper: str
    full: Specification
    """As in the paper, without the paths of the data."""
    notes: tuple[str, ...]
    printed: tuple[Printed, ...]
    small: Mapping[str, Any]
    """What --small changes."""
    timed: bool = False
    """Whether it measures time: its runs are then made one after another, never stacked."""
    nonprivate_epochs: int = 0
    """Epochs of a model without privacy, where the table has such a column."""
    figures: tuple[Mapping[str, Any], ...] = ()
    """What the paper draws: x and y of each figure, for `paper_figures`."""
    whole: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The numbers of training and test examples of each task that the protocol takes whole."""

    def missing(self) -> list[str]:
        """The methods that it needs and this version does not have."""
        wanted = dict.fromkeys(contender.method for contender in self.full.contenders)
        return [name for name in wanted if name not in METHODS]

    def specification(
        self, data: str | None, *, small: bool = False, seeds: int | None = None, reproducible: bool = False
    ) -> Specification:
        """The comparison that can be made now: at full size as in the paper, or a few short runs; with another number
        of seeds if one is given."""
        full = self.full
        known = tuple(contender for contender in full.contenders if contender.method in METHODS)
        if not known:
            raise ValueError(f"{self.name} needs {', '.join(self.missing())}, and this version has no such method")
        labels = [contender.label for contender in known]
        made = replace(
            full,
            contenders=known,
            problems=tuple(replace(problem, data=data) for problem in full.problems),
            baseline=full.baseline if full.baseline in labels else labels[0],
            reproducible=reproducible,
        )
        if small:
            few = dict(self.small)
            steps = few.pop("steps")
            problems = tuple(replace(each, settings={**each.settings, "steps": steps}) for each in made.problems)
            made = replace(made, problems=problems, evaluations=min(5, made.evaluations), **few)
        if seeds is None:
            return made
        check_steps(seeds, "seeds")
        return replace(made, seeds=tuple(range(seeds)))

    def assumed(self, specification: Specification, small: bool = False) -> list[str]:
        """Everything in which these runs differ from the paper, or that it leaves open: its notes, and what was asked
        for here."""
        lines, protocol = list(self.notes), self.full
        if len(specification.seeds) != len(protocol.seeds):
            lines.append(f"{len(specification.seeds)} seeds, where the protocol has {len(protocol.seeds)}")
        if small:
            steps = specification.problems[0].settings.get("steps", "fewer")
            lines.append(
                f"--small: {steps} steps instead of {protocol.steps}: nothing here can be set beside the paper"
            )
        if specification.reproducible:
            lines.append("--reproducible: noise and sampling follow from the seed, so no epsilon holds for these runs")
        return lines


def taken(preset: Preset, specification: Specification, small: bool = False) -> dict[str, Any]:
    """The rows and the batch that the runs of a preset take of each dataset, by task, each with a line that describes
    them.

    Data that are not the protocol's are refused; with `small`, a part of a dataset may stand for the whole.
    """
    found = {}
    for problem in specification.problems:
        task = task_of(Source(problem.task, problem.data, specification.subset))
        rate = problem.settings.get("sample_rate", specification.sample_rate)
        sizes, rows = (len(task.train[1]), len(task.test[1])), task.rows
        line = f"all {sizes[0]:,} training and {sizes[1]:,} test examples"
        if rows is not None:
            each = [size // task.classes for size in sizes]
            line = f"{rows}: the first {each[0]} and {each[1]} of each class, in the file's order"
        whole = preset.whole.get(problem.task, sizes)
        if sizes != whole:
            there = f"{sizes[0]:,} training and {sizes[1]:,} test examples of {problem.task}"
            if not small:
                raise ValueError(
                    f"data={problem.data!r} holds {there}, and {preset.name} takes all {whole[0]:,} and {whole[1]:,}: "
                    "give the whole dataset (or --small, to see that it works)"
                )
            line = f"{there}, where the paper has {whole[0]:,} and {whole[1]:,}"
        batch = rate * sizes[0]
        found[problem.task] = {
            "line": f"{problem.task}: {line}; expected batch {batch:,.6g} at rate {rate:.6g}",
            "expected_batch": batch,
            "train": None if rows is None else rows.train.tolist(),
            "test": None if rows is None else rows.test.tolist(),
        }
    return found


def find(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown{nearest(name, PRESETS)}; `vestige presets` lists them")
    return PRESETS[name]


def of_folder(folder: Path) -> tuple[Preset, bool] | None:
    """The preset that a comparison's folder was made from, and whether with --small."""
    path = folder / "preset.json"
    if not path.exists():
        return None
    made = read_json(path)
    if not isinstance(made, dict) or not isinstance(made.get("preset"), str) or "small" not in made:
        raise ValueError(f"{path} names no preset: remove it, or make the folder again")
    return find(made["preset"]), bool(made["small"])


def timed_in(folder: Path) -> bool:
    """Whether a comparison's folder was made from a preset that measures time."""
    made = of_folder(folder)
    return made is not None and made[0].timed


# --- beside the paper ------------------------------------------------------------------------------------------------


def beside(preset: Preset, records: Iterable[RunRecord]) -> list[dict[str, object]]:
    """Each printed number with ours: as in the paper, at the automatic rate, and at that rate where all methods spend
    one epsilon; None where no run matches."""
    rows, done = [], completed(records)
    equal = next((budget for budget in preset.full.budgets if budget.kind == "epsilon"), None)
    for printed in preset.printed:
        ours = {rate: _ours(preset, done, printed, rate) for rate in ("given", "auto")}
        at_sigma = printed.budget is not None and printed.budget.kind == "paper_sigma"
        same = replace(printed, budget=equal) if equal and at_sigma else None
        on_its_terms = ours[printed.rate]
        rows.append(
            {
                "quantity": printed.name,
                "printed": printed.value,
                "ours": on_its_terms,
                "difference": None if on_its_terms is None else on_its_terms - printed.value,
                "ours_at_auto": ours["auto"],
                "ours_at_equal_epsilon": _ours(preset, done, same, "auto") if same else None,
            }
        )
    return rows


def _ours(preset: Preset, done: Sequence[CompletedRun], printed: Printed, rate: str) -> float | None:
    """The mean over the final runs that a printed number is about."""
    values = [_quantity(record, printed.quantity) for record in done if _matches(record, printed, rate)]
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    if printed.quantity != "relative seconds":
        return mean
    first = next(each for each in preset.printed if each.value == 1.0)
    unit = [record.seconds for record in done if record.seconds is not None and _matches(record, first, rate)]
    return mean * len(unit) / sum(unit) if unit else None


def _matches(record: CompletedRun, printed: Printed, rate: str) -> bool:
    run = record.run
    return (
        run.stage == rate
        and run.label == printed.label
        and printed.task in (None, run.task)
        and printed.budget in (None, run.budget)
    )


def _quantity(record: CompletedRun, quantity: str) -> float | None:
    if quantity == "accuracy in percent":
        return 100 * record.score
    if quantity in ("seconds", "relative seconds"):
        return record.seconds
    if quantity in record.pictures:
        values = [value for _, value in record.pictures[quantity]]
        flat = [v for value in values for v in (value if isinstance(value, list) else [value]) if v is not None]
        return sum(flat) / len(flat) if flat else None
    value = record.to_json().get(quantity)
    return float(value) if isinstance(value, int | float) else None


# --- from the data ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def published() -> dict[str, Any]:
    """The figures printed in the papers, as data. They are claims, set beside ours; none of them is a guarantee."""
    content: dict[str, object] = json.loads((resources.files("vestige") / "data" / "published.json").read_text())
    return content


def _load() -> dict[str, Preset]:
    content = tomllib.loads((resources.files("vestige") / "data" / "presets.toml").read_text())
    return {name: _preset(name, entry, content) for name, entry in content["preset"].items()}


def _preset(name: str, entry: Mapping[str, Any], content: Mapping[str, Any]) -> Preset:
    paper, chosen = content["paper"][entry["paper"]], entry["contenders"]
    labels = content["field"][chosen] if isinstance(chosen, str) else chosen
    full = Specification.from_json(
        {
            "baseline": labels[0],
            **paper["protocol"],
            **entry.get("specification", {}),
            "problems": [_problem(task, entry, content) for task in entry["tasks"]],
            "contenders": [{"label": label, **content["contender"][label]} for label in labels],
        }
    )
    budgets = [PrivacyTarget(**each) for each in paper["protocol"]["budgets"]]
    printed = (each for pattern in entry.get("printed", ()) for each in _printed(pattern, labels, budgets))
    small = {**paper["small"], **entry.get("small", {})}
    return Preset(
        name=name,
        what=entry["what"],
        paper=paper["title"],
        full=full,
        notes=(*paper["notes"], *entry.get("notes", ())),
        printed=tuple(each for each in printed if each.budget is None or each.budget in full.budgets),
        small={key: tuple(part) if isinstance(part, list) else part for key, part in small.items()},
        timed=entry.get("timed", False),
        nonprivate_epochs=entry.get("nonprivate_epochs", 0),
        figures=tuple(entry.get("figures", ())),
        whole={task: tuple(content["problem"][task]["sizes"]) for task in entry["tasks"] if task in content["problem"]},
    )


def _problem(task: str, entry: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, object]:
    """A task with the settings that its paper printed for it; at epsilon 1 also those of its methods."""
    printed = content["problem"].get(task)
    if printed is None:
        return {"task": task}
    row = _printed_row(printed["initial"])
    settings: dict[str, Any] = {"sample_rate": min(1.0, row["batch"] / printed["sizes"][0]), "lr": row["lr"]}
    if "options" in printed:
        settings["options"] = printed["options"]
    if entry.get("initial", False):
        dataset = printed["initial"].rpartition("/")[2]
        settings["by_method"] = {
            method: _initial(given, _printed_row(f"{given['at']}/{dataset}"))
            for method, given in content["initial"].items()
        }
    return {"task": task, "settings": settings}


def _initial(given: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one method at epsilon 1, by our names, from a row that its paper printed."""
    rate = {"lr": row[given["lr"]]} if "lr" in given else {}
    return {**rate, "options": {ours: row[theirs] for ours, theirs in given["options"].items()}}


def _printed_row(place: str) -> dict[str, Any]:
    ((_, row),) = _numbers(published(), place.split("/"), (), ())
    return dict(row)


def _printed(pattern: Mapping[str, Any], labels: Sequence[str], budgets: Sequence[PrivacyTarget]) -> Iterator[Printed]:
    """The printed numbers that match one pattern of a preset."""
    for words, value in _numbers(published(), pattern["at"].split("/"), labels, budgets):
        label = pattern.get("label", "{label}").format(**words)
        budget = PrivacyTarget(**pattern["budget"]) if "budget" in pattern else words.get("budget")
        rate = "auto" if label in pattern.get("automatic", ()) else "given"
        quantity, task = pattern.get("quantity", "accuracy"), pattern.get("task")
        yield Printed(pattern["name"].format(**words), value, label, quantity, task, budget, rate)


def _numbers(
    tree: Any, path: Sequence[str], labels: Sequence[str], budgets: Sequence[PrivacyTarget]
) -> Iterator[tuple[dict[str, Any], Any]]:
    """The values at a path in the published figures, with what each {word} of the path matched."""
    if not path:
        yield {}, tree
        return
    head, *rest = path
    word = head.strip("{}")
    if word == head:
        steps: Iterable[tuple[object, object]] = [(None, tree[int(head)] if isinstance(tree, list) else tree[head])]
    elif word == "budget":
        steps = zip(budgets, tree, strict=True)
    else:
        steps = ((key, part) for key, part in tree.items() if word != "label" or key in labels)
    for key, part in steps:
        for words, value in _numbers(part, rest, labels, budgets):
            yield ({word: key, **words} if word != head else words), value


PRESETS = _load()
