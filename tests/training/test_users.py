"""Is it a user whose presence is hidden? Sensitivity by blanking all rows of one, and runs that say so."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import vestige
from captured_on_cpu import captured_on_cpu
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.cuda_graphs import Captured
from vestige.engines.example_axis.labels import NotApart
from vestige.engines.per_example.sums_of_users import RowCounts
from vestige.integrations.model_card import model_card
from vestige.mechanism.clipping import Flat
from vestige.mechanism.users.ownership import RowsOfEach, ownership
from vestige.methods.registry import make_method
from vestige.priced_questions import (
    AllocatedGaussian,
    CyclicGaussian,
    GroupedGaussian,
    SampledGaussian,
    TruncatedGaussian,
)
from vestige.randomness.keys import Randomness
from vestige.training.verify import verify

LOSS = nn.functional.cross_entropy
COUNTS = [1, 4, 2, 3, 1, 4, 7, 2] * 5
OWNERS = np.repeat(np.arange(len(COUNTS)), COUNTS)


def rows(scale=1.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    total = len(OWNERS)
    return scale * torch.randn(total, 6, generator=draw), torch.randint(3, (total,), generator=draw)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def training(data=None, **options):
    settings = {"method": "dp-sgd", "noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.3, "steps": 3, "lr": 0.1}
    settings |= {"users": OWNERS, "reproducible": 7}
    return vestige.train(model(), LOSS, rows() if data is None else data, **(settings | options))


def weights(run):
    for _ in run:
        pass
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


# --- sensitivity --------------------------------------------------------------------------------------------------------


def clipped_sum(run, index, bound=1.0):
    """SENSITIVE: the sum of one question before its noise."""
    curator = run.curator
    sample = run._sampling.draw(curator.population, index, curator._randomness)
    point = {name: p.detach() for name, p in run.state.parameters.items()}
    total, _ = curator._sum(sample, point, Flat(bound), None, index, 1.0)
    return sample, total.double()


def blanked(data, user):
    """Rows that are not numbers contribute nothing."""
    inputs = data[0].clone()
    inputs[torch.from_numpy(user == OWNERS)] = torch.nan
    return inputs, data[1]


@pytest.mark.parametrize("physical_batch", [None, 3])
@pytest.mark.parametrize("engine", ["bookkeeping", "reference"])
@pytest.mark.everyday("reference-None", "reference-3")
def test_a_user_moves_a_sum_of_users_by_the_bound_at_most(physical_batch, engine):
    data = rows(scale=30.0)  # every gradient is clipped
    options = {"sample": "users", "sample_rate": 0.6, "max_physical_batch_size": physical_batch, "engine": engine}
    for user in (6,) if engine == "reference" else (0, 6):
        with_user, without = (training(each, **options) for each in (data, blanked(data, user)))
        for index in range(4):
            sample, one = clipped_sum(with_user, index)
            _, other = clipped_sum(without, index)
            moved = float((one - other).norm())
            assert moved == pytest.approx(1.0 if user in sample else 0.0, abs=1e-4)


def alone(rows, _):
    """Each row as a user of its own."""
    return rows, [(len(rows), 1)]


@pytest.mark.parametrize("owners", [OWNERS, np.arange(60) // 4, np.arange(60) % 20], ids=["unequal", "equal", "mixed"])
@pytest.mark.parametrize("cap", [None, 2, 100])
def test_rows_of_a_sample_of_users(owners, cap):
    """Beside each user's rows one by one: users with fewer rows come first, else in the order of the sample."""
    owned = ownership(owners, len(owners))
    sample = torch.randperm(owned.users)[: owned.users // 2]
    chosen = RowsOfEach(owned, cap, Randomness.reproducible(1))
    found, numbers = chosen.together(5, sample)
    order = sorted(sample.tolist(), key=lambda user: min(cap or 100, int((owners == user).sum())))
    assert sum(users for users, _ in numbers) == len(sample)
    assert len({count for _, count in numbers}) == len(numbers)
    parts = found.split([count for users, count in numbers for _ in range(users)])
    for user, rows in zip(order, parts, strict=True):
        own = np.flatnonzero(owners == user)
        assert rows.tolist() == sorted(rows.tolist())
        assert set(rows.tolist()) <= set(own)
        assert len(rows) == min(cap or 100, len(own))
    assert torch.equal(found, chosen.together(5, sample)[0])
    assert chosen.together(5, sample[:0])[1] == [(0, 1)]


def test_splitting_a_user_over_two_clips_is_seen():
    """What the test above is for: parts of a sample that divide a user's rows."""
    data = rows(scale=30.0)
    run, without = (training(each, sample="users", sample_rate=1.0) for each in (data, blanked(data, 6)))
    seen = []
    for each in (run, without):
        examples = each.curator._examples
        rows_of = examples._together
        examples._together = lambda index, users, of=rows_of: alone(*of(index, users))
        seen.append(clipped_sum(each, 0)[1])
    assert float((seen[0] - seen[1]).norm()) > 1.5


@pytest.mark.parametrize(("rows_per_user", "cap"), [(4, None), (7, None), (7, 2), (7, 1)])
def test_a_user_moves_a_sum_of_rows_by_as_many_bounds_as_rows_were_drawn(rows_per_user, cap):
    data = rows(scale=30.0)
    options = {"rows_per_user": rows_per_user, "cap": cap, "sample_rate": 0.6}
    for user in (1, 6):
        with_user, without = (training(each, **options) for each in (data, blanked(data, user)))
        kept = getattr(with_user.curator._examples, "_kept", torch.arange(len(OWNERS)))
        drawn = []
        for index in range(6):
            sample, one = clipped_sum(with_user, index)
            _, other = clipped_sum(without, index)
            drawn.append(int((OWNERS[kept[sample]] == user).sum()))
            assert drawn[-1] <= min(rows_per_user, cap or rows_per_user)
            assert float((one - other).norm()) <= drawn[-1] + 1e-4
        assert max(drawn) > (1 if cap != 1 else 0)


def test_a_cap_leaves_other_users_rows_alone():
    run = training(rows_per_user=7, cap=2, sample_rate=0.6)
    free = training(rows_per_user=7, sample_rate=0.6)
    for index in range(10):
        all_of_them = free._sampling.draw(len(OWNERS), index, run.curator._randomness)
        kept = run._sampling.draw(len(OWNERS), index, run.curator._randomness)
        assert set(kept.tolist()) <= set(all_of_them.tolist())
        for user in np.unique(OWNERS):
            joined, stayed = ((OWNERS[each] == user).sum() for each in (all_of_them, kept))
            assert stayed == min(2, joined)


def test_capped_rows_are_uniform_among_those_that_joined():
    run = training(rows_per_user=7, cap=1, sample_rate=1.0)
    first = np.flatnonzero(OWNERS == 6)
    seen = np.zeros(7)
    for index in range(700):
        drawn = run._sampling.draw(len(OWNERS), index, run.curator._randomness).numpy()
        seen += np.isin(first, drawn)
    assert seen.sum() == 700
    assert ((seen - 100) ** 2 / 100).sum() < 25


@pytest.mark.parametrize("owners", [OWNERS, np.arange(len(OWNERS)) // 3], ids=["unequal", "equal"])
def test_the_mean_of_a_users_rows_is_what_is_clipped(owners):
    data = rows(scale=0.01)  # nothing is clipped
    owners = owners[: len(owners) // 3 * 3]
    data = data[0][: len(owners)], data[1][: len(owners)]
    run = training(data, sample="users", sample_rate=1.0, users=owners)
    _, total = clipped_sum(run, 0, bound=1e3)
    net, expected = model(), 0.0
    for user in np.unique(owners):
        mine = torch.from_numpy(user == owners)
        loss = LOSS(net(data[0][mine]), data[1][mine])
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        expected = expected + torch.cat([each.flatten() for each in gradients]).double()
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)


def test_a_step_takes_so_many_rows_of_a_user_and_all_in_turn():
    run = training(sample="users", cap=2, sample_rate=1.0)
    examples, everyone = run.curator._examples, torch.arange(len(COUNTS))
    seen = set()
    for index in range(40):
        drawn = examples._together(index, everyone)[0].numpy()
        assert len(set(drawn)) == len(drawn)
        assert (np.bincount(OWNERS[drawn]) == np.minimum(COUNTS, 2)).all()
        seen |= set(drawn)
    assert len(seen) == len(OWNERS)
    whole, *parts = (examples._together(3, some)[0].tolist() for some in (everyone, everyone[:9], everyone[9:]))
    assert sorted(whole) == sorted(parts[0] + parts[1]), "a sample may be divided over physical batches and processes"


def test_rows_of_a_user_are_drawn_uniformly():
    run = training(sample="users", cap=2, sample_rate=1.0)
    seen = np.zeros(7)
    for index in range(700):
        drawn, _ = run.curator._examples._together(index, torch.tensor([6]))
        seen += np.isin(np.flatnonzero(OWNERS == 6), drawn.numpy())
    assert ((seen - 200) ** 2 / 200).sum() < 25


@pytest.mark.parametrize("even", [True, False])
def test_captured_steps_are_of_the_size_of_their_users(even, monkeypatch):
    """On a GPU one graph serves users with different numbers of rows; where these are too unequal, each number has
    graphs of its own: one for all would be padded to a multiple."""
    monkeypatch.setattr(RowCounts, "even", lambda counts, rows: even)
    monkeypatch.setattr(Captured, "close", lambda engine: None)  # else they are gone after the run
    found = {}
    for captures in (True, False):
        with captured_on_cpu():
            run = training(sample="users", cap=4, steps=4, sample_rate=0.6, cuda_graphs=captures)
            found[captures] = weights(run)
        if captures:
            engine = run.curator._engine._engine
            graphs = {key[0][0]: sorted(known) for key, known in engine._graphs.items()}
            assert {key[0][1] for key in engine._graphs} == {not even}
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=1e-7)
    if even:
        assert max(graphs[1]) <= sum(min(4, count) for count in COUNTS)
        return
    users = {rows: sum(min(4, count) == rows for count in COUNTS) for rows in (1, 2, 3, 4)}
    assert set(graphs) == {1, 2, 3, 4}
    for rows, sizes in graphs.items():
        assert max(sizes) <= users[rows]


@pytest.mark.parametrize("known", [True, False])
def test_users_of_unequal_numbers_are_summed_as_the_reference_sums_them(known, monkeypatch, recwarn):
    def unknown(engine, term):
        raise NotApart("no rule is known", unknown=True)

    if not known:
        monkeypatch.setattr(BookKeeping, "gradients_of", unknown)
    options = {"sample": "users", "sample_rate": 0.6}
    found = [clipped_sum(training(engine=name, **options), 0, bound=0.5)[1] for name in ("bookkeeping", "reference")]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    left = [each for each in recwarn if "left to the reference engine" in str(each.message)]
    assert bool(left) is not known


# --- one row per user ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", ["rows", "users"])
@pytest.mark.parametrize("options", [{}, {"sampling": "allocation"}, {"sampling": "truncated", "max_batch": 30}])
def test_one_row_per_user_is_todays_run_bit_for_bit(sample, options):
    everyone = np.random.default_rng(0).permutation(len(OWNERS)) if sample == "rows" else np.arange(len(OWNERS))
    plain, users = training(users=None, **options), training(users=everyone, sample=sample, **options)
    assert torch.equal(weights(plain), weights(users))
    assert plain.ledger.spent == users.ledger.spent


# --- what is charged and said -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rows_per_user": 4}, GroupedGaussian(0.3, 1.0, 4)),
        ({}, GroupedGaussian(0.3, 1.0, 7)),
        ({"rows_per_user": "median"}, GroupedGaussian(0.3, 1.0, 2)),
        ({"rows_per_user": 4, "cap": 2}, GroupedGaussian(0.3, 1.0, 4, 2)),
        ({"sample": "users"}, SampledGaussian(0.3, 1.0)),
        ({"sample": "users", "cap": 2}, SampledGaussian(0.3, 1.0)),
        ({"sample": "users", "sampling": "allocation"}, AllocatedGaussian(3, 1.0)),
        ({"sample": "users", "sampling": "truncated", "max_batch": 9}, TruncatedGaussian(0.3, 1.0, 9, len(COUNTS))),
    ],
)
@pytest.mark.everyday("options2-expected2", "options5-expected5")
def test_what_is_charged(options, expected):
    run = training(reproducible=None, **options)
    weights(run)
    assert set(run.ledger.spent) == {expected}
    said = run.guarantee()
    assert said.epsilon is not None
    assert said.adjacency.startswith("zero-out all rows of one user")
    assert "who owns which row" in said.assumption("unit").detail
    users = options.get("sample") == "users"
    most = {None: 7, "median": 2}.get(options.get("rows_per_user"), options.get("rows_per_user"))
    rate = 1 / 3 if options.get("sampling") == "allocation" else 0.3
    assert run.expected_batch == pytest.approx(rate * (len(COUNTS) if users else np.minimum(COUNTS, most).sum()))


