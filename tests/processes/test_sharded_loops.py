"""Is a user's own loop with a sharded module the loop of one process? The same parameters after every step."""

from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

import process_gang
import process_loops
from process_gang import Failed
from vestige.processes.parameter_shards import MOST_PARTS, require_summable

TOLERANCE = 2e-6


@cache
def alone(method="dp-sgd", **options):
    return process_loops.loop(method, **options)


@cache
def together(gang, method="dp-sgd", **options):
    return gang(process_loops.loop, method, "sharded", **options)


def same(found, wanted):
    for each in found:
        assert not isinstance(each, Failed), each
        assert torch.allclose(each["path"], wanted["path"], atol=TOLERANCE), (each["path"] - wanted["path"]).abs().max()
        assert torch.allclose(each["seen"], wanted["seen"], atol=10 * TOLERANCE)
        assert {key: each[key] for key in ("head", "asked", "calls", "grads")} == {
            key: wanted[key] for key in ("head", "asked", "calls", "grads")
        }
        assert each["rate"] == pytest.approx(wanted["rate"])


METHODS = [("dp-sgd", "SGD"), ("fo-dp-sgd", "AdamW"), ("dp-adamw", "AdamW"), ("sma-dp-sgd", "Adam")]
OTHERS = {
    "in parts": {"method": "fo-dp-sgd", "physical": 3},
    "nobody in a process": {"examples": 7, "batch": 1},
    "nobody in a process, in parts": {"examples": 16, "batch": 2, "physical": 1},
    "a closure": {"closure": True, "physical": 4},
    "two steps for each sample": {"steps_per_batch": 2},
    "clipped by layers": {"method": process_gang.by_layers},
    "balanced": {"method": process_gang.balanced},
    "float32": {"secure_mode": False},
    "allocation": {"sampling": "allocation"},
}
QUICK = ("in parts", "nobody in a process, in parts", "clipped by layers")


@pytest.mark.parametrize(("method", "optimizer"), METHODS)
@pytest.mark.nightly("dp-adamw-AdamW")
def test_two_processes_make_the_loop_of_one(two, method, optimizer):
    same(together(two, method, optimizer=optimizer), alone(method, optimizer=optimizer))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in OTHERS])
def test_and_so_they_do_with_other_settings(two, name):
    wanted = alone(**OTHERS[name])
    same(two(process_loops.loop, kind="sharded", **OTHERS[name]), wanted)
    assert wanted["asked"] == len(wanted["path"]) - 1 or name in ("two steps for each sample", "allocation")


@pytest.mark.slow
def test_four_processes_some_of_which_have_no_rows_of_a_bias(four):
    same(four(process_loops.loop, "fo-dp-sgd", "sharded", physical=2), alone("fo-dp-sgd", physical=2))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"])
def test_optimizers_of_torch(two, optimizer):
    same(two(process_loops.loop, kind="sharded", optimizer=optimizer), alone(optimizer=optimizer))


def test_a_sum_clipped_by_process_is_found(two):
    """The test itself: what it must tell apart, it does."""
    wrong = two(process_loops.loop, kind="sharded", optimizer="SGD", spoil=True)
    assert not isinstance(wrong[0], Failed), wrong[0]
    assert (wrong[0]["path"] - alone(optimizer="SGD")["path"]).abs().max() > 1000 * TOLERANCE


def test_what_is_kept_is_divided(two):
    """Gradient, FO-DP-SGD's window, the optimizer's moments; between steps no process holds a whole parameter, in
    a pass each holds all of them."""
    whole, halves = alone("fo-dp-sgd", optimizer="AdamW"), together(two, "fo-dp-sgd", optimizer="AdamW")
    assert whole["memory"]["past"] == (7, 268)
    assert sum(each["memory"]["past"][1] for each in halves) == 268
    assert sum(each["gradient"] for each in halves) == whole["gradient"] == 268
    assert sum(here for each in halves for _, here, _ in each["moments"]) == 268
    assert max(each["gradient"] for each in halves) <= 0.6 * 268
    for each in halves:
        between, inside = each["stored"]
        assert between == 6 * 4  # one number for each of six parameters
        assert inside == 300 * 4  # as many rows for each process: 32 numbers of padding


