"""How is data that may be shared made in Python? `vestige.synthesize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vestige.checks import python_numbers
from vestige.synthesis.output import Synthesis
from vestige.synthesis.tables import TableRun, TableSynthesis
from vestige.synthesis.texts import TextRun, TextSynthesis


@python_numbers
def synthesize(data: object, *, out: str | Path | None = None, resume: bool = False, **settings: Any) -> Synthesis:
    """Make rows that may be shared, of a private table; or texts, with a language model.

    A table:

    - `data` is a .csv, .jsonl or .parquet, a data frame, or columns by name; `columns` are their public bounds and
      categories: "age=18..80;work=office|field", {"age": (18, 80), "work": ["office", "field"]}, or a FILE.json.
    - `method="marginals"` fits noised counts of columns and of a tree of pairs; "evolution" lets private rows vote.
    - `epsilon` and `delta` are the whole budget; `samples` is how many rows are made.
    - `test` are public rows that quality is measured on, `label_column` what a classifier is to tell;
      `evaluate="private"` asks, in the same budget, how right it is about the private rows.
    - With `out`, a folder receives rows, ledger, record, page and card, and `resume=True` continues there.

    Texts:

    - `model` is the folder of a Hugging Face language model, which is fine-tuned on `data` (a file) and then writes
      `samples` texts; `text_column`, `label_column` and `labels=("neg", "pos")` say what is where, and `lora`, `batch`,
      `epochs`, `lr`, `max_length`, `top_p` and so on are those of the command. `out` is needed.
    - Shares of labels are one noised count of each, charged, or public: `label_shares=(0.5, 0.5)`.
    - `user_column` with `rows_per_user` protects all texts of a user; `audit=1000` plants canaries.

    >>> import vestige
    >>> people = {"age": [30, 41, 25, 60] * 50, "work": ["office", "field", "field", "office"] * 50}
    >>> made = vestige.synthesize(people, columns="age=18..80;work=office|field", epsilon=3, delta=1e-4, samples=5)
    >>> len(made.rows["age"]), made.guarantee.epsilon <= 3
    (5, True)

    Formal guarantees: (epsilon, delta)-differential privacy of all that is returned and written, for adding or removing
    one row, under the assumptions listed in `guarantee.assumptions`.
    """
    kind: Any = TextSynthesis if settings.get("model") is not None else TableSynthesis
    for name in settings:
        if name not in kind.__dataclass_fields__:
            raise ValueError(
                f"{name}={settings[name]!r} is unknown; choose from {', '.join(kind.__dataclass_fields__)}"
            )
    for name in ("epsilon", "samples" if kind is TextSynthesis else "columns"):
        if settings.get(name) is None:
            raise ValueError(f"{name}=None: give it, too")
    run: TableRun | TextRun
    if kind is TextSynthesis:
        if out is None or not isinstance(data, str | Path):
            raise ValueError("out=None: a synthesis of texts reads a file and leaves a folder; give data=FILE and out=")
        for name in ("labels", "lora_targets"):
            if isinstance(settings.get(name), str):
                settings[name] = tuple(part.strip() for part in settings[name].split(","))
        run = TextRun(TextSynthesis(data=str(data), **settings), Path(out), resume=resume)
    else:
        run = TableRun(TableSynthesis(data=data, **settings), None if out is None else Path(out), resume=resume)
    made = run.complete()
    assert made is not None
    return made
