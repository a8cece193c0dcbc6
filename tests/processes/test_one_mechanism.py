"""Are several processes one mechanism? The same run as in one process, the same ledger, and noise exactly once."""

from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

import process_gang
from process_gang import METHODS
from vestige.methods.registry import METHODS as REGISTERED

OTHERS = {
    "by layers": {"method": process_gang.by_layers},
    "quantile": {"method": "dp-quantile"},
    "importance": {"method": "dp-is", "kinds": ("replicated",)},
    "float32": {"secure_mode": False},
    "in parts": {"method": "fo-dp-sgd", "max_physical_batch_size": 3},
    "allocation": {"sampling": "allocation"},
    "truncated": {"sampling": "truncated", "max_batch": 9},
    "hardly anybody": {"sample_rate": 0.01, "examples": 7},
    "private evaluation": {"evaluate": "private"},
    "balanced": {"method": process_gang.balanced},
}
EVERYDAY = {
    "replicated": ("importance", "in parts", "allocation", "truncated", "hardly anybody", "private evaluation"),
    "sharded": ("by layers", "in parts"),
}
TOLERANCE = 2e-6
WHOLE = ("dp-muon", "dp-micro-adam", "geoclip", "dp-sat", "dp-sam", "dp-is", "kalman-memory")
"""Methods with a part that needs whole tensors."""


@cache
def alone(method="dp-sgd", **options):
    return process_gang.train(method, **options)


@cache
def together(gang, method="dp-sgd", **options):
    return gang(process_gang.train, method, **options)


def same(found, wanted, tolerance=TOLERANCE):
    for each in found:
        assert not isinstance(each, process_gang.Failed), each
        assert torch.allclose(each["path"], wanted["path"], atol=tolerance), (each["path"] - wanted["path"]).abs().max()
        assert {key: each[key] for key in ("head", "asked", "epsilon", "gate")} == {
            key: wanted[key] for key in ("head", "asked", "epsilon", "gate")
        }
        assert each["accuracy"] == wanted["accuracy"]


USERS = tuple(place // 4 if place < 40 else place for place in range(60))


def test_rows_that_cannot_be_read_stop_no_process(two):
    """They contribute nothing, as in one process; whichever process draws them."""
    asked = {"arrange": "torn", "sample_rate": 0.9, "steps": 4}
    same(two(process_gang.train, **asked), process_gang.train(**asked))
    assert two(process_gang.assumption, name="bad_rows", arrange="torn") == ["checked"] * 2


@pytest.mark.parametrize(
    "options",
    [{"sample": "users", "max_physical_batch_size": 3}, {"sample": "users", "cap": 2}, {"rows_per_user": 3, "cap": 2}],
    ids=["users", "users, capped", "rows"],
)
@pytest.mark.nightly("users, capped")
def test_two_processes_keep_users_whole(two, options):
    """A user's rows are averaged and clipped by one process, or the run would be another."""
    wanted = process_gang.train(users=USERS, **options)
    for each in two(process_gang.train, users=USERS, **options):
        assert not isinstance(each, process_gang.Failed), each
        assert torch.allclose(each["path"], wanted["path"], atol=TOLERANCE)
        assert (each["asked"], each["epsilon"]) == (wanted["asked"], wanted["epsilon"])


@pytest.mark.parametrize("blank", ["without one of four rows", "without one of one row"])
@pytest.mark.nightly("without one of one row")
def test_blanking_a_user_moves_the_sum_of_two_processes_by_the_bound(two, blank):
    """Whichever process has the user's rows, they are one clipped vector of the sum."""
    asked = {
        "users": USERS,
        "sample": "users",
        "sample_rate": 0.95,
        "steps": 1,
        "lr": 1.0,
        "max_physical_batch_size": 6,
    }
    expected = 0.95 * len(set(USERS))
    found = [two(process_gang.train, arrange=each, **asked)[0] for each in ("large", blank)]
    moved = (found[0]["path"][-1] - found[1]["path"][-1]).double().norm() * expected
    assert float(moved) == pytest.approx(1.0, abs=1e-3)


def test_users_are_not_for_sharded_models(two):
    found = two(process_gang.train, users=USERS, sample="users", kind="sharded")
    assert all("users: not for a sharded model" in each.message for each in found)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@pytest.mark.nightly(
    "replicated-fo-dp-sgd",
    "replicated-dpsur",
    "replicated-dp-adamw",
    "replicated-dp-bandmf",
    "sharded-dp-adamw",
    "sharded-disk",
    "sharded-dp-bandmf",
)
def test_two_processes_make_the_run_of_one(two, method, kind):
    same(together(two, method, kind=kind), alone(method))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_four_processes_make_the_run_of_one_by_every_method(four, method, kind):
    same(four(process_gang.train, method, kind=kind), alone(method))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if name in EVERYDAY[kind] else [pytest.mark.slow])
        for name, each in OTHERS.items()
        for kind in each.get("kinds", ("replicated", "sharded"))
    ],
)
def test_and_so_they_do_with_other_settings(two, name, kind):
    options = {key: value for key, value in OTHERS[name].items() if key != "kinds"}
    found, wanted = two(process_gang.train, kind=kind, **options), alone(**options)
    if name == "importance":  # its coins are each process's own
        assert all(torch.equal(each["path"], found[0]["path"]) for each in found)
        assert [each["head"] for each in found] == [wanted["head"]] * 2
    else:
        same(found, wanted)