def test_correlated_noise_over_users():
    method = make_method("dp-bandmf", bands=2)
    run = training(method=method, sample="users", sample_rate=0.2, reproducible=None)
    weights(run)
    assert all(isinstance(question, CyclicGaussian) for question in run.ledger.spent)
    with pytest.raises(ValueError, match="correlated noise"):
        training(method=method, sample_rate=0.2)


def test_without_users_one_row_per_person_is_assumed():
    run = training(users=None, reproducible=None)
    weights(run)
    assert run.guarantee().assumption("unit").detail == "a row is a unit of its own"


def test_epsilon_is_kept_and_verified(tmp_path):
    for options in ({"rows_per_user": 4}, {"sample": "users"}):
        out = tmp_path / options.get("sample", "rows")
        run = training(reproducible=None, noise_multiplier=None, epsilon=3.0, out=out, **options)
        weights(run)
        found = verify(out)
        assert 2.9 < found.guarantee.epsilon <= 3.0
        assert found.guarantee.adjacency == run.guarantee().adjacency
        opened = json.loads((out / "ledger.jsonl").read_text().splitlines()[0])
        assert opened["users"]["users"] == len(COUNTS)
        assert opened["users"]["rows_per_user"] == options.get("rows_per_user")
        text = model_card(out)
        assert "one user" in text
        assert "one row of the training data" not in text
        with pytest.raises(ValueError, match="a user already"):
            verify(out, rows_per_user=2)


