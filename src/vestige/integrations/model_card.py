"""What does a model's card say about privacy? What its ledger proves, as Markdown, with all that it rests on.

The text is made of the ledger's public facts alone, after the run's folder was verified against it.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

from vestige import accounting
from vestige.accounting.ledger import LedgerError, LedgerHistory, read
from vestige.assumptions import ASSUMPTIONS, NEIGHBOURS, Stated
from vestige.checks import check_delta
from vestige.priced_questions import Question
from vestige.run_records import Audited, RunResult
from vestige.training.run_folder import RunFolder
from vestige.training.verify import facts_of, reprice, verify
from vestige.units import Users

ACCOUNTANTS = {
    "pld": "privacy loss distributions, composed from above",
    "renyi filter": "a Renyi filter: the questions followed from earlier answers, so the filter's own epsilon counts",
}
SAMPLING = {
    "poisson": "Poisson: at every step each row joins by a toss of its own",
    "cyclic-poisson": "cyclic Poisson: the rows are split once into parts that take turns; in its part's turn each row "
    "joins by a toss of its own",
    "every-example": "none: every row is in every step",
    "allocation": "random allocation: in every epoch each row is in one step, drawn uniformly and kept secret",
    "truncated": "truncated Poisson: each row joins by a toss of its own; of too many some are dropped at random",
}
ARITHMETIC = {
    "lattice": "added in integers on a public lattice, so that the last bit of a release tells nothing",
    "float32": "added in floating point",
}
ANSWERS = {
    "sampled-gaussian": "a sum over a Poisson sample, each row's part of it bounded, with Gaussian noise",
    "gaussian": "a sum over all rows, each row's part of it bounded, with Gaussian noise",
    "cyclic-gaussian": "a sum over a sample of the part whose turn it is, with Gaussian noise correlated over steps",
    "allocated-gaussian": "an epoch of sums, each row in one of them and its part of it bounded, with Gaussian noise",
    "truncated-gaussian": "a sum over a truncated Poisson sample, each row's part of it bounded, with Gaussian noise",
    "grouped-gaussian": "a sum over a Poisson sample of rows, each row's part of it bounded, with Gaussian noise, "
    "as it counts for a user with several rows",
    "exponential-mechanism": "a choice among public candidates, likelier the more rows speak for it",
    "trial": "a noised candidate update with a noised test of it; of a rejected one only the rejection is seen",
}
SEVERAL_ROWS = (
    "**A person with several rows** is less protected than this epsilon says: for somebody with three rows it is up to "
    "three times as large, and delta is larger too."
)
NOT_COVERED = (
    "**Other uses of the same rows.** Every further run on them, runs to choose hyper-parameters included, costs its "
    "own epsilon on top of this one, if it or anything chosen by it is released.",
    "**What was public before.** The weights that training began with, and the data behind them; the tokenizer; the "
    "names of labels; the number of rows; the model's structure; every hyper-parameter.",
    "**Test data.** Figures of quality are computed without noise, on data that must not need protection.",
    SEVERAL_ROWS,
    "**What others' rows tell.** What holds for many rows can be learned, and applied to somebody who is in none.",
    "**Timings**, and whatever a program printed, logged or stored beside the run.",
)


PAGES = ("report.md", "README.md", "adapter/README.md", "model/README.md")
"""The files of a run's folder that hold statements."""
HEADING, RESTS, CHECKING = "## Differential privacy", "### What it rests on", "### How to check it"
BEGIN, END = "<!-- privacy statement of vestige -->", "<!-- end of the privacy statement -->"
BASE = "base_config"
"""A folder beside an adapter's weights: the configuration of its base, with the names of labels."""


def state_in(readme: Path, statement: str) -> None:
    """Put the statement into a model card, in the place of an earlier one; the rest stays as it was written."""
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    before, found, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if found else ""
    gap = "" if not before or before.endswith("\n\n") else "\n" if before.endswith("\n") else "\n\n"
    readme.write_text(f"{before}{gap}{BEGIN}\n{statement}{END}\n{after.lstrip()}", encoding="utf-8")


