"""How do a checkpoint and a file of texts become a private run? A job is a value: it can be stored and resumed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige import tasks
from vestige.budget.spending import Budget, account_of, of_users
from vestige.checks import check_steps, renamed, secure_mode
from vestige.finetuning.pretrained_models import (
    Checkpoint,
    check_fits,
    frozen,
    has_head,
    need,
    read_configuration,
    read_model,
    read_tokenizer,
    with_lora,
)
from vestige.finetuning.quality import judged
from vestige.finetuning.texts import Texts, class_names, numbers_of, tokenised
from vestige.integrations.model_card import BASE, escaped, model_card
from vestige.mechanism.losses.model_losses import next_token
from vestige.methods.base import Method, written
from vestige.methods.registry import as_given, make_method
from vestige.processes.distributed_setup import processes
from vestige.run_records import RunResult
from vestige.tf32 import check_device
from vestige.training.loop import Record
from vestige.training.private_statistics import given_bound
from vestige.training.run import Training, train
from vestige.training.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = ("classification", "causal-lm")
USUAL_BATCH, USUAL_EPOCHS = 256, 3
USUAL_RATES = {True: 1e-3, False: 1e-4}
"""Learning rates of Adam, for adapters and for whole models: the usual ones, chosen without looking at data."""


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """A private fine-tuning, as requested. All of it is public."""

    model: str
    data: str
    test: str | None = None
    """A file with the same columns, whose texts need no protection: the model is judged by it, without noise."""
    text_column: str = "text"
    label_column: str | None = None
    labels: tuple[str, ...] | None = None
    task: str | None = None
    max_length: int = 128
    tokens_per_example: int | None = None
    pad_token: str | None = None
    lora: int | None = None
    lora_targets: tuple[str, ...] | None = None
    freeze: str | None = None
    method: str = "dp-adamw"
    options: dict[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    delta: float = 1e-5
    noise_multiplier: float | None = None
    batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    lr: float | Literal["auto"] | None = None
    user_column: str | None = None
    """The column that names whose each text is."""
    sample: str = "rows"
    rows_per_user: int | str | None = None
    cap: int | str | None = None
    sampling: str = "poisson"
    max_batch: int | None = None
    noise: str = "lattice"
    engine: str = "bookkeeping"
    physical_batch: int | Literal["auto"] | None = None
    num_workers: int = 0
    seed: int = 0
    reproducible: bool = False
    device: str = "cpu"
    budget: str | None = None
    """The book that pays; None: that of VESTIGE_BUDGET, if it is set."""
    derived_from: str | None = None
    """The file whose rows the texts were made of, one of one, where the book is about those."""
    slot: str | None = None

    @property
    def aim(self) -> str:
        """The task, as given or as the columns say."""
        return self.task or ("causal-lm" if self.label_column is None else "classification")


Reader = Callable[[str, "PreTrainedTokenizerBase"], Texts]
"""Reads the texts of a file, with a tokenizer."""


def prepared(job: FineTuning, read: Reader | None = None) -> tuple[Checkpoint, Texts, Texts | None]:
    """The model on its device, the texts, and those to test it by; all that can be wrong with them is refused here."""
    _check(job)
    config = read_configuration(job.model)
    tokenizer = read_tokenizer(job.model, job.pad_token)
    check_fits(job.model, config, tokenizer, job.max_length)
    names = _names(job, config) if job.aim == "classification" else {}
    read = read or (lambda file, tokens: _texts(file, job, tokens, names))
    texts = read(job.data, tokenizer)
    with renamed({"data": "test"}):
        public = None if job.test is None else read(job.test, tokenizer)
    _pace(job, len(texts))
    processes(job.device)  # of several, each has a GPU of its own
    check_device(job.device)
    checkpoint = _checkpoint(job, config, tokenizer)
    checkpoint.model.to(job.device)
    return checkpoint, texts, public


def start(
    job: FineTuning,
    out: Path,
    *,
    resume: bool = False,
    read: Reader | None = None,
    settings: Mapping[str, Any] | None = None,
    request: Mapping[str, object] | None = None,
) -> tuple[Checkpoint, Texts | None, Training]:
    """Read the checkpoint and the texts, and prepare the run; no question is asked yet, and all that can be wrong was
    refused before anything is written.

    `read` replaces how texts become examples, `settings` are further ones of `vestige.train`, and `request` is written
    down beside the job."""
    method = make_method(job.method, **job.options)
    lr = _rate(job, method)
    checkpoint, texts, public = prepared(job, read)
    _agree(job)
    batch, steps = _pace(job, len(texts))
    training = train(
        checkpoint.model,
        F.cross_entropy if job.aim == "classification" else _next_token(job.tokens_per_example),
        texts,
        target="labels",
        method=method,
        sample_rate=batch / len(texts),
        steps=steps,
        delta=job.delta,
        epsilon=job.epsilon,
        noise_multiplier=job.noise_multiplier,
        lr=lr,
        sampling=job.sampling,
        max_batch=job.max_batch,
        users=None if job.user_column is None else tasks.users_of(job.data, job.user_column, len(texts)),
        sample=job.sample,  # type: ignore[arg-type]
        rows_per_user=given_bound(job.rows_per_user),  # type: ignore[arg-type]
        cap=given_bound(job.cap),  # type: ignore[arg-type]
        secure_mode=secure_mode(job.noise),
        cuda_graphs=job.engine != "unrecorded",
        engine="bookkeeping" if job.engine == "unrecorded" else job.engine,
        max_physical_batch_size=job.physical_batch,
        num_workers=job.num_workers,
        pin_memory=job.device.startswith("cuda"),
        reproducible=job.seed if job.reproducible else None,
        out=out,
        resume=resume,
        budget=_account(job),
        request=request_of(job) if request is None else dict(request),
        **(settings or {}),
    )
    return checkpoint, public, training


def _account(job: FineTuning) -> Budget:
    """Which book pays; tokens are known by the file that they were read from."""
    found = account_of(job.budget)
    for name in ("derived_from", "slot"):
        if found is None and getattr(job, name) is not None:
            raise ValueError(f"{name}={getattr(job, name)!r} is about a book: give budget=BOOK, too")
    source = tasks.source_of(None, job.data)
    found = found and replace(found, derived_from=job.derived_from, slot=job.slot, source=source)
    return of_users(found, job.user_column)


def request_of(job: FineTuning) -> dict[str, object]:
    """What is written down of a job, to be resumed by."""
    return {"finetune": {**asdict(job), "options": {key: written(value) for key, value in job.options.items()}}}


def complete(
    job: FineTuning,
    checkpoint: Checkpoint,
    public: Texts | None,
    training: Training,
    on_record: Callable[[Record], bool],
) -> RunResult:
    """Run a prepared fine-tuning to its end, or until `on_record` says False; then judge and save the model.

    Of several processes each judges its share of the public texts, and process 0 writes."""
    begin, interrupted = time.perf_counter(), False
    for record in training.steps():
        if training.group.any(not on_record(record)):  # any of them was interrupted
            interrupted = True
            break
    took = round(time.perf_counter() - begin, 3)
    facts: dict[str, object] = {"task": job.aim, "seed": job.seed, "nonprivate_seconds": took}
    if interrupted:
        training.ledger.close()
        return training.result(**facts, stopped="interrupted")
    assert training.folder is not None
    folder = training.folder.path
    with training.averaged():
        quality = {} if public is None else judged(checkpoint.model, public, training.group)
        training.group.first(lambda: checkpoint.save(folder))
    result = training.result(**facts, **quality)
    training.finish(result)
    training.group.first(lambda: _describe(job, folder, checkpoint.kind))
    return result


def _describe(job: FineTuning, folder: Path, kind: str) -> None:
    """Write the privacy statement, by itself and in the model's card."""
    statement = model_card(folder)
    (folder / "report.md").write_text(statement, encoding="utf-8")
    (folder / kind / "README.md").write_text(_readme(job, folder.name, statement), encoding="utf-8")


