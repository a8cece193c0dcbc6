"""How good are made-up rows? By themselves, and beside public ones; the private ones are not looked at here.

What compares with private rows is a question, asked of their curator and charged: `TableCurator.right_answers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vestige.synthesis.schema import Codes, Column

TREES = 100
WORDS = 2**18
"""Of a hashed bag of words."""
MOST_PAIRS = 500
"""Pairs of columns that are compared."""
LONGEST = 200_000
"""Texts that a classifier is trained on, at most."""

Predict = Callable[[Codes], npt.NDArray[np.int64]]


def of_table(rows: Codes, columns: Sequence[Column], label_column: str | None, test: Codes | None) -> dict[str, float]:
    """Repeated rows; and where there are public rows, how far marginals are from theirs, and how well a classifier of
    the made-up rows does on them."""
    found = {"repeated": 1 - len(np.unique(rows, axis=0)) / len(rows)}
    if test is None:
        return found
    found["column_error"] = _error(rows, test, columns, 1)
    if len(columns) > 1:
        found["pair_error"] = _error(rows, test, columns, 2)
    if label_column is not None:
        label = [column.name for column in columns].index(label_column)
        found["test_accuracy"] = float((classifier(rows, columns, label)(test) == test[:, label]).mean())
        found["test_accuracy_of_the_commonest"] = float(np.bincount(test[:, label]).max() / len(test))
    return found


def _error(rows: Codes, others: Codes, columns: Sequence[Column], size: int) -> float:
    """The mean total variation of the marginals of so many columns."""
    groups = list(combinations(range(len(columns)), size))
    step = -(-len(groups) // MOST_PAIRS)
    return float(np.mean([variation(rows, others, columns, group) for group in groups[::step]]))


def variation(rows: Codes, others: Codes, columns: Sequence[Column], group: Sequence[int]) -> float:
    """The total variation between the shares of a group's cells in two tables."""
    shape = tuple(columns[place].cells for place in group)
    shares = []
    for table in (rows, others):
        flat = np.ravel_multi_index(tuple(table[:, place] for place in group), shape)
        shares.append(np.bincount(flat, minlength=int(np.prod(shape))) / len(table))
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def classifier(rows: Codes, columns: Sequence[Column], label: int) -> Predict:
    """What a random forest, trained on made-up rows, says of a column by the others."""
    from sklearn.ensemble import RandomForestClassifier

    vectors = [column.vectors() for column in columns]
    others = [place for place in range(len(columns)) if place != label]

    def features(table: Codes) -> npt.NDArray[np.float32]:
        points = [vectors[place][table[:, place]] for place in others]
        return np.concatenate(points, axis=1) if points else np.zeros((len(table), 1), dtype=np.float32)

    forest = RandomForestClassifier(TREES, random_state=0, n_jobs=1).fit(features(rows), rows[:, label])
    return lambda table: np.asarray(forest.predict(features(table)))


# --- texts ------------------------------------------------------------------------------------------------------------


def of_texts(
    texts: Sequence[str],
    labels: Sequence[str] | None,
    dropped: int,
    test: tuple[Sequence[str], Sequence[str] | None] | None,
) -> dict[str, float]:
    """Repetition, diversity and length of made-up texts; beside public ones, how far words are from theirs, and how
    well a classifier of the made-up texts does on them."""
    words = [text.split() for text in texts]
    lengths = np.array([len(each) for each in words])
    pairs = [pair for each in words for pair in pairwise(each)]
    found = {
        "repeated": dropped / max(1, dropped + len(texts)),
        "empty": float((lengths == 0).mean()),
        "words": float(lengths.mean()),
        "words_10_percent": float(np.quantile(lengths, 0.1)),
        "words_90_percent": float(np.quantile(lengths, 0.9)),
        "distinct_pairs_of_words": len(set(pairs)) / max(1, len(pairs)),
    }
    if test is None:
        return found
    public, wanted = test
    found["word_divergence"] = word_divergence(texts, public)
    found["test_words"] = float(np.mean([len(text.split()) for text in public]))
    if labels is not None and wanted is not None:
        found["test_accuracy"] = text_accuracy(texts, labels, public, wanted)
        found["test_accuracy_of_the_commonest"] = max(Counter(wanted).values()) / len(wanted)
    return found


def word_divergence(texts: Sequence[str], others: Sequence[str]) -> float:
    """The Jensen-Shannon divergence, from 0 to 1, between the words of two sets of texts."""
    counts = [Counter(word for text in each for word in text.lower().split()) for each in (texts, others)]
    totals = [max(1, sum(count.values())) for count in counts]
    result = 0.0
    for word in counts[0].keys() | counts[1].keys():
        shares = [count[word] / total for count, total in zip(counts, totals, strict=True)]
        middle = sum(shares) / 2
        result += sum(share / 2 * np.log2(share / middle) for share in shares if share > 0)
    return float(min(1.0, max(0.0, result)))


def text_classifier(texts: Sequence[str], labels: Sequence[str]) -> Any:
    """A linear classifier of hashed words and pairs of words."""
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    hashed = HashingVectorizer(n_features=WORDS, ngram_range=(1, 2), alternate_sign=False)
    return make_pipeline(hashed, LogisticRegression(C=10.0, max_iter=200)).fit(texts[:LONGEST], labels[:LONGEST])


def text_accuracy(texts: Sequence[str], labels: Sequence[str], public: Sequence[str], wanted: Sequence[str]) -> float:
    """The share of public texts whose label a classifier of the made-up ones says."""
    if len(set(labels)) < 2:
        return float(np.mean([each == labels[0] for each in wanted]))
    return float(np.mean(text_classifier(texts, labels).predict(public) == np.array(wanted)))