def test_a_run_goes_on_with_the_same_users_only(tmp_path):
    options = {"sample": "users", "reproducible": None, "steps": 4, "out": tmp_path / "run"}
    run = training(**options)
    next(iter(run))
    del run
    with pytest.raises(ValueError, match="resume: owners is"):
        training(**options, users=np.roll(OWNERS, 1), resume=True)
    weights(training(**options, resume=True))
    assert verify(tmp_path / "run").finished


def test_a_column_names_users():
    inputs, targets = rows()
    named = [f"user {owner}" for owner in OWNERS]
    columns = {"input": inputs, "labels": targets, "who": named}
    by_row = [{"input": i, "labels": t, "who": w} for i, t, w in zip(inputs, targets, named, strict=True)]
    for data in (columns, by_row):
        run = training(data, users="who", target="labels", sample="users")
        weights(run)
        assert run.users.users == len(COUNTS)
    with pytest.raises(ValueError, match="users='whom' is no column of the data, which has input, labels, who"):
        training(columns, users="whom", target="labels")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"users": OWNERS[:-1]}, "ids for"),
        ({"users": 3}, "users=int"),
        ({"users": "who"}, "names a column, but data is a tuple"),
        ({"users": [None, *OWNERS[1:]]}, "row 0 has no user"),
        ({"users": np.where(OWNERS == 3, np.nan, OWNERS)}, "has no user"),
        ({"users": np.stack([OWNERS, OWNERS])}, "ids for"),
        ({"delta": 0.03}, "delta=0.03 is not below 1/U"),
        ({"sample": "user"}, "sample='user' is unknown"),
        ({"rows_per_user": "mean"}, "rows_per_user='mean'"),
        ({"rows_per_user": 0}, "rows_per_user=0"),
        ({"cap": 0}, "cap=0"),
        ({"sample": "users", "rows_per_user": 3}, "rows_per_user=3"),
        ({"sampling": "allocation"}, "sampling='allocation'"),
        ({"evaluate": "private"}, "evaluate"),
        ({"method": "dpsur"}, "a gate"),
        ({"users": None, "cap": 2}, "cap=2 is about users"),
        ({"users": [[owner] for owner in OWNERS[:-1]] + [[0, 1]], "cap": 2}, "cap=2"),
        ({"users": [[owner] for owner in OWNERS[:-1]] + [[0, 1]], "sample": "users"}, "several owners"),
    ],
)
def test_mistakes_name_argument_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        training(**options)


@pytest.mark.slow
def test_the_page_about_users_runs(capsys):
    page = Path(__file__).parent.parent.parent / "docs" / "users.md"
    exec("".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)), {})
    assert "zero-out all rows of one user (at most 4)" in capsys.readouterr().out