def load(folder: RunFolder) -> FineTuning:
    """The job that a run folder was started with."""
    request = folder.request()
    if "finetune" not in request:
        raise ValueError(f"resume={str(folder.path)!r} is no run of vestige finetune: continue it as it was started")
    job = request["finetune"]
    options = {key: inf if value == "inf" else value for key, value in job["options"].items()}
    several = {key: tuple(job[key]) if job[key] else None for key in ("labels", "lora_targets")}
    return FineTuning(**{**job, **several, "options": as_given(options)})


# --- what a job asks for ----------------------------------------------------------------------------------------------


def _check(job: FineTuning) -> None:
    tasks.require_public(job.test, job.data)
    if job.aim not in TASKS:
        raise ValueError(f"task={job.task!r} is unknown; choose from {', '.join(TASKS)}")
    if job.aim == "classification":
        if job.label_column is None:
            raise ValueError("label_column=None: to tell texts apart, say which column has their labels")
        if job.tokens_per_example is not None:
            raise ValueError(f"tokens_per_example={job.tokens_per_example} goes with causal-lm: a label is one")
    else:
        for name in ("label_column", "labels"):
            if getattr(job, name) is not None:
                raise ValueError(f"{name}={getattr(job, name)!r} goes with task='classification'")
    for name, usual in (("sample", "rows"), ("rows_per_user", None), ("cap", None)):
        if job.user_column is None and getattr(job, name) != usual:
            raise ValueError(f"{name}={getattr(job, name)} is about users: give user_column, too")
    for name in ("max_length", "tokens_per_example", "batch", "epochs", "steps"):
        if getattr(job, name) is not None:
            check_steps(getattr(job, name), "batch_size" if name == "batch" else name)
    if job.epochs is not None and job.steps is not None:
        raise ValueError(f"epochs={job.epochs} and steps={job.steps}: give one of them")
    if job.lora is None and job.lora_targets is not None:
        raise ValueError(f"lora_targets={','.join(job.lora_targets)!r} goes with lora=8, say")
    if job.lora is not None:
        need("peft", f"lora={job.lora}")
        if job.freeze is not None:
            raise ValueError(f"freeze={job.freeze!r} cannot be given too: lora={job.lora} freezes all but adapters")
    names = job.labels or ("", " ")
    if len(set(names)) < len(names) or len(names) < 2:
        raise ValueError(f"labels={','.join(names)!r} must be two or more different names")


