"""What does a guarantee rest on, besides its theorems? A closed list of assumptions, and what a run knows of each.

A run records what it knows by `record(ledger, name, status, detail)`; the ledger writes and hashes it. `stated` makes
the whole list of what was recorded, which every surface prints: what was not recorded counts as assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Status = Literal["checked", "assumed", "not needed"]
STATUSES: tuple[Status, ...] = ("not needed", "checked", "assumed")
"""From the strongest to the weakest: of several records about one run the weakest counts."""

ADJACENCY = "zero-out one row"
"""The short name of the neighbouring data that every price here is valid for."""
EARLIER_ADJACENCY = "add/remove one example"
"""What versions before 0.3 called it: the same prices, which hold for both."""
NEIGHBOURS = (
    "zero-out: of two neighbouring datasets one has a row where the other has a blank in the same place, which "
    "contributes nothing; the number of rows is public"
)


@dataclass(frozen=True)
class Assumption:
    """One sentence that a guarantee rests on."""

    name: str
    title: str
    sentence: str
    if_false: str
    """What breaks where the sentence does not hold."""
    statuses: tuple[Status, ...] = STATUSES
    """What a run may record of it; a ledger that says anything else is refused."""


ONLY_ASSUMED: tuple[Status, ...] = ("assumed",)
NEVER_CHECKED: tuple[Status, ...] = ("not needed", "assumed")
IN_ONE_THREAD = " in the thread that trains (what other threads, foreign kernels or NumPy make of rows is not seen)"
"""Where operators are followed: said where that is what was checked."""

_LIST = (
    Assumption(
        "unit",
        "whose privacy",
        "one unit (a row, unless another is named) has at most as many rows in the data as the guarantee says",
        "a person with k rows where one was assumed is less protected: for them epsilon is up to k times as "
        "large, and delta is larger",
    ),
    Assumption(
        "adjacency",
        "which change of the data",
        f"neighbouring data are meant as {NEIGHBOURS}",
        "epsilon is about another change of the data than you mean: where a row is replaced by another it is "
        "larger, and stated beside this one where it is known",
    ),
    Assumption(
        "one_example_per_row",
        "rows are made of one example",
        "each row was made of one example alone: no pair, history, overlapping window or repeated row holds another's",
        "an example that is in k rows is less protected: for it epsilon is up to k times as large, and delta is larger",
        NEVER_CHECKED,
    ),
    Assumption(
        "nothing_fitted",
        "nothing was fitted to the rows beforehand",
        "nothing that touches the rows or the model was fitted to private rows without noise: no scaler, imputer, "
        "vocabulary, class weights, feature selection, removal of duplicates or outliers, oversampling",
        "what was fitted is an exact statistic of the rows, and may show one of them; ask for it by "
        "vestige.private_statistics, which is charged",
        ONLY_ASSUMED,
    ),
    Assumption(
        "public_evaluation",
        "evaluation data are public",
        "data that the model was evaluated on, or that decided about stopping, the learning rate or the choice of a "
        "checkpoint, need no protection",
        "their scores are exact statistics without noise; ask privately (evaluate='private')",
        NEVER_CHECKED,
    ),
    Assumption(
        "public_settings",
        "settings are public",
        "hyper-parameters, structure, initial weights and whatever else training takes beside the batches of its "
        "private loader do not depend on the private rows, or the search for them was priced separately "
        "(tuned_epsilon)",
        "every run that was tried on the rows costs an epsilon of its own on top of this one",
        ONLY_ASSUMED,
    ),
    Assumption(
        "fixed_steps",
        "when training ends",
        "the number of steps did not depend on the answers beyond the plan that is priced",
        "stopping by what was seen is a further choice: only the epsilon of the whole plan holds",
    ),
    Assumption(
        "sampling",
        "who joins a step",
        "who joins a step was drawn as it is priced, and stays secret",
        "epsilon is larger, often several times: amplification by sampling is lost",
    ),
    Assumption(
        "rows_apart",
        "rows are computed apart in the model",
        "inside the model no row's outputs, gradient or stored state depend on another row",
        "clipping does not bound one row's influence, and no epsilon holds",
    ),
    Assumption(
        "loss_per_example",
        "the loss is per example",
        "the loss of a batch is the mean (or the sum, as was said) of its examples' losses, each computed from that "
        "example's outputs and targets alone",
        "one example moves the gradients of others, and clipping does not bound its influence",
    ),
    Assumption(
        "padding",
        "padding is ignored",
        "an example's loss does not depend on how far its batch was padded: what lies behind its own end is masked in "
        "the model, and ignored in the loss",
        "one long example changes everybody's gradient",
    ),
    Assumption(
        "divisor",
        "the divisor is public",
        "sums and losses are divided by public numbers, never by how many rows joined",
        "the divisor shows how many rows joined, exactly",
    ),
    Assumption(
        "bad_rows",
        "no row ends the training",
        "no row can make the program stop, skip a step or warn: one that cannot be read, collated or computed "
        "contributes nothing",
        "that training stopped, and at which step, shows that the row is there",
    ),
    Assumption(
        "key",
        "random numbers are secret",
        "the key of noise and samples was drawn from the operating system, is known to the processes of this run alone "
        "and was not used twice",
        "whoever knows the key, or sees two releases with the same noise, subtracts the noise",
    ),
    Assumption(
        "noise",
        "noise is what was priced",
        "the noise is as good as ideal Gaussian noise of the priced size",
        "the last bits of a release tell neighbouring sums apart (Mironov 2012)",
    ),
    Assumption(
        "rounding",
        "rounding of sums",
        "rounding in float32 moves a sum by less than 1/1024 of an example's bound when one row joins",
        "one row moves a sum by more than its bound, and epsilon is larger",
    ),
    Assumption(
        "processes",
        "processes read the same rows",
        "every process of the run reads the same rows in the same order",
        "a row that two processes read is in the data twice",
    ),
    Assumption(
        "nothing_else",
        "nothing else was shown",
        "nothing computed from the rows without noise was printed, logged, stored or timed beside the run: no training "
        "loss, no gradient, no list of who joined",
        "what was shown is not covered by epsilon at all",
        ONLY_ASSUMED,
    ),
)
ASSUMPTIONS: dict[str, Assumption] = {each.name: each for each in _LIST}
"""The closed list, in the order in which it is printed."""


@dataclass(frozen=True)
class Stated:
    """What a run says about one assumption."""

    name: str
    status: Status = "assumed"
    detail: str = ""
    """How it was checked, why it has no need of it, or what in particular is assumed."""
    recorded: bool = False

    @property
    def sentence(self) -> str:
        return ASSUMPTIONS[self.name].sentence

    @property
    def if_false(self) -> str:
        return ASSUMPTIONS[self.name].if_false

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.status}: {self.sentence}{detail}"

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "status": self.status,
            "sentence": self.sentence,
            "if_false": self.if_false,
            "detail": self.detail,
        }


class Recorder(Protocol):
    """A ledger: it keeps and hashes what is recorded."""

    def assume(self, name: str, status: Status, detail: str) -> None: ...


def record(ledger: Recorder, name: str, status: Status, detail: str = "") -> None:
    """Write down what a run knows about an assumption; again and again costs nothing where nothing is new.

    Of several records about one name the weakest status counts ("assumed" over "checked" over "not needed"), so a check
    that held for some steps only is no check of the run. `detail` is one public line, the same in every process.
    """
    check(name, status, detail)
    ledger.assume(name, status, detail)


def check(name: object, status: object, detail: object = "") -> None:
    """Refuse what is not in the closed list."""
    if not isinstance(name, str) or name not in ASSUMPTIONS:
        raise ValueError(f"assumption {name!r} is unknown; there are {', '.join(ASSUMPTIONS)}")
    if status not in ASSUMPTIONS[name].statuses:
        possible = " or ".join(repr(each) for each in ASSUMPTIONS[name].statuses)
        raise ValueError(f"assumption {name!r} cannot be {status!r}: nothing here could show it; it is {possible}")
    if not isinstance(detail, str) or not detail.isprintable():
        raise ValueError(f"assumption {name!r}: its detail {detail!r} must be one line of text")


def merged(earlier: Stated | None, now: Stated) -> Stated:
    """The weaker of two records about one assumption; the earlier one where they say the same."""
    if earlier is None or STATUSES.index(now.status) > STATUSES.index(earlier.status):
        return now
    if now.status != earlier.status or not now.detail or f"; {now.detail}; " in f"; {earlier.detail}; ":
        return earlier
    return Stated(now.name, now.status, "; ".join(filter(None, (earlier.detail, now.detail))), True)


def stated(recorded: Mapping[str, Stated], further: Iterable[Stated] = ()) -> tuple[Stated, ...]:
    """The whole list, as every surface prints it; `further` are known from the questions and terms themselves."""
    known = dict(recorded)
    for each in further:
        known[each.name] = merged(known.get(each.name), each)
    return tuple(known.get(name, _unrecorded(each)) for name, each in ASSUMPTIONS.items())


def _unrecorded(assumption: Assumption) -> Stated:
    """An assumption without a record: assumed, with the detail "not recorded" if a run could have checked it."""
    return Stated(assumption.name, detail="" if assumption.statuses == ONLY_ASSUMED else "not recorded")


PRICE_ALONE: tuple[dict[str, object], ...] = tuple(each.to_json() for each in stated({}))
"""What an epsilon rests on that was computed for a plan: there is no run, so nothing was checked."""


def weakest(lists: Iterable[Iterable[Any]]) -> tuple[dict[str, object], ...]:
    """Of several runs, what holds for all of them; a list of an earlier version's sentences says nothing."""
    known: dict[str, Stated] = {}
    for run in lists:
        said = {each["name"]: each for each in run if not isinstance(each, str)}
        for name in ASSUMPTIONS:
            each = said.get(name, {"status": "assumed", "detail": "not recorded"})
            known[name] = merged(known.get(name), Stated(name, each["status"], each["detail"], True))
    return tuple(each.to_json() for each in stated(known))


def lines(assumptions: Iterable[Mapping[str, Any]]) -> list[str]:
    """The list for a terminal, of what `to_json` gives: each sentence that is assumed, then the titles of what was
    checked and of what was not needed."""
    known = {status: [each for each in assumptions if each["status"] == status] for status in STATUSES}
    assumed = (ASSUMPTIONS[each["name"]].title + ": " + _explained(each) for each in known["assumed"])
    titles = {status: ", ".join(ASSUMPTIONS[each["name"]].title for each in known[status]) for status in STATUSES}
    return [
        *(f"assumed: {line}" for line in assumed),
        *(f"{status}: {titles[status]}" for status in ("checked", "not needed") if titles[status]),
    ]


def _explained(each: Mapping[str, object]) -> str:
    return f"{each['sentence']} ({each['detail']})" if each["detail"] else str(each["sentence"])