def test_a_model_in_ddp_is_taken_out_of_it(two):
    same(two(process_gang.train, kind="ddp"), alone())


def test_a_sum_clipped_by_process_is_found(two):
    """The test itself: what it must tell apart, it does."""
    wrong = two(process_gang.train, spoil="clipped by process")
    assert not isinstance(wrong[0], process_gang.Failed), wrong[0]
    assert (wrong[0]["path"] - alone()["path"]).abs().max() > 1000 * TOLERANCE


def test_every_example_has_one_process(two):
    (drawn, first), (same_draw, second) = two(process_gang.shares, 50, 0.1)
    assert drawn == same_draw
    assert len({tuple(each) for each in drawn}) > 10
    for everyone, *parts in zip(drawn, first, second, strict=True):
        assert sorted(parts[0] + parts[1]) == everyone
        assert all(set(example % 2 for example in part) <= {rank} for rank, part in enumerate(parts))


def test_memory_and_optimizer_are_divided(two):
    """FO-DP-SGD's window of seven, and its trend, cost each process half."""
    whole = alone("fo-dp-sgd")["memory"]
    halves = [each["memory"] for each in together(two, "fo-dp-sgd", kind="sharded")]
    assert whole["past"] == (7, 268)
    assert [each["past"][0] for each in halves] == [7, 7]
    assert sum(each["past"][1] for each in halves) == 268
    assert max(each["past"][1] for each in halves) <= 0.6 * 268
    assert sum(each["trend"][0] for each in halves) == 268


# --- noise ------------------------------------------------------------------------------------------------------------


def wrong_with(noise, deviation):
    """What tells a noise vector from independent noise of this deviation; None if nothing does."""
    scaled = (noise / deviation).double().numpy()
    if stats.kstest(scaled, "norm").pvalue < 1e-4:
        return "not such a Gaussian"
    low, high = stats.chi2(len(scaled)).ppf([1e-5, 1 - 1e-5])
    if not low < (scaled**2).sum() < high:
        return "another variance"
    first, second = np.array_split(scaled, 2)
    shorter = min(len(first), len(second))
    if abs(np.corrcoef(first[:shorter], second[:shorter])[0, 1]) > 5 / np.sqrt(shorter):
        return "halves that go together"
    return None


@pytest.mark.parametrize("arithmetic", ["lattice", "float32"])
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_noise_is_added_once_and_parts_of_it_are_independent(two, kind, arithmetic):
    found = two(process_gang.noise, kind, arithmetic)
    (noise, deviation), (other, _) = found
    assert torch.equal(noise, other)
    for each in noise:
        assert wrong_with(each, 3.0) is None
        assert wrong_with(each, 3.0 * 2 / 3) is not None
        assert wrong_with(each, 3.0 * 3 / 2) is not None
    assert deviation == pytest.approx(3.0, rel=2e-3)
    assert wrong_with(noise.sum(0), 3.0 * 2**0.5) is None  # two questions have nothing in common


def test_noise_that_processes_have_in_common_is_found(two):
    for noise, _ in two(process_gang.noise, spoil=True):
        assert wrong_with(noise[0], 3.0) == "halves that go together"