def keep_base_config(model: Any, folder: Path) -> None:
    """Beside an adapter, what its base was configured with: its number of labels and their names, without which a
    pipeline says LABEL_0."""
    if (folder / "adapter_config.json").exists():
        model.config.save_pretrained(folder / BASE)


def model_card(run: str | Path, delta: float | None = None) -> str:
    """The privacy statement of a run as a section of Markdown, for a model card.

    `run` is the folder of a run, or the ledger of a `PrivacyEngine`; such a ledger does not say at which delta it is to
    be read, so `delta` does. Raises `LedgerError` where the folder contradicts its ledger.
    """
    return "\n".join(_lines(_read(Path(run), delta))) + "\n"


def unchecked_pages(run: Path) -> tuple[str, ...]:
    """Which pages of a run's folder hold a statement of an earlier version, without assumptions. Raises `LedgerError`
    where one holds another statement than the ledger gives: it was edited."""
    there = [page for page in PAGES if (run / page).is_file()]
    if not there:
        return ()
    wanted, unknown = model_card(run).split(CHECKING)[0], []
    for page in there:
        text = (run / page).read_text(encoding="utf-8", errors="replace")
        if wanted in text or HEADING not in text:
            continue
        if RESTS in text:
            raise LedgerError(
                f"{run / page} says something else than the ledger, or another version of Vestige wrote it: write it "
                f"again by vestige report, or remove it"
            )
        unknown.append(page)
    return tuple(unknown)


@dataclass(frozen=True)
class _Account:
    """What a verified ledger says."""

    where: Path
    history: LedgerHistory
    asked: Counter[Question]
    promise: accounting.Guarantee
    finished: bool | None
    """None: the ledger of a loop, which ends when its program does."""
    audit: Audited | None = None
    """What the canaries of a finished run show, by its sealed result."""

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.history.facts

    @property
    def users(self) -> Users | None:
        return facts_of(self.facts).users


def _read(path: Path, delta: float | None) -> _Account:
    ledger = path if path.is_file() else RunFolder(path).ledger
    if not ledger.exists():
        raise ValueError(f"{str(path)!r} is no run: there is no ledger (ledger.jsonl) in it")
    history = read(ledger)
    if history.facts.get("sampling") == "every-example" and "method" not in history.facts:
        raise ValueError(
            f"{str(path)!r} is the ledger of statistics: there is no model to make a card of. `vestige verify` says "
            "what was spent"
        )
    history.require(ledger, "population", "sample_rate", "sampling", "noise", "noise_multiplier", "method")
    if "delta" not in history.facts:
        return _of_a_loop(ledger, history, delta)
    if delta is not None:
        raise ValueError(f"delta={delta} cannot be given too: the run was planned and stopped at its own")
    verdict = verify(ledger.parent, unfinished=True)
    asked = history.spent(replays_are_free=history.facts["noise"] == "seeded")
    result = RunFolder(ledger.parent).result() if verdict.finished and history.facts.get("canaries") else None
    audit = None if result is None else RunResult.from_json(result).audit
    return _Account(ledger.parent, history, asked, verdict.guarantee, verdict.finished, audit)


def _of_a_loop(ledger: Path, history: LedgerHistory, delta: float | None) -> _Account:
    """A loop's ledger that names no delta: it is priced at the given one."""
    if delta is None:
        raise ValueError("delta=None: the ledger of a training loop does not say it; give one below 1/N, such as 1e-6")
    check_delta(delta, history.facts["population"])
    asked = history.spent(replays_are_free=False)
    try:
        promise = reprice(asked, delta, history.facts, history.assumptions)
    except ValueError as error:
        raise LedgerError(f"{ledger}: {error}") from error
    return _Account(ledger, history, asked, promise, None)


# --- the text ---------------------------------------------------------------------------------------------------------


def _lines(run: _Account) -> Iterator[str]:
    yield from (HEADING, "", _headline(run), "", "| | |", "|---|---|")
    yield from (f"| {name} | {words} |" for name, words in _rows(run))
    yield from (
        "",
        RESTS,
        "",
        "| | in this run | what | where it does not hold |",
        "|---|---|---|---|",
    )
    yield from map(_assumption, run.promise.assumptions)
    yield from ("", "### What is not covered", "")
    yield from (f"- {line}" for line in NOT_COVERED if run.users is None or line is not SEVERAL_ROWS)
    yield from ("", CHECKING, "", _check(run))


