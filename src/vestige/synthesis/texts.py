"""How do private texts become made-up ones? A language model is fine-tuned on them privately, and then writes.

Training is that of `vestige finetune`, with each text's label before it as a prompt. What the model writes afterwards
is post-processing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import inf, sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vestige import accounting, tasks
from vestige.checks import check_epsilon, check_number, check_steps
from vestige.compare.report.drawing import Figure, Series
from vestige.compare.report.html import items
from vestige.compare.report.page import panels
from vestige.files import write_json
from vestige.finetuning.job import FineTuning, start
from vestige.finetuning.pretrained_models import read_configuration, read_tokenizer
from vestige.finetuning.quality import judged
from vestige.methods.base import written
from vestige.priced_questions import Gaussian
from vestige.synthesis import quality
from vestige.synthesis.output import CARD, RECORD, Synthesis, card_of, check_writable, whole_page, write_rows
from vestige.synthesis.text_sampling import Drawing, sampled, without_repeats
from vestige.synthesis.texts_with_label_prompts import LabelCounts, Prompts, counts_of, read_texts, shares_of
from vestige.training.loop import Record
from vestige.training.run_folder import RunFolder

LABEL_SHARE = 0.02
"""Of the budget, in squares of mu, for the counts of labels: public, and chosen before any data."""
USUAL_BATCH, USUAL_EPOCHS = 1024, 10
SHOWN = 12
"""Made-up texts on the page."""


@dataclass(frozen=True, kw_only=True)
class TextSynthesis:
    """A synthesis of texts, as requested. All of it is public."""

    model: str
    data: str
    epsilon: float
    delta: float = 1e-5
    samples: int
    text_column: str = "text"
    label_column: str | None = None
    labels: tuple[str, ...] | None = None
    label_shares: tuple[float, ...] | None = None
    """Public shares of the labels; None: one noised count of each, which is charged."""
    user_column: str | None = None
    rows_per_user: int | None = None
    test: str | None = None
    max_length: int = 128
    pad_token: str | None = None
    lora: int | None = None
    lora_targets: tuple[str, ...] | None = None
    method: str = "dp-adamw"
    options: dict[str, object] = field(default_factory=dict)
    batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    lr: float | None = None
    physical_batch: int | Literal["auto"] | None = None
    engine: str = "bookkeeping"
    bfloat16: bool = False
    audit: int | None = None
    temperature: float = 1.0
    top_p: float = 0.95
    guidance: float = 0.0
    sampling_batch: int = 256
    seed: int = 0
    reproducible: bool = False
    device: str = "cpu"
    budget: str | None = None
    """The book that pays; None: that of VESTIGE_BUDGET, if it is set."""
    derived_from: str | None = None
    """The file that the texts were made of, for the book to know them."""
    slot: str | None = None


class TextRun:
    """A prepared synthesis: model and texts are read, noise is calibrated, and nothing was asked yet."""

    def __init__(self, job: TextSynthesis, out: Path, *, resume: bool = False) -> None:
        self.job = job
        _check(job)
        if resume:
            _require_same(job, load(RunFolder(out)), (out / "samples.part").exists())
        self._drawing = Drawing(job.max_length, job.temperature, job.top_p, job.guidance, job.sampling_batch, job.seed)
        read_configuration(job.model)
        tokenizer = read_tokenizer(job.model, job.pad_token)
        self.prompts = Prompts.of(tokenizer, job.labels)
        if self.prompts.longest + 1 > job.max_length:
            raise ValueError(
                f"max_length={job.max_length} leaves no room after a prompt of {self.prompts.longest} tokens"
            )
        self._test = None
        if job.test is not None:
            texts, numbers = read_texts(job.test, job.text_column, job.label_column, self.prompts.names)
            self._test = texts, [self.prompts.names[number] for number in numbers] if job.labels else None
        tuning = tuning_of(job)
        self._counts: LabelCounts | None = None
        settings: dict[str, object] = {"audit": job.audit, "bfloat16": job.bfloat16}
        if job.labels and job.label_shares is None:
            settings["normalise"] = self._counts = LabelCounts(self.prompts, label_multiplier(job), out / "labels.json")
        self.checkpoint, self._public, self.training = start(
            tuning,
            out,
            resume=resume,
            read=lambda file, tokens: self.prompts.read(
                file, job.text_column, job.label_column, tokens, job.max_length
            ),
            settings=settings,
            request={"synthesize": {**asdict(job), "options": {k: written(v) for k, v in job.options.items()}}},
        )
        self.folder = RunFolder(out)

    def shares(self) -> Mapping[str, float]:
        """The labels' shares among the samples: public, or released."""
        if not self.job.labels:
            return {"": 1.0}
        if self._counts is not None:
            return self._counts.shares()
        assert self.job.label_shares is not None
        return shares_of(dict(zip(self.job.labels, self.job.label_shares, strict=True)))

    def complete(
        self,
        on_record: Callable[[Record], bool] = lambda record: True,
        on_batch: Callable[[int, int, float], bool] = lambda made, of, pace: True,
    ) -> Synthesis | None:
        """Train, write, judge and seal; None where a callback said False: what was done is kept, to be resumed."""
        begin, training, job = time.perf_counter(), self.training, self.job
        for record in training.steps():
            if not on_record(record):
                training.ledger.close()
                return None
        paces: list[float] = []

        def on_made(made: int, of: int, pace: float) -> bool:
            paces.append(pace)
            return on_batch(made, of, pace)

        with training.averaged():
            self.checkpoint.save(self.folder.path)
            perplexity = {} if self._public is None else judged(self.checkpoint.model, self._public)
            prompts = dict(zip(self.prompts.names or ("",), self.prompts.tokens, strict=True))
            counts = counts_of(self.shares(), job.samples)
            part = self.folder.path / "samples.part"
            rows = sampled(
                self.checkpoint.model, self.checkpoint.tokenizer, prompts, counts, self._drawing, part, on_made
            )
        if rows is None:
            training.ledger.close()
            return None
        kept = without_repeats(rows)
        texts, labels = [text for _, text in kept], [label for label, _ in kept] if job.labels else None
        measured = {**quality.of_texts(texts, labels, len(rows) - len(kept), self._test), **perplexity}
        if paces:
            measured["tokens_per_second"] = paces[-1]
        columns: dict[str, Any] = {job.text_column: texts}
        if labels is not None and job.label_column is not None:
            columns[job.label_column] = labels
        made = Synthesis(
            kind="texts",
            method=f"{job.method} on {Path(job.model).name}" + ("" if job.lora is None else f", LoRA {job.lora}"),
            rows=columns,
            count=len(texts),
            guarantee=training.guarantee(),
            quality=measured,
            nonprivate_seconds=round(time.perf_counter() - begin, 3),
            asked=sum(training.ledger.spent.values()),
            out=self.folder.path,
        )
        self._seal(made, labels)
        return made

    def _seal(self, made: Synthesis, labels: list[str] | None) -> None:
        path, training = self.folder.path, self.training
        file = write_rows(path, made.rows, None, Path(self.job.data).suffix)
        (path / "samples.part").unlink(missing_ok=True)
        (path / "report.html").write_text(_page(made, labels, self._test), encoding="utf-8")
        write_json(path / RECORD, {**made.to_json(), "file": file.name})
        facts = {"task": "synthesize", "seed": self.job.seed, "nonprivate_seconds": made.nonprivate_seconds}
        known = {name: made.quality[name] for name in ("perplexity",) if name in made.quality}
        training.finish(training.result(**facts, **known))
        (path / CARD).write_text(card_of(path), encoding="utf-8")


