"""Which privacy settings does a Trainer take? `PrivacyArguments`, also from a command line by `HfArgumentParser`."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class PrivacyArguments:
    """How private a `PrivateTrainer` is to be: `target_epsilon` or `noise_multiplier`, at `target_delta`.

    `max_grad_norm` bounds each example's gradient. On a command line it is the Trainer's own `--max_grad_norm`, which
    has no other use in private training; left out, TrainingArguments.max_grad_norm is taken.
    """

    target_epsilon: float | None = _option(
        None, "Spend this epsilon over all steps; the noise follows. Or give noise_multiplier."
    )
    target_delta: float | None = _option(None, "The delta that epsilon is stated at; below 1 / number of rows.")
    noise_multiplier: float | None = _option(
        None, "Standard deviation of the noise, in units of max_grad_norm; epsilon follows. Or give target_epsilon."
    )
    method: str = _option("dp-sgd", "What remembers releases between the noise and your optimizer: `vestige methods`.")
    lr: str | None = _option(
        None, "'auto': a learning rate from public facts alone, in the place of TrainingArguments.learning_rate."
    )
    tokens_per_example: int | None = _option(
        None, "Divide the summed loss of an example's tokens by this number, not by how many it has."
    )
    user_column: str | None = _option(
        None, "The column that names whose each row is: all rows of one user are hidden. The model is not given it."
    )
    rows_per_user: int | None = _option(
        None, "With user_column, the most rows of one user; others are left out by coins. None: all that anybody has."
    )
    cap: int | None = _option(None, "With user_column, the most rows of one user in one step.")
    sample: str = _option(
        "rows",
        "With user_column: 'users' samples users, and bounds the mean of a user's rows once; 'rows' samples rows.",
    )
    budget: str | None = _option(
        None, "The book of the dataset that is charged before each step; `vestige budget open` makes it."
    )
    derived_from: str | None = _option(None, "The file that the rows were tokenised from, for the book to know them.")
    secure_mode: bool = _option(True, "Add noise in integers; False: in float32, which rests on one more assumption.")
    cuda_graphs: bool = _option(True, "Capture passes on a GPU as CUDA graphs; False: run them launch by launch.")
    log_nonprivate_loss: bool = _option(
        False, "Log the raw training loss all the same. It is not private: no epsilon is then stated."
    )
    max_grad_norm: InitVar[float | None] = None

    def __post_init__(self, max_grad_norm: float | None) -> None:
        self.max_grad_norm = max_grad_norm  # type: ignore[attr-defined]
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"target_epsilon={self.target_epsilon} and noise_multiplier={self.noise_multiplier}: give one of them"
            )
        if self.target_delta is None:
            raise ValueError("target_delta=None: an epsilon is stated at a delta, below 1 / number of rows; 1e-5, say")
        for name in ("target_epsilon", "noise_multiplier", "target_delta", "max_grad_norm", "tokens_per_example"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive")
        if self.target_delta >= 1:
            raise ValueError(f"target_delta={self.target_delta} must lie below 1")
        for name, usual in (("sample", "rows"), ("rows_per_user", None), ("cap", None)):
            if self.user_column is None and getattr(self, name) != usual:
                raise ValueError(f"{name}={getattr(self, name)!r} is about users: give user_column, too")
        if self.derived_from is not None and self.budget is None:
            raise ValueError(f"derived_from={self.derived_from!r} is about a book: give budget=BOOK, too")
        if self.lr not in (None, "auto"):
            raise ValueError(f"lr={self.lr!r} must be 'auto'; a number is TrainingArguments(learning_rate=...)")
