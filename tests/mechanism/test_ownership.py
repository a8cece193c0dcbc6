"""Does nobody have more rows than the bound, and does nothing but ownership and coins decide which?"""

from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vestige.mechanism.users.ownership import bound_of, ownership
from vestige.randomness.keys import Randomness

SIX = [[0, 1], [1, 2], [2], [0], [3], [3, 0]]


@pytest.mark.parametrize(("most", "kept"), [(1, {2, 3, 4}), (2, {0, 1, 2, 3, 4}), (3, {0, 1, 2, 3, 4, 5})])
def test_greedy_vectors(most, kept):
    assert set(ownership(SIX, 6).bounded(most, Randomness.reproducible(0))) == kept


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=60),
    st.integers(1, 5),
)
def test_no_owner_has_more_than_the_bound(owners, most):
    owned = ownership(owners, len(owners))
    kept = owned.bounded(most, Randomness.reproducible(1))
    counts = np.zeros(10, dtype=int)
    for row in kept:
        counts[list(set(owners[row]))] += 1
    assert counts.max() <= most
    for row in set(range(len(owners))) - set(kept.tolist()):  # nobody is left out for nothing
        assert any(counts[owner] >= most for owner in owners[row])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=80), st.integers(1, 5))
def test_with_one_owner_each_has_all_rows_or_as_many_as_the_bound(owners, most):
    kept = ownership(owners, len(owners)).bounded(most, Randomness.reproducible(1))
    assert (np.diff(kept) > 0).all()
    before, after = (np.bincount(np.array(rows, dtype=int), minlength=10) for rows in (owners, np.array(owners)[kept]))
    assert (after == np.minimum(before, most)).all()


def test_coins_keep_each_row_as_often():
    owned = ownership([0] * 6 + [1], 7)
    seen = np.zeros(7)
    for seed in range(600):
        seen[owned.bounded(2, Randomness.reproducible(seed))] += 1
    assert seen[6] == 600
    assert ((seen[:6] - 200) ** 2 / 200).sum() < 25


def test_secret_coins_differ_from_run_to_run():
    owned = ownership([0] * 60, 60)
    assert len({tuple(owned.bounded(5, Randomness.secret())) for _ in range(5)}) == 5


def test_ids_may_be_numbers_texts_or_tensors():
    for ids in (
        [3, 3, 9],
        ["a", "a", "b"],
        torch.tensor([3, 3, 9]),
        np.array([3, 3, 9]),
        np.array(["a", "a", None])[:2],
    ):
        owned = ownership(ids, len(ids))
        assert list(owned.owners[:2]) == [0, 0]
        assert not owned.several
    owned = ownership(SIX, 6)
    assert owned.several
    assert list(owned.counts) == [3, 2, 2, 2]


def test_a_column_of_several_kinds_does_not_divide_a_person():
    texts = (["3", " 3", "3.0"], [b"3", "3", "3 "], np.array(["3", "3.0", "3 "]), [Decimal("3.0"), 3, "3"])
    for ids in ([3, 3.0, "3"], np.array([3, 3.0, np.float32(3)], dtype=object), [[3], [3.0], ["3", None]], *texts):
        assert ownership(ids, 3).users == 1
    for ids in (["Zo\u00eb", "Zoe\u0308"], np.array(["Zo\u00eb", "Zoe\u0308"]), [["Zo\u00eb"], ["Zoe\u0308"]]):
        assert ownership(ids, 2).users == 1


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([object(), 1], "an id is a object"),
        (np.array(3), "users=ndarray"),
        (["ann", ["ann", "bob"]], "row 1 has a list of owners, where row 0 has one id"),
    ],
)
def test_ids_that_name_nobody(ids, message):
    with pytest.raises(ValueError, match=message):
        ownership(ids, 2)


def test_columns_of_pandas_with_an_index_of_their_own():
    pandas = pytest.importorskip("pandas")
    assert ownership(pandas.Series([7, 7, 8], index=[5, 6, 9]), 3).users == 2
    assert ownership(pandas.Series([[7], [7, 8]], index=[5, 6]), 2).several
    for missing in (pandas.NA, pandas.NaT, None, float("nan"), "", "  "):
        for ids in ([missing, 1], pandas.Series([missing, 1], dtype=object)):
            with pytest.raises(ValueError, match="row 0 has no user"):
                ownership(ids, 2)
        assert ownership([["a", missing], ["a"]], 2).users == 1
    with pytest.raises(ValueError, match="row 0 has no user"):
        ownership(np.array(["NaT", "2020-01-01"], dtype="datetime64[D]"), 2)


def test_choosing_a_bound_from_public_counts():
    owned = ownership([0, 1, 1, 2, 2, 2, 2, 2], 8)
    assert (bound_of(None, owned), bound_of("median", owned), bound_of(4, owned)) == (5, 2, 4)
    assert bound_of(10**9, owned) == 5


@pytest.mark.parametrize("wrong", [[[0], []], [[0], 1], [[0], [None]]])
def test_rows_without_owners(wrong):
    with pytest.raises(ValueError, match="row 1 has"):
        ownership(wrong, 2)
