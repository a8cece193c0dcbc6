"""Is a user clipped once in captured passes, whatever rows fill up a graph? Beside float64, and with rows blanked."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from captured_on_cpu import captured_on_cpu
from conftest import make_toy
from users_one_by_one import MODELS, OWNERS, one_by_one
from vestige import PrivacyEngine
from vestige.engines import bookkeeping
from vestige.engines.per_example import sums_of_users
from vestige.engines.per_example.gradient_forms import Dense, Gradient, Lookup, Outer, Parts, Place, Tied, Within
from vestige.engines.per_example.sums_of_users import Measured, RowCounts, RowsOfUsers, UserRows, summable
from vestige.privacy_engine import captured_passes

EQUAL = np.repeat(np.arange(20), 3)
BOUND, LR = 0.6, 0.5


def draws(owners, *, captured=True, name="mlp", data=None, most=2, **options):
    """Of each draw its rows and how far it moved the model, and how often graphs were replayed."""
    torch.manual_seed(0)
    model, (inputs, targets) = MODELS[name](), make_toy()[1]
    plain = copy.deepcopy(model)
    inputs = inputs if data is None else data
    loader = DataLoader(TensorDataset(inputs, targets, torch.arange(60)), batch_size=30)
    engine = PrivacyEngine(reproducible=3, cuda_graphs=captured)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    common = {"noise_multiplier": 1e-9, "max_grad_norm": BOUND, "users": owners, "sample": "users"} | options
    model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **common)
    found, rows = [], []
    with captured_on_cpu() if captured else nullcontext() as graphs:
        for x, y, index in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            rows += index.tolist()
            if engine.asked > len(found):
                pairs = zip(plain.parameters(), model.parameters(), strict=True)
                moved = torch.cat([(a - b).detach().double().flatten() / LR for a, b in pairs])
                found.append((np.unique(rows), moved, copy.deepcopy(plain)))
                plain.load_state_dict(model.state_dict())
                rows = []
            if len(found) == most:
                break
    return found, 0 if graphs is None else graphs.replays


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("owners", "options"),
    [(OWNERS, {}), (EQUAL, {}), (OWNERS, {"max_physical_batch_size": 16}), (OWNERS, {"cap": 2})],
    ids=["unequal", "equal", "parts", "cap"],
)
def test_a_captured_draw_is_the_clipped_sum_of_users_one_by_one(name, owners, options):
    found, replays = draws(owners, name=name, **options)
    assert replays >= 3 * len(found)
    for rows, moved, before in found:
        whole = one_by_one(before, make_toy()[1], rows, BOUND, owners) / (0.5 * (owners.max() + 1))
        torch.testing.assert_close(moved, whole, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("owners", [OWNERS, EQUAL])
def test_blanking_a_user_moves_a_captured_draw_by_the_bound(owners):
    inputs = 30 * make_toy()[1][0]  # every gradient is clipped
    (there, whole, _), *_ = draws(owners, data=inputs, most=1)[0]
    for user in (0, 1, 10):
        blank = inputs.clone()
        blank[torch.from_numpy(user == owners)] = torch.nan
        (_, without, _), *_ = draws(owners, data=blank, most=1)[0]
        moved = float((whole - without).norm()) * 0.5 * (owners.max() + 1)
        assert moved == pytest.approx(BOUND * (user in owners[there]), abs=1e-3)


def test_a_draw_of_more_users_than_a_graph_has_places_for_is_clipped_without_it(monkeypatch):
    monkeypatch.setattr(RowCounts, "places", lambda counts, rows: 3)
    ((_, moved, _), *_), replays = draws(OWNERS, most=1)
    ((_, plain, _), *_), _ = draws(OWNERS, captured=False, most=1)
    assert replays == 2  # forward and backward, but no clip
    torch.testing.assert_close(moved, plain, rtol=1e-5, atol=1e-8)


def test_nothing_of_an_earlier_draws_users_stays_in_a_graph(monkeypatch):
    left, clip = [], captured_passes.Replay.clip

    def noted(replay, part, into):
        clip(replay, part, into)
        left.append((replay.owner._rows_of_users.tolist(), part.rows_of_each().tolist()))

    monkeypatch.setattr(captured_passes.Replay, "clip", noted)
    draws(OWNERS, max_physical_batch_size=16, most=2)
    assert len({len(counts) for _, counts in left}) > 1
    assert all(found == counts + [0] * (len(found) - len(counts)) for found, counts in left)


def test_users_of_very_unequal_numbers_are_not_captured():
    owners = np.array([0] * 40 + list(range(1, 21)))
    assert draws(owners, most=1)[1] == 0


# --- the sums themselves ----------------------------------------------------------------------------------------------

COUNTS = [2, 1, 4, 3]
ROWS = 13
"""Three more than the users have."""


def forms(dtype: torch.dtype) -> dict[str, tuple[Gradient, tuple[int, ...]]]:
    torch.manual_seed(4)
    left, right = torch.randn(ROWS, 5, 3, dtype=dtype), torch.randn(ROWS, 5, 40, dtype=dtype)
    index = torch.randint(3, (ROWS, 4))
    outer, lookup = Outer(left, right), Lookup(index, torch.randn(ROWS, 4, 40, dtype=dtype), 3)
    half = Within(Dense(torch.randn(ROWS, 40, dtype=dtype)), Place((40,), (1,)), (3, 40))
    rest = Within(Outer(left[:, :, :2], right), Place((2, 40), (40, 1), 40), (3, 40))
    one = Outer(left[:, :1], right[:, :1])
    found = {"dense": Dense(right), "outer": outer, "one": one, "lookup": lookup, "tied": Tied(lookup, outer)}
    return {name: (form, (3, 40)) for name, form in (found | {"parts": Parts((half, rest))}).items()} | {
        "dense": (Dense(right), (5, 40)),
        "numbers": (Dense(right[:, 0, 0]), ()),
    }


@pytest.mark.parametrize("name", forms(torch.float32))
@pytest.mark.parametrize("counts", [COUNTS, [4, 4, 4]], ids=["unequal", "equal"])
def test_norms_of_users_bound_what_their_rows_add(name, counts):
    form, shape = forms(torch.float64)[name]
    equal = len(set(counts)) == 1
    users = UserRows(torch.tensor(counts if equal else [*counts, 0]), ROWS, 4, equal)
    norms, summed = users.norms(summable(form), 1e-16), users.summed(summable(form))
    for user, (start, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
        own = torch.zeros(ROWS, dtype=torch.float64)
        own[start : start + count] = 1.0
        total, again = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        form.add(total, own)
        alone = torch.zeros(len(users.counts), dtype=torch.float64)
        alone[user] = 1.0
        summed.add(again, users.of_rows(alone, 0.0) if isinstance(summed, RowsOfUsers) else alone)
        torch.testing.assert_close(again, total, rtol=1e-12, atol=1e-12)
        assert float(norms[user]) == pytest.approx(float(total.norm()), rel=1e-12)
        assert float(summed.norms(1e-16)[user]) == pytest.approx(float(total.norm()), rel=1e-12)


def test_what_is_found_of_users_is_that_of_each_of_their_rows():
    users = UserRows(torch.tensor([*COUNTS, 0]), ROWS, 4, equal=False)
    weights = users.of_rows(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 0.0)
    assert weights.tolist() == [1, 1, 2, 3, 3, 3, 3, 4, 4, 4, 0, 0, 0]


@pytest.mark.parametrize("equal", [True, False])
def test_sums_of_users_are_materialised_where_they_are_small(equal):
    users = UserRows(torch.tensor([3, 3, 3, 3]), 12, 3, equal)
    wide = Outer(torch.randn(12, 1, 30), torch.randn(12, 1, 40))
    narrow = Outer(torch.randn(12, 4, 6), torch.randn(12, 4, 8))
    dense = Within(Dense(torch.randn(12, 5)), Place((5,), (1,)), (10,))
    assert isinstance(users.summed(wide), RowsOfUsers)
    assert isinstance(users.summed(narrow), Dense) is equal
    found = users.summed(dense)
    assert isinstance(found, Within)
    assert found.dense().shape == (4, 10)


def test_norms_that_overflow_are_taken_anew():
    known = Measured(torch.full((2, 3), 1e30), (torch.tensor([torch.inf, 1.0]),))
    assert known.norms().tolist() == [torch.inf, 1.0]
    few = bookkeeping._selected({"weight": known}, torch.tensor([True, False]))["weight"]
    assert few.norms(0.0).tolist() == pytest.approx([1e30 * 3**0.5])


@pytest.mark.parametrize("equal", [True, False])
def test_neither_padding_nor_others_rows_enter_a_users_sum(equal):
    counts = torch.tensor([3, 3, 3, 0] if equal else [3, 1, 4, 0])
    rows = torch.randn(12, 6, dtype=torch.float64)
    users = UserRows(counts, 12, int(counts.max()), equal)
    plain, sums = users.norms(Dense(rows), 0.0), users.summed(Dense(rows)).dense()
    others = torch.full_like(rows, torch.nan)
    second = slice(3, 3 + int(counts[1]))
    others[second] = rows[second]
    assert torch.equal(users.norms(Dense(others), 0.0)[1], plain[1])
    assert torch.equal(users.summed(Dense(others)).dense()[1], sums[1])
    products = users.norms(Outer(others[:, None], rows[:, None]), 0.0).isnan()
    assert products[:3].tolist() == [True, False, True]
    assert equal or not products[3]


def test_rows_that_cancel_leave_no_user_unclipped():
    """Of rows that are far longer than their sum, the norm covers what rounding can make of them."""
    big = 1e6 * torch.randn(200)
    rows = torch.stack([big, -big + 1e-3 * torch.randn(200)]).float()
    users = UserRows(torch.tensor([2]), 2, 2, equal=True)
    norm = float(users.norms(Dense(rows), torch.finfo(torch.float32).eps)[0])
    assert norm >= float(rows.double().sum(dim=0).norm()) + 1e-7 * float(rows.double().norm())
    covered = sums_of_users._covering(torch.tensor([1.0]), torch.tensor([2.0]), 1e-7, tf32=True)
    assert float(covered) > 1.0 + 2.0 * 2**-9


def test_sizes_of_graphs_have_room_for_whole_users():
    equal, unequal = RowCounts({4: 100}), RowCounts({1: 50, 2: 50, 8: 10})
    assert (equal.whole(10), equal.places(12), equal.even(12)) == (12, 3, True)
    assert (unequal.whole(10), unequal.mean, unequal.mean_square) == (10, 230 / 110, 890 / 110)
    assert unequal.places(1000) == 110  # there are no more
    assert not RowCounts({1: 10**6, 1000: 1}).even(1000)