def label_multiplier(job: TextSynthesis) -> float:
    """The noise multiplier of the counts of labels: a fixed share of the budget."""
    whole = accounting.calibrate(lambda multiplier: {Gaussian(multiplier): 1}, job.epsilon, job.delta)
    return float(f"{whole / sqrt(LABEL_SHARE):.6g}")


def _check(job: TextSynthesis) -> None:
    check_number("epsilon", job.epsilon)
    check_epsilon(job.epsilon)
    check_steps(job.samples, "samples")
    check_writable(Path(job.data).suffix)
    for name in ("epochs", "batch"):
        if getattr(job, name) is not None:
            check_steps(getattr(job, name), name)
    if job.text_column == job.label_column:
        raise ValueError(f"text_column={job.text_column!r} is the label_column, too: texts need a column of their own")
    if job.labels is None and job.guidance:
        raise ValueError(f"guidance={job.guidance} tells labels apart: give labels, too")
    if (job.labels is None) != (job.label_column is None):
        missing = "labels" if job.labels is None else "label_column"
        raise ValueError(f"{missing}=None: labels are named, and never read off the data; give both, or neither")
    names = job.labels or ("", " ")
    if len(set(names)) < len(names) or len(names) < 2:
        raise ValueError(f"labels={','.join(names)!r} must be two or more different names")
    if job.label_shares is not None:
        if job.labels is None or len(job.label_shares) != len(job.labels):
            raise ValueError(f"label_shares={job.label_shares!r} must be one number for each of the labels")
        if not all(0 < share < inf for share in job.label_shares):
            raise ValueError(
                f"label_shares={job.label_shares!r}: a class without a share is empty; leave its label out"
            )
    for name, value in (("audit", job.audit), ("user_column", job.user_column)):
        if value is not None and job.labels is not None and job.label_shares is None:
            raise ValueError(f"{name}={value!r} needs public label_shares: counts of labels are about single rows")
    if (job.user_column is None) != (job.rows_per_user is None):
        missing = "user_column" if job.user_column is None else "rows_per_user"
        raise ValueError(f"{missing}=None: user_column and rows_per_user go together")
    if job.test is not None:
        tasks.require_public(job.test, job.data)


