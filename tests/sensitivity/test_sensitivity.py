"""Does one example move a private step by the bound at most, in models and losses as strangers write them?

Every case of the tables is trained on for one step without each of a few examples, one of which may be an outlier
(`measuring`). Either no example moves the sum by more than the bound, or the model is refused in one line, for every
outlier alike: a refusal that depends on the data would tell something of them. A sample of the cases runs every day.
"""

from __future__ import annotations

import pytest
from torch import nn

from sensitivity import (
    architectures,
    attention,
    cancelling,
    convolutions,
    embeddings,
    losses,
    mixed,
    normed,
    parameters,
    sequences,
)
from sensitivity.examples import numbers
from sensitivity.measuring import EXAMPLES, PATHS, Case, by_loop, chosen, fresh, made, measured, usual_bound
from vestige.mechanism.clipping import Flat

TABLES = (convolutions, cancelling, sequences, attention, embeddings, parameters, normed, architectures, losses, mixed)
CASES = [case for table in TABLES for case in table.CASES]


def parametrised():
    for case in CASES:
        for path in PATHS:
            marks = [] if case.daily else [pytest.mark.slow]
            if not (case.assumed and path == "loop"):
                yield pytest.param(case, path, id=f"{case.name}-{path}", marks=marks)


@pytest.mark.parametrize(("case", "path"), list(parametrised()))
def test_one_example_moves_the_sum_by_the_bound_at_most(case: Case, path: str):
    found, refusal = measured(case, path), case.refusal(path)
    if refusal is None:
        assert not found.refusals, found
        assert max(found.ratios.values()) <= 1 + case.tolerance, found
    else:
        assert not found.ratios, found
        assert all(refusal in message and "\n" not in message for message in found.refusals.values()), found


@pytest.mark.parametrize("case", [case for case in CASES if case.assumed], ids=lambda case: case.name)
def test_a_loss_that_mixes_examples_is_refused_in_a_loop(case: Case):
    with pytest.raises(ValueError, match="the loss is not each row's own"):
        by_loop(case, fresh(case), chosen(made(case), list(range(EXAMPLES))), usual_bound(case), 0.1)


@pytest.mark.parametrize("path", PATHS)
def test_the_measure_sees_what_is_clipped_too_late(path: str, monkeypatch: pytest.MonkeyPatch):
    honest = Flat.factors
    monkeypatch.setattr(Flat, "factors", lambda clip, norms: 1.01 * honest(clip, norms))
    found = measured(Case(name="linear", model=lambda: nn.Linear(5, 3), data=numbers(5)), path)
    assert max(found.ratios.values()) == pytest.approx(1.01, rel=1e-5)


def test_no_two_cases_have_the_same_name():
    assert len({case.name for case in CASES}) == len(CASES)