def _agree(job: FineTuning) -> None:
    """Together: processes with other settings have no one run to take part in (whether their texts are the same is
    asked when the training begins). Where the files are may differ from machine to machine."""
    group = processes(job.device)
    if group.several:
        settings = {name: value for name, value in asdict(job).items() if name not in ("model", "data", "test")}
        group.agree({**settings, "test": job.test is not None})


def _rate(job: FineTuning, method: Method) -> float | Literal["auto"]:
    if job.lr is not None:
        return job.lr
    if not method.rule.scale_free:
        raise ValueError(f"lr=None: give a learning rate; there is a usual one for Adam, and none for {method.name}")
    return USUAL_RATES[job.lora is not None]


def _names(job: FineTuning, config: Any) -> dict[str, int]:
    """The number of each label that may occur: as declared, or as the checkpoint says. The data are not asked."""
    known = {str(name): int(number) for name, number in (config.label2id or {}).items()}
    if job.labels is None:
        return {**{str(number): number for number in range(config.num_labels)}, **known}
    if has_head(config) and len(job.labels) > config.num_labels:
        raise ValueError(
            f"labels={','.join(job.labels)!r} are {len(job.labels)}, and the head of model={job.model!r} tells "
            f"{config.num_labels} apart"
        )
    if has_head(config) and set(job.labels) <= known.keys():
        return {name: known[name] for name in job.labels}
    return class_names(job.labels)