TRAINED = ("text_column", "label_column", "labels", "label_shares", "max_length")
WRITTEN = ("temperature", "top_p", "guidance", "sampling_batch", "samples")
"""What a run that is resumed must be given again: what was trained follows from the first, what was written, if any
was, from the others."""


def _require_same(job: TextSynthesis, began: TextSynthesis, written: bool) -> None:
    for name in (*TRAINED, *(WRITTEN if written else ())):
        ours, before = (
            list(each) if isinstance(each, tuple) else each for each in (getattr(job, name), getattr(began, name))
        )
        if ours != before:
            raise ValueError(f"resume: {name} is not what it was when the run began, {before!r}")


def tuning_of(job: TextSynthesis) -> FineTuning:
    """The fine-tuning that a synthesis is made of."""
    population = len(tasks.read_columns(Path(job.data), {"text_column": job.text_column})["text_column"])
    shared: tuple[str, ...] = (
        "model",
        "data",
        "test",
        "text_column",
        "max_length",
        "pad_token",
        "lora",
        "lora_targets",
        "method",
    )
    shared += (
        "options",
        "epsilon",
        "delta",
        "steps",
        "lr",
        "engine",
        "physical_batch",
        "seed",
        "reproducible",
        "device",
        "budget",
        "derived_from",
        "slot",
        "user_column",
        "rows_per_user",
    )
    epochs = USUAL_EPOCHS if job.epochs is None and job.steps is None else job.epochs
    return FineTuning(
        **{name: getattr(job, name) for name in shared},
        task="causal-lm",
        batch=min(USUAL_BATCH, population) if job.batch is None else job.batch,
        epochs=epochs,
    )


def load(folder: RunFolder) -> TextSynthesis:
    """The job that a folder was started with."""
    job = folder.request().get("synthesize")
    if job is None or "model" not in job:
        raise ValueError(f"resume={str(folder.path)!r} is no synthesis of texts: continue it as it was started")
    several = {key: None if job[key] is None else tuple(job[key]) for key in ("labels", "label_shares", "lora_targets")}
    options = {key: inf if value == "inf" else value for key, value in job["options"].items()}
    return TextSynthesis(**{**job, **several, "options": options})


# --- the page ---------------------------------------------------------------------------------------------------------


def _page(made: Synthesis, labels: list[str] | None, test: Any) -> str:
    texts = next(iter(made.rows.values()))
    series = [Series("made up", _lengths(texts))]
    if test is not None:
        series.append(Series("public", _lengths(test[0])))
    figures = [Figure("lengths", "Words of a text", "words", "share", tuple(series), "line", percent=True)]
    if labels is not None:
        names = sorted(set(labels))
        drawn = [Series("made up", _shares(labels, names))]
        if test is not None and test[1] is not None:
            drawn.append(Series("public", _shares(test[1], names)))
        figures.append(
            Figure("labels", "Labels", "", "share", tuple(drawn), "line", categories=tuple(names), percent=True)
        )
    step = max(1, len(texts) // SHOWN)
    shown = [f"{labels[place]}: {texts[place]}" if labels else texts[place] for place in range(0, len(texts), step)]
    words = f"<p>Every so many-th of the made-up texts.</p><ul>{items(shown[:SHOWN])}</ul>"
    return whole_page(made, [("plots", "Lengths and labels", panels(figures, ())), ("texts", "Some of them", words)])


def _lengths(texts: Any) -> Any:
    counts = np.array([len(text.split()) for text in texts])
    width = max(1, int(np.ceil((counts.max() + 1) / 20)))
    shares = np.bincount(counts // width) / len(counts)
    return tuple((float(width * place), float(share), None, None) for place, share in enumerate(shares))


def _shares(labels: Any, names: list[str]) -> Any:
    counts = Counter(labels)
    return tuple((float(place), counts[name] / len(labels), None, None) for place, name in enumerate(names))