def test_what_the_loop_sets_and_evaluates_is_the_modules_own(two):
    """A scale that is set between steps, a counter that passes set, a buffer, a frozen layer, and an evaluation after
    every step by FSDP2's own passes, which keep the outermost module's parameters gathered."""
    options = {"model": process_loops.Marked, "evaluate": True, "physical": 4}
    wanted, found = alone(**options), two(process_loops.loop, kind="sharded", **options)
    counted = [each.pop("calls") for each in found]
    assert counted[0] > 2 * len(wanted["seen"])
    same([{**each, "calls": wanted["calls"]} for each in found], wanted)
    assert (wanted["seen"][1:] - wanted["seen"][:-1]).abs().amax(dim=(1, 2)).min() > 1e-3


def test_a_model_that_vestige_train_trains_is_evaluated_with_its_present_parameters(two):
    assert max(two(process_loops.evaluated_between_steps)) < TOLERANCE


def test_noise_is_added_once_and_the_parts_of_it_are_independent(two):
    first, second = two(process_loops.noise_of_a_step)
    assert torch.equal(first, second)
    other = two(process_loops.noise_of_a_step)[0]  # with another key
    assert abs(np.corrcoef(first, other)[0, 1]) < 5 / np.sqrt(len(first))
    for scale, fits in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        assert (stats.kstest((first / scale).double().numpy(), "norm").pvalue > 1e-4) == fits
    shares = first.view(2, -1).double().numpy()  # a row of the weight is one process's
    assert abs(np.corrcoef(shares)[0, 1]) < 5 / np.sqrt(shares.shape[1])


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_number_of_processes(two, tmp_path):
    """The same weights, the same optimizer and the same memory: the steps after it are those of a whole module."""
    from process_gang import Gang

    straight, whole, replicas = (tmp_path / name for name in ("straight", "whole", "replicas"))
    tmp_path = tmp_path / "sharded"
    for folder in (straight, whole, replicas, tmp_path):
        folder.mkdir()
    wanted = process_loops.saved_and_loaded("plain", straight, before=6)  # without a stop in between
    process_loops.saved_and_loaded("plain", whole)
    stopped = process_loops.saved_and_loaded("plain", whole, load=True)
    two(process_loops.saved_and_loaded, "plain", replicas)
    copies = two(process_loops.saved_and_loaded, "plain", replicas, load=True)
    assert torch.equal(stopped["end"], wanted["end"])
    saved = two(process_loops.saved_and_loaded, "sharded", tmp_path)
    assert not isinstance(saved[0], Failed), saved[0]
    left = sorted(path.name.split("-rows-")[0] for path in tmp_path.iterdir())
    assert left == ["ledger.jsonl", "saved.pt", "saved.pt"]  # a folder of rows beside the file, and no older one
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    again = two(process_loops.saved_and_loaded, "sharded", tmp_path, load=True)
    (tmp_path / "ledger.jsonl").write_bytes(ledger)
    one = Gang(1)
    try:
        (other,) = one(process_loops.saved_and_loaded, "sharded", tmp_path, load=True)
    finally:
        one.close()
    for each in (*again, other):
        assert torch.equal(each["start"], saved[0]["end"])
    for each in (*copies, *again, other):
        assert not isinstance(each, Failed), each
        assert torch.allclose(each["start"], saved[0]["end"], atol=TOLERANCE)
        assert (each["step"], each["asked"]) == (6, 6)
        assert torch.allclose(each["end"], wanted["end"], atol=TOLERANCE)