def _assumption(each: Stated) -> str:
    detail = f" ({escaped(each.detail)})" if each.detail else ""
    title, sentence = _begun(ASSUMPTIONS[each.name].title), _begun(each.sentence)
    return f"| {title} | {each.status}{detail} | {sentence} | {each.if_false} |"


def _begun(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}"


def escaped(text: object) -> str:
    """A string of a file as one line of Markdown that is plain text: no tag, link, heading, row or code."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in str(text)).split())
    return "".join(ESCAPED.get(letter, letter) for letter in line)


ESCAPED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "\\": "&#92;", "`": "&#96;", "*": "&#42;"}
ESCAPED |= {"[": "&#91;", "]": "&#93;", "#": "&#35;", "~": "&#126;"}


def _headline(run: _Account) -> str:
    promise = run.promise
    change = "one row of the training data, or a blank in its place (the number of rows is public)"
    gone = "that row had been blank"
    if run.users is not None:
        change = "all rows of one user, or blanks in their place (who owns which row is public)"
        gone = "those rows had been blank"
    if promise.epsilon is None:
        would = promise.epsilon_if_noise_were_secret
        also = "" if would is None else f" Epsilon would be {would:.4g} if the noise were secret."
        return f"**No epsilon holds for this model**: {escaped('; '.join(promise.reasons))}.{also}"
    if run.finished is False:
        return (
            "**This run is not finished, and this is no statement about a model.** What its ledger holds so far costs "
            f"epsilon {_upwards(promise.epsilon):g} at delta {promise.delta:g}, for {change}; nothing tells whether "
            "rows were cut from it."
        )
    what, whole = "This model was trained", "the model"
    if run.facts.get("synthesis") is not None:
        what, whole = f"These {run.facts['synthesis']} were made", "them"
    return (
        f"{what} with differential privacy: **epsilon {_upwards(promise.epsilon):g} at delta "
        f"{promise.delta:g}**, for {change}. Whoever sees {whole}, and everything released on the way to it, "
        f"learns almost the same as if {gone}."
    )


def _upwards(epsilon: float) -> float:
    """To four significant digits, and never less than it is."""
    digits = Decimal(epsilon)
    return float(digits.quantize(Decimal(1).scaleb(digits.adjusted() - 3), rounding=ROUND_CEILING))


def _rows(run: _Account) -> Iterator[tuple[str, str]]:
    facts, promise = run.facts, run.promise
    population, rate, planted = facts["population"], facts["sample_rate"], facts.get("canaries", 0)
    yield "What is protected", _protected(run, population, planted)
    yield "Which change of the data", NEIGHBOURS if run.users is None else run.users.neighbours
    yield "Mechanism", _mechanism(run)
    if promise.epsilon is not None:
        yield "Epsilon, delta", f"{_upwards(promise.epsilon):g}, {promise.delta:g}"
        by_renyi = "" if promise.epsilon_rdp is None else f"; by Renyi divergences alone {promise.epsilon_rdp:.4g}"
        yield "Accountant", f"{ACCOUNTANTS.get(promise.accountant, promise.accountant)}: an upper bound{by_renyi}"
        yield from _means(promise.meaning, "row" if run.users is None else "user")
    if planted:
        yield "Audit", _audited(planted, run.audit)
    users = run.users is not None and run.users.sample == "users"
    drawn, unit = SAMPLING.get(facts["sampling"], escaped(facts["sampling"])), "user" if users else "row"
    yield "Sampling", f"{drawn.replace('row', 'user') if users else drawn}, rate {rate:.6g}"
    arithmetic, kind = ARITHMETIC[facts.get("arithmetic", "float32")], escaped(facts["noise"])
    yield "Noise", f"multiplier {facts['noise_multiplier']:.6g} of each {unit}'s bound, {kind}; {arithmetic}"
    yield "Steps", _steps(run)
    yield "Expected batch", f"{rate * population:.6g} {unit}s"
    yield "Method", _method(facts["method"])


def _protected(run: _Account, population: int, planted: int) -> str:
    if run.users is None:
        people = population - planted
        return f"one example: one row of the training data, of {people:,} (their number is public)"
    users = run.users
    owned = "several people may own a row; " if users.several_owners else ""
    if users.sample == "users":
        rows = "the mean of the rows" if users.cap is None else f"the mean of up to {users.cap} rows"
        how = f"a step adds one vector of each user that it draws: {rows}, clipped once"
    else:
        most = "" if users.cap is None else f", at most {users.cap} of them in a step"
        how = f"each user has at most {users.rows_per_user} rows{most}, each clipped by itself"
    number = "" if users.users is None else f", of {users.users:,} users"
    return f"one user: all rows of one{number} ({owned}who owns which row is public); {how}"


def _audited(planted: int, found: Audited | None) -> str:
    words = f"{planted:,} made-up rows were planted, each by a coin, and are counted in the expected batch"
    if found is None:
        return words
    return (
        f"{words}. They show that epsilon is at least {found.epsilon_lower_bound:.3g} ({found.confidence:.0%} "
        "confidence): a test of the code that can find a fault, and cannot prove that there is none"
    )


def _means(meaning: accounting.Meaning | None, unit: str) -> Iterator[tuple[str, str]]:
    if meaning is None:
        return
    yield (
        "An attacker, at most",
        f"who sees all releases and knows all other {unit}s is right about one {unit}'s presence "
        f"{meaning.attacker_accuracy:.1%} of the time at even odds, and detects {meaning.detection_at_1_percent:.1%} "
        "of those present at 1% false alarms",
    )
    if meaning.gaussian_mu is not None:
        yield (
            "As one noisy number (Gaussian mu)",
            f"{meaning.gaussian_mu:.3g}: an attacker learns no more than from a single noisy number whose mean is "
            f"{meaning.gaussian_mu:.3g} standard deviations of the noise higher where the {unit} is there (0: nothing "
            "is learned), down to this delta",
        )
    if meaning.epsilon_replacing is not None:
        by = {"theorem": "", "group of two": ", as removing one and adding one"}[meaning.replacing_by]
        yield f"Replacing a {unit}", f"epsilon {_upwards(meaning.epsilon_replacing):g} at the same delta{by}"


def _mechanism(run: _Account) -> str:
    kinds: dict[str, int] = {}
    for question, count in run.asked.items():
        kinds[question.kind] = kinds.get(question.kind, 0) + count
    asked = "; ".join(f"{count:,} times {ANSWERS.get(kind, kind)}" for kind, count in kinds.items())
    moved = "The model moves by the noised answers, and by nothing else of the data"
    if run.facts.get("synthesis") is not None:
        moved = "What was made follows from the noised answers, and from nothing else of the data"
    return f"{asked or 'nothing was asked'}. {moved}"


def _steps(run: _Account) -> str:
    done, attempts = run.history.last_step + 1, run.history.attempts
    planned = f" of {run.facts['steps']:,} planned" if "steps" in run.facts else ""
    again = f", in {attempts} attempts, all charged" if attempts > 1 else ""
    return f"{done:,}{planned}; {sum(run.asked.values()):,} questions charged{again}"


def _method(identity: object) -> str:
    if not isinstance(identity, Mapping):
        return escaped(identity)
    settings = {**identity["options"], **identity.get("parts", {})}
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    return escaped(f"{identity['name']}" + (f" ({shown})" if shown else ""))


def _check(run: _Account) -> str:
    history = run.history
    chain = f"The ledger has {history.rows:,} chained rows and ends with the hash `{history.head}`."
    if run.finished is None:
        name = shlex.quote(escaped(run.where.name))
        return f"{chain} `vestige card {name} --delta {run.promise.delta:g}` prices it again."
    files = " It holds the hash of the model's files." if history.files is not None else ""
    return f"{chain}{files} `vestige verify RUN` recomputes epsilon from it and fails on any edit."
