"""Is a bound on users' rows chosen by a question that is bounded, charged, and counted in the run that uses it?"""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from commands import as_json
from commands import vestige as command
from vestige.accounting.ledger import LedgerError
from vestige.mechanism.users.ownership import ChosenBound, facts_of_users, ownership
from vestige.training.private_statistics import bound_scores, read_bound
from vestige.training.verify import verify
from vestige.units import Users

COUNTS = [1, 4, 2, 3, 1, 4, 7, 2] * 40
OWNERS = np.repeat(np.arange(len(COUNTS)), COUNTS)
LOSS = nn.functional.cross_entropy


def rows_and_labels():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(len(OWNERS), 6, generator=draw), torch.randint(3, (len(OWNERS),), generator=draw)


def trained(**options):
    settings = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 4, "lr": 0.1, "users": OWNERS}
    run = vestige.train(nn.Linear(6, 3), LOSS, rows_and_labels(), **(settings | options))
    for _ in run:
        pass
    return run


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(0, 29), st.integers(1, 12), st.floats(0.05, 0.95)
)
def test_one_user_moves_every_score_by_one_at_most(counts, place, other, share):
    before = bound_scores(np.array(counts), share, 9)
    fewer = counts[: place % len(counts)] + counts[place % len(counts) + 1 :]
    changed = [other if at == place % len(counts) else each for at, each in enumerate(counts)]
    for neighbour in (fewer, changed, [*counts, other]):
        assert np.abs(bound_scores(np.array(neighbour, dtype=int), share, 9) - before).max() <= 1 + 1e-9


def test_where_all_have_as_many_rows_that_is_the_best_bound():
    found = bound_scores(np.array([5] * 40), 0.5, 9)
    assert found.argmax() == 4
    assert (np.delete(found, 4) == -20).all()


def test_the_choice_follows_the_exponential_mechanism():
    owners = [0, 1, 1, 2, 2, 2]
    drawn = np.array(
        [vestige.private_bound(owners, epsilon=2.0, share=0.5, largest=4, delta=1e-3).rows for _ in range(1500)]
    )
    weights = np.exp(bound_scores(np.array([1, 2, 3]), 0.5, 4))  # epsilon / 2 is 1
    expected = 1500 * weights / weights.sum()
    found = np.bincount(drawn, minlength=5)[1:]
    assert ((found - expected) ** 2 / expected).sum() < 21.1  # of 3 degrees of freedom: one in ten thousand


def test_what_the_choice_costs_is_in_the_epsilon_of_the_run(tmp_path):
    chosen = vestige.private_bound(OWNERS, epsilon=0.5, share=0.5, largest=16, out=tmp_path / "bound")
    assert verify(tmp_path / "bound").guarantee.epsilon <= 0.5 + 1e-9
    run = trained(rows_per_user=chosen, out=tmp_path / "run")
    alone = trained(rows_per_user=chosen.rows, epsilon=2.5)
    assert run.plan.noise_multiplier == pytest.approx(alone.plan.noise_multiplier, rel=1e-6)
    assert run.guarantee().epsilon == pytest.approx(alone.guarantee().epsilon + 0.5)
    assert 2.9 < run.guarantee().epsilon <= 3.0
    assert "0.5 for the choice of the bound" in run.guarantee().accountant
    assert run.spent() <= 3.0
    assert verify(tmp_path / "run").guarantee.epsilon == pytest.approx(run.guarantee().epsilon)
    opened = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0])
    assert (opened["users"]["choice_epsilon"], opened["users"]["rows_per_user"]) == (0.5, chosen.rows)
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert records[0]["epsilon"] > 0.5


def test_in_steps_of_users_and_in_a_loop():
    chosen = ChosenBound(3, 0.5)
    run = trained(sample="users", cap=chosen)
    assert run.users.cap == 3
    assert 2.9 < run.guarantee().epsilon <= 3.0
    assert run.plan.noise_multiplier == pytest.approx(trained(sample="users", epsilon=2.5).plan.noise_multiplier)
    model, engine = nn.Linear(6, 3), vestige.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), users=OWNERS, rows_per_user=chosen,
        data_loader=DataLoader(TensorDataset(*rows_and_labels()), batch_size=100), max_grad_norm=1.0, target_epsilon=3.0,
        target_delta=1e-5, draws=2,
    )  # fmt: skip
    for _, (x, y) in zip(range(2), loader, strict=False):
        LOSS(model(x), y).backward()
        optimizer.step()
    assert 2.9 < engine.get_epsilon(1e-5) <= 3.0
    with pytest.raises(vestige.BudgetSpent):
        for x, y in loader:
            LOSS(model(x), y).backward()
            optimizer.step()