def test_checkpoints_that_do_not_fit(two, tmp_path):
    two(process_loops.saved_and_loaded, "sharded", tmp_path)
    for each in two(process_loops.saved_and_loaded, "sharded", tmp_path, load=True, into="plain"):
        assert "the module was sharded by fully_shard when" in each.message
    for each in two(process_loops.saved_and_loaded, "sharded", tmp_path, load=True, by="state_dict"):
        assert "save and load by privacy_engine.save_checkpoint" in each.message


# --- what is refused --------------------------------------------------------------------------------------------------

MISUSED = {
    "standardised inputs": "is not a row's own: mean at ",
    "sharded later": "was sharded (fully_shard) after make_private",
    "a hook": "replaced, moved or sharded anew after make_private",
    "another module": "replaced, moved or sharded anew after make_private",
    "a forward of its own": "write it into the module's class",
    "a part by itself": "has a gradient that did not come through a call of the private model",
    "eval mode": "has a gradient that did not come through a call of the private model",
    "written to": "changed between two training passes of one step",
    "another draw": "of the private loader and process 0 at draw 0: every process goes through all parts",
    "another step": "they have taken different numbers of steps",
    "evaluated before the optimizer": "module.reshard()",
    "on the meta device": "'0.weight' is on the meta device",
    "another rate": '"lr": 0.01, "maximize": false',
    "another decay": '"weight_decay": 0.5}] in process 1 and',
    "frozen in one process": 'the list of frozen parameters is ["0.weight"] in process 1 and [] in process 0',
}


@pytest.mark.parametrize("how", MISUSED)
def test_what_would_be_wrong(two, how):
    for answer in two(process_loops.misused, how):
        assert isinstance(answer, Failed), answer
        assert (answer.kind, answer.message.count("\n")) == ("ValueError", 0), answer
        assert MISUSED[how] in answer.message, answer


def test_a_module_that_was_evaluated_before_is_sharded_still(two):
    """FSDP2 leaves the outermost parameters gathered: they look like a replica's."""
    assert two(process_loops.misused, "evaluated before") == [True, True]
    assert two(process_loops.misused, "and resharded") == [True, True]


@pytest.mark.slow
def test_torch_compile(two):
    """After make_private it is for evaluation alone; before, the twin would have what was compiled of the module."""
    for answer in two(process_loops.compiled, "before"):
        assert isinstance(answer, Failed), answer
        assert answer.kind == "ValueError", answer
        assert "was compiled by torch.compile" in answer.message, answer
    plain, after = two(process_loops.compiled, "not at all"), two(process_loops.compiled, "after")
    for one, other in zip(plain, after, strict=True):
        assert not isinstance(other, Failed), other
        assert torch.equal(one, other)


REFUSED = {
    "audit": ({"audit": 8}, "audit=8: not for a sharded module"),
    "AdamBC": ({"optimizer": "AdamBC"}, "AdamBC takes the noise of all coordinates"),
    "dp-sat": ({"method": "dp-sat"}, "its probe (AgainstLastRelease) needs whole tensors"),
    "disk": ({"method": "disk"}, "asks elsewhere than at the parameters"),
    "Adafactor": ({"optimizer": "Adafactor"}, "its rule (Adafactor) needs whole tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_sharded_modules_do_without(two, case):
    options, words = REFUSED[case]
    for answer in two(process_loops.loop, kind="sharded", **options):
        assert isinstance(answer, Failed), answer
        assert answer.kind == "ValueError", answer
        assert words in answer.message, answer


def test_samples_that_sharded_sums_cannot_hold():
    class Two:
        size = 2

    require_summable(2.0 * MOST_PARTS, 1, Two())
    require_summable(1 << 17, None, Two())
    with pytest.raises(ValueError, match="physical batches of 1 make about 81 parts"):
        require_summable(2.0 * (MOST_PARTS + 1), 1, Two())
    with pytest.raises(ValueError, match="a sharded model takes 131,072 a step"):
        require_summable((1 << 17) + 1, None, Two())