@pytest.mark.slow
def test_noise_of_four_processes(four):
    for noise, _ in four(process_gang.noise):
        assert wrong_with(noise[0], 3.0) is None
        parts = noise[0].view(4, -1).double().numpy()
        assert np.abs(np.corrcoef(parts) - np.eye(4)).max() < 5 / np.sqrt(parts.shape[1])


def test_keys_are_secret_and_shared(two):
    first, second = two(process_gang.train, reproducible=None), two(process_gang.train, reproducible=None)
    assert torch.equal(first[0]["path"], first[1]["path"])
    assert (first[0]["path"] - second[0]["path"]).abs().max() > 0.01


# --- loops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "ddp", "ddp later"])
def test_a_users_loop(two, kind):
    wanted = process_gang.loop()
    for each in two(process_gang.loop, kind):
        assert not isinstance(each, process_gang.Failed), each
        assert torch.allclose(each["path"], wanted["path"], atol=TOLERANCE)
        assert each["head"] == wanted["head"]


@pytest.mark.parametrize(
    "options",
    [{"sample": "users"}, {"sample": "users", "cap": 2}, {"rows_per_user": 3}],
    ids=["users", "users, capped", "rows"],
)
@pytest.mark.nightly("users")
def test_a_users_loop_keeps_users_whole(two, options):
    """Of two processes each has whole users, in parts of at most four rows or of one user."""
    wanted = process_gang.loop(users=USERS, **options)
    for each in two(process_gang.loop, "ddp", users=USERS, **options):
        assert not isinstance(each, process_gang.Failed), each
        assert torch.allclose(each["path"], wanted["path"], atol=TOLERANCE)
        assert each["head"] == wanted["head"]


def test_a_sharded_loop_samples_rows(two):
    found = two(process_gang.loop, "sharded", users=USERS, sample="users")
    assert all("sample='users': not for a sharded module" in each.message for each in found)


def test_the_budget_of_a_loop_ends_for_all_at_once(two):
    options = {"epsilon": 3.0, "epochs": 3, "physical": None}
    wanted = process_gang.loop(**options)
    assert wanted["stopped"] == 5
    for each in two(process_gang.loop, "ddp", **options):
        assert each["stopped"] == wanted["stopped"]
        assert not each["may_step"]


def test_weights_are_those_of_the_first_process(two):
    for task, wanted in ((process_gang.train, alone()), (process_gang.loop, process_gang.loop())):
        seed = "model_seed" if task is process_gang.train else "seed"
        found = two(task, each=[{seed: 1}, {seed: 2}])
        assert all(torch.allclose(each["path"], wanted["path"], atol=TOLERANCE) for each in found)


def test_a_group_of_one_process_goes_the_same_way():
    gang = process_gang.Gang(1)
    try:
        (found,) = gang(process_gang.train, "fo-dp-sgd")
        same([found], alone("fo-dp-sgd"), tolerance=0.0)
        same(gang(process_gang.train, "fo-dp-sgd", kind="sharded"), alone("fo-dp-sgd"))
    finally:
        gang.close()


def test_the_budget_ends_for_all_at_once(two):
    options = {"epsilon": 2.0, "noise_multiplier": 1.0, "steps": None, "reproducible": 3}
    same(two(process_gang.train, kind="sharded", **options), alone(**options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@pytest.mark.parametrize("method", sorted(REGISTERED))
def test_every_method_makes_the_run_of_one_process_or_is_refused(two, method, kind):
    options = {"sample_rate": 1.0} if method in ("dp-ftrl", "dp-blt") else {}
    options |= {"epsilon": 100.0} if method == "dpsgd-br" else {}
    found, wanted = two(process_gang.train, method, kind=kind, **options), alone(method, **options)
    if kind == "sharded" and method in WHOLE:
        assert all("needs whole tensors" in each.message for each in found)
    elif method == "dp-is":  # its coins are each process's own
        assert torch.equal(found[0]["path"], found[1]["path"])
        assert found[0]["head"] == wanted["head"]
    elif method == "geoclip":  # its bounds follow the releases, and are in the ledger to the last digit
        assert all(torch.allclose(each["path"], wanted["path"], atol=2e-5) for each in found)
    else:
        same(found, wanted, tolerance=2e-5)