def test_two_choices_count_twice_and_one_counts_once():
    rows_per_user, cap = ChosenBound(7, 0.5), ChosenBound(7, 0.5)
    run = trained(rows_per_user=rows_per_user, cap=cap)
    alone = trained(rows_per_user=7, cap=7, noise_multiplier=run.plan.noise_multiplier, epsilon=None)
    assert run.guarantee().epsilon == pytest.approx(alone.guarantee().epsilon + 1.0)
    assert Users.from_json(json.loads(json.dumps(run.users.to_json()))) == run.users
    once = facts_of_users(ownership(OWNERS, len(OWNERS)), "rows", cap, cap, 1e-5)
    assert once.choice_epsilon == 0.5


@pytest.mark.parametrize("rows", [3, 4])
def test_a_run_is_resumed_with_the_choice_that_it_was_begun_with(tmp_path, rows):
    chosen = vestige.private_bound(OWNERS, epsilon=0.5, largest=16, out=tmp_path / "bound")
    settings = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 4, "users": OWNERS, "out": tmp_path / "run"}
    next(iter(vestige.train(nn.Linear(6, 3), LOSS, rows_and_labels(), rows_per_user=chosen, **settings)))
    with pytest.raises(ValueError, match="begun with another answer of private_bound"):
        vestige.train(
            nn.Linear(6, 3), LOSS, rows_and_labels(), rows_per_user=ChosenBound(rows, 0.5), **settings, resume=True
        )
    assert read_bound(tmp_path / "bound") == chosen
    again = read_bound(tmp_path / "bound")
    run = vestige.train(nn.Linear(6, 3), LOSS, rows_and_labels(), rows_per_user=again, **settings, resume=True)
    run.run()
    assert run.guarantee().epsilon <= 3.0


def test_a_loop_is_resumed_with_the_choice_that_it_was_begun_with(tmp_path):
    def looped(chosen, resume):
        model, engine = nn.Linear(6, 3), vestige.PrivacyEngine(ledger=tmp_path / "ledger.jsonl", resume=resume)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), users=OWNERS, rows_per_user=chosen,
            data_loader=DataLoader(TensorDataset(*rows_and_labels()), batch_size=100), max_grad_norm=1.0,
            noise_multiplier=2.0,
        )  # fmt: skip
        x, y = next(iter(loader))
        LOSS(model(x), y).backward()
        optimizer.step()
        engine.close()

    chosen = ChosenBound(3, 0.5)
    looped(chosen, False)
    with pytest.raises(ValueError, match="begun with another answer of private_bound"):
        looped(ChosenBound(3, 0.5), True)
    looped(chosen, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.0}, "share=1.0"),
        ({"largest": 0}, "largest=0"),
        ({"epsilon": -1.0}, "epsilon=-1"),
        ({"users": [[0, 1], [1]]}, "several owners"),
        ({"users": [0, None, 1]}, "row 1 has no user"),
        ({"delta": 0.5}, "delta"),
    ],
)
def test_mistakes_name_argument_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        vestige.private_bound(**({"users": OWNERS, "epsilon": 1.0} | options))


def test_a_budget_must_hold_the_choice():
    with pytest.raises(ValueError, match="epsilon=3.0 is not more than the 3"):
        trained(rows_per_user=ChosenBound(3, 3.0))


def test_the_command_and_a_run_that_follows(tmp_path):
    people = ["age,who,rich"] + [f"{20 + i % 50},p{i % 40},{'yes' if i % 3 else 'no'}" for i in range(200)]
    (tmp_path / "people.csv").write_text("\n".join(people) + "\n")
    asked = ["bound", "--data", tmp_path / "people.csv", "--user-column", "who", "--out", tmp_path / "bound"]
    found = as_json(*asked, "--epsilon", "0.5", "--largest", "10")
    assert 1 <= found["rows"] <= 10
    assert as_json("verify", tmp_path / "bound")["asked"] == 1
    code, _, error = command(*asked, "--epsilon", "0.5")
    assert (code, error.count("\n"), "exists" in error) == (2, 1, True)
    words = ["train", "--recipe", "tabular", "--data", tmp_path / "people.csv", "--columns", "age=0..100"]
    words += ["--label-column", "rich", "--labels", "no,yes", "--epsilon", "3", "--steps", "3", "--no-secure-mode"]
    (tmp_path / "public.csv").write_text("\n".join(people[:20]) + "\n")
    words += ["--user-column", "who", "--test", tmp_path / "public.csv"]
    run = as_json(*words, "--rows-per-user", tmp_path / "bound", "--out", tmp_path / "run")
    assert run["adjacency"] == f"zero-out all rows of one user (at most {found['rows']})"
    assert 2.9 < as_json("verify", tmp_path / "run")["epsilon"] <= 3
    users = as_json(*words, "--sample", "users", "--cap", tmp_path / "bound", "--out", tmp_path / "users")
    assert 2.9 < users["epsilon"] <= 3
    code, _, error = command(*words, "--cap", "few", "--out", tmp_path / "wrong")
    assert (code, error.count("\n"), "--cap='few'" in error) == (2, 1, True)
    (tmp_path / "bound" / "bound.json").write_text(json.dumps({"rows": 9, "epsilon": 0.1, "share": 0.5, "largest": 10}))
    with pytest.raises(LedgerError, match=r"bound.json"):
        read_bound(tmp_path / "bound")