def _texts(file: str, job: FineTuning, tokenizer: PreTrainedTokenizerBase, names: dict[str, int]) -> Texts:
    columns = {"text_column": job.text_column}
    if job.label_column is not None:
        columns["label_column"] = job.label_column
    found = tasks.read_columns(Path(file), columns)
    _say_blank(file, found["text_column"])
    classes = numbers_of(found["label_column"], names) if "label_column" in found else None
    return tokenised(tokenizer, found["text_column"], job.max_length, classes)


def _say_blank(file: str, texts: Sequence[object]) -> None:
    """To the owner of the file: rows without a text count as rows, and teach the model nothing."""
    blank = [number for number, text in enumerate(texts, 1) if isinstance(text, str) and not text.strip()]
    if blank:
        warnings.warn(
            f"data={file!r}: {len(blank)} of {len(texts)} rows hold no text, the first is row {blank[0]}: they are "
            "trained on as padding; leave them out of the file. This is computed without noise: keep it to yourself",
            stacklevel=2,
        )


def _pace(job: FineTuning, population: int) -> tuple[int, int | None]:
    """The expected batch, and the steps: of so many passes, unless budget and noise decide."""
    if job.batch is not None and job.batch > population:
        raise ValueError(f"batch_size={job.batch} is more than the {population} rows of data={job.data!r}")
    batch = job.batch or min(USUAL_BATCH, population)
    if job.steps is not None or (job.epochs is None and job.epsilon is not None and job.noise_multiplier is not None):
        return batch, job.steps
    return batch, (job.epochs or USUAL_EPOCHS) * max(1, round(population / batch))


def _checkpoint(job: FineTuning, config: Any, tokenizer: PreTrainedTokenizerBase) -> Checkpoint:
    torch.manual_seed(job.seed)  # public: the weights of a new head, and of adapters
    names = job.labels or tuple(str(config.id2label[number]) for number in range(config.num_labels))
    model, fresh = read_model(job.model, job.aim, config, names, tokenizer.pad_token_id)
    use_cache = bool(getattr(config, "use_cache", False))
    model.config.use_cache = False  # type: ignore[union-attr]
    if job.lora is not None:
        model = with_lora(model, job.aim, job.lora, job.lora_targets, fresh)
    elif job.freeze is not None:
        frozen(model, job.freeze)
    return Checkpoint(model, tokenizer, "model" if job.lora is None else "adapter", use_cache)


def _next_token(tokens: int | None) -> Callable[[object, Tensor], Tensor]:
    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return next_token(outputs, {"labels": labels}, tokens)

    return loss


def _readme(job: FineTuning, name: str, statement: str) -> str:
    """A model card to be completed before the model is published."""
    what = "A model" if job.lora is None else f"Adapters of rank {job.lora} (LoRA)"
    aim = "to continue texts" if job.aim == "causal-lm" else "to tell texts apart"
    if job.labels is not None:
        aim += f": {escaped(', '.join(job.labels))}"
    origin = escaped(Path(job.model).resolve().name)
    library = "transformers" if job.lora is None else "peft"
    return (
        f"---\nlibrary_name: {library}\ntags:\n- differential-privacy\n---\n\n# {escaped(name)}\n\n{what} made from "
        f"{origin}, fine-tuned {aim}, by `vestige finetune`. Texts were cut and padded to "
        f"{job.max_length} tokens.\n\n{_loading(job)}{statement}"
    )


def _loading(job: FineTuning) -> str:
    """How an adapter is loaded so that it keeps the names of its labels; a whole model keeps them by itself."""
    if job.lora is None or job.aim != "classification":
        return ""
    return (
        "```python\nfrom peft import PeftModel\n"
        "from transformers import AutoConfig, AutoModelForSequenceClassification\n\n"
        f'config = AutoConfig.from_pretrained("adapter/{BASE}")  # the number of labels, and their names\n'
        'base = AutoModelForSequenceClassification.from_pretrained("BASE", config=config)\n'
        'model = PeftModel.from_pretrained(base, "adapter")\n```\n\n'
    )
