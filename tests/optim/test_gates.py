"""Is a rejected move undone to the last bit, an accepted one kept, and every trial charged?"""

import hashlib
import json
from dataclasses import replace
from math import inf

import pytest
import torch
from scipy.special import ndtr
from scipy.stats import binomtest

import vestige
from conftest import make_toy
from selective_runs import TEST, UNIT, Script, curator_of, finished, start, weights
from vestige import accounting
from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.registry import make_method
from vestige.optim.gates import BufferedRejection, NoisyLossTest
from vestige.optim.rules import Rule, sgd
from vestige.priced_questions import BudgetSpent, SampledGaussian
from vestige.training.planning import affordable
from vestige.training.verify import verify


def digest(content):
    """A hash of every bit of a nested state."""
    tensors = hashlib.sha256()

    def walk(part):
        if isinstance(part, torch.Tensor):
            tensors.update(str((part.dtype, tuple(part.shape))).encode() + part.detach().cpu().numpy().tobytes())
        elif isinstance(part, dict):
            for key in sorted(part, key=str):
                tensors.update(str(key).encode())
                walk(part[key])
        elif isinstance(part, list | tuple):
            for item in part:
                walk(item)
        else:
            tensors.update(repr(part).encode())

    walk(content)
    return tensors.hexdigest()


# --- degenerate equality ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accounting", ["trial-level", "every-trial"])
@pytest.mark.everyday("every-trial")
def test_an_infinite_threshold_is_dp_sgd_bit_for_bit(accounting):
    plain, _ = finished(vestige.dp_sgd(max_grad_norm=0.7, momentum=0.9))
    gated, _ = finished(
        make_method("dpsur", max_grad_norm=0.7, momentum=0.9, threshold=inf, accounting=accounting, validation_batch=20)
    )
    assert torch.equal(weights(plain), weights(gated))
    assert gated.state.gate["accepted"] == 40


def test_a_gate_stands_before_any_method():
    method = vestige.fo_dp_sgd(window=4, momentum=0.5)
    plain, _ = finished(method)
    gated, _ = finished(replace(method, gate=NoisyLossTest(threshold=inf, expected_batch=20)))
    selective, _ = finished(replace(method, gate=NoisyLossTest(expected_batch=20)))
    assert torch.equal(weights(plain), weights(gated))
    assert not torch.equal(weights(plain), weights(selective))


def test_a_buffer_of_one_without_decay_is_dpsur():
    one, records = finished(make_method("dpsur", **TEST))
    other, same = finished(make_method("dpsgd-br", buffer=1, progress="none", **TEST))
    assert torch.equal(weights(one), weights(other))
    assert [r.accepted for r in records] == [r.accepted for r in same]
    assert 0 < sum(r.accepted for r in records) < 40
    assert one.ledger.spent == other.ledger.spent
    assert {q.releases for q in one.ledger.spent} == {"y"}


# --- nothing remains of a rejected candidate -------------------------------------------------------------------------


def moved(state):
    optimizer = {i: dict(state.optimizer.state.get(p, {})) for i, p in enumerate(state.parameters.values())}
    return digest(
        [dict(state.parameters), optimizer, state.optimizer.param_groups, state.learner.memory, state.gradient]
    )


@pytest.mark.parametrize("rule", [sgd(0.9), Rule(torch.optim.Adam), Rule(torch.optim.AdamW)], ids=lambda r: r.name)
@pytest.mark.everyday("SGD")
def test_a_rejected_step_leaves_no_bit_behind(rule):
    method = replace(vestige.fo_dp_sgd(window=4), rule=rule)
    training = start(replace(method, gate=NoisyLossTest(1.0, 1e-3, -0.5, 20)), steps=60)
    seen = {True: 0, False: 0}
    before, asked = moved(training.state), 0
    for record in training:
        after = moved(training.state)
        assert (after == before) == (not record.accepted)
        assert record.accepted or record.diagnostics == {}
        assert training.curator.asked == training.curator.comparisons.asked == asked + 1
        before, asked = after, asked + 1
        seen[record.accepted] += 1
    assert min(seen.values()) > 3


def test_the_first_step_is_undone_too():
    training = start(make_method("dpsur", threshold=-1000.0, accounting="every-trial", validation_batch=20), steps=5)
    before = moved(training.state)
    assert [record.accepted for record in training] == [False] * 5
    assert moved(training.state) == before
    assert training.state.optimizer.state == {} or not any(training.state.optimizer.state.values())


def test_noise_is_never_used_twice():
    noises = []
    training = start(make_method("dpsur", threshold=-1000.0, accounting="every-trial", validation_batch=20), steps=20)
    training.curator._nonprivate_witness = lambda total, noise: noises.append(noise.numpy().tobytes())
    list(training)
    assert len(set(noises)) == len(noises) == 20


def test_a_trial_cut_short_by_the_budget_is_undone():
    method = make_method("dpsur", accounting="every-trial", **TEST)
    training = start(method, steps=3)
    state, ask = training.state, training.curator._charges._ask

    def refuse_the_test(question, *, step, part, sensitivity):
        if step == 1 and part == 1:
            raise BudgetSpent
        ask(question, step=step, part=part, sensitivity=sensitivity)

    training.curator._charges._ask = refuse_the_test
    records = iter(training)
    next(records)
    before = moved(state)
    assert next(records, None) is None
    assert moved(state) == before
    assert state.step == 1


def test_resume_is_bit_identical(tmp_path):
    method = make_method("dpsgd-br", **TEST, decay_fast=0.9, decay_slow=0.95)
    changes = {"steps": 24, "epsilon": 200.0}
    whole, _ = finished(method, **changes)
    part = start(method, **changes, out=tmp_path / "run")
    for record in part:
        if record.step == 9:
            break
    part.ledger.close()
    again, _ = finished(method, **changes, out=tmp_path / "run", resume=True)
    assert torch.equal(weights(whole), weights(again))
    assert digest(whole.state.gate) == digest(again.state.gate)
    assert whole.ledger.spent == again.ledger.spent


# --- what is charged, and when ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accounting_by", "kinds"), [("trial-level", ["trial"]), ("every-trial", ["sampled-gaussian"] * 2)]
)
@pytest.mark.everyday("every-trial-kinds1")
def test_the_ledger_holds_every_trial(tmp_path, accounting_by, kinds):
    method = make_method("dpsur", accounting=accounting_by, **TEST)
    training = start(method, out=tmp_path / "run", epsilon=30.0, noise_multiplier=None, reproducible=None)
    records = list(training)
    training.finish()
    rows = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step" in row]
    assert [(r["step"], r["part"], r["kind"]) for r in rows] == [
        (step, part, kind) for step in range(40) for part, kind in enumerate(kinds)
    ]
    assert sum(not record.accepted for record in records) > 3
    verdict = verify(tmp_path / "run")
    assert verdict.guarantee.epsilon == pytest.approx(training.guarantee().epsilon)
    assert 29.9 < verdict.guarantee.epsilon <= 30.0
    asked = {q: n for q, n in training.ledger.spent.items()}
    assert verdict.guarantee.epsilon == pytest.approx(accounting.epsilon(asked, 1e-5))


def test_records_show_nothing_of_a_rejected_candidate():
    method = replace(vestige.fo_dp_sgd(window=4), gate=NoisyLossTest(1.0, 1e-3, -0.5, 20))
    _, records = finished(method)
    shown = {record.accepted: set(record.to_json()) for record in records}
    assert shown[False] == {"step", "epsilon", "accepted"}
    assert shown[True] > {"step", "epsilon"}


def test_trial_level_prices_one_gradient_question_only():
    test = NoisyLossTest().at(1000)
    gradient = SampledGaussian(0.1, 1.0)
    with pytest.raises(ValueError, match="use accounting='every-trial'"):
        test.questions((gradient, gradient))
    full = replace(test, accounting="every-trial")
    assert full.questions((gradient, gradient)) == (gradient, gradient, SampledGaussian(0.256, 1.3))


def test_the_per_example_form_is_priced_by_its_range():
    test = NoisyLossTest(2.0, 1e-3, -1.0, 100, each=0.1).at(1000)
    (question,) = test.questions((SampledGaussian(0.1, 1.0),))
    assert question.half_range == pytest.approx(1e-3 / (0.1 / 100))
    low, high = ndtr((-1e-3 - 1e-3) / (2.0 * 1e-3)), ndtr(0.0)
    from vestige.accounting.accept_reject import acceptance

    assert acceptance(question) == pytest.approx((low, high))
    with pytest.raises(ValueError, match=r"each=0\.1 has no trial-level price"):
        BufferedRejection(test).questions((SampledGaussian(0.1, 1.0),))


def test_the_number_of_trials_follows_from_the_budget():
    training = start(make_method("dpsur", sigma_t=2.0, **TEST), noise_multiplier=None, steps=None, epsilon=3.0)
    trials = training.plan.steps
    assert len(list(training)) == trials
    one = {q: 1 for q in training.ledger.spent}
    assert trials == affordable(one, 3.0, 1e-5) > 1
    (question,) = one
    assert accounting.epsilon({question: trials}, 1e-5) <= 3.0 < accounting.epsilon({question: trials + 1}, 1e-5)


# --- buffer, selection, degraded mode --------------------------------------------------------------------------------


def test_the_better_of_two_is_applied():
    gate = BufferedRejection(UNIT, buffer=2, tie=1.0)
    assert Script([-2.0, -4.0]).play(gate) == [0, 2]
    assert Script([-4.0, -2.0]).play(gate) == [0, 1]
    assert Script([-4.0, 5.0, 5.0, -2.0]).play(gate) == [0, 0, 0, 1]


def test_as_printed_the_worse_of_two_is_applied():
    gate = BufferedRejection(UNIT, buffer=2, tie=1.0, worst_first=True)
    assert Script([-2.0, -4.0]).play(gate) == [0, 1]
    assert Script([-4.0, -2.0]).play(gate) == [0, 2]
    assert make_method("dpsgd-br", as_printed=True).gate.worst_first


def test_a_tie_is_broken_by_a_coin():
    gate = BufferedRejection(UNIT, buffer=2, tie=1.0)
    assert Script([-2.0, -2.9], coins=[0]).play(gate) == [0, 1]
    assert Script([-2.0, -2.9], coins=[1]).play(gate) == [0, 2]
    curator = curator_of([1.0])
    tosses = []
    for _ in range(1000):
        curator.comparisons.asked += 1
        tosses.append(curator.comparisons.coin(2))
    assert binomtest(sum(tosses), 1000).pvalue > 1e-3


def test_larger_buffers_choose_among_all():
    gate = BufferedRejection(UNIT, buffer=4, tie=0.0)
    assert Script([-2.0, -5.0, -3.0, -4.0]).play(gate) == [0, 0, 0, 2]


def test_degraded_mode_is_reached_and_left():
    gate = BufferedRejection(UNIT, buffer=2, tie=0.0, max_rejects=3)
    bad = 9.0
    script = Script([bad, bad, bad, -2.0, -2.0, -3.0])
    assert script.play(gate) == [0, 0, 0, 4, 4, 6]  # one candidate suffices after three rejections, then two again
    assert script.gate["degraded"] == 1
    assert script.gate["accepted"] == 3
    assert script.gate["rejected"] == 3
    waiting = Script([-2.0, bad, bad, bad, bad])
    assert waiting.play(gate) == [0, 0, 0, 1, 1]  # a candidate already waiting is applied at once
    assert waiting.gate["degraded"] == 1
    assert waiting.gate["buffer"] == []
    patient = Script([bad, bad, -2.0, bad, bad, -3.0])
    assert patient.play(gate) == [0, 0, 0, 0, 0, 6]  # an acceptance ends the row of rejections


def test_a_buffer_is_charged_for_the_losses_it_compares():
    script = Script([-2.0, -4.0])
    script.play(BufferedRejection(UNIT, buffer=2))
    assert {trial.releases for trial in script.asked} == {"yz"}
    single = Script([-2.0, -4.0])
    single.play(BufferedRejection(UNIT, buffer=1))
    assert {trial.releases for trial in single.asked} == {"y"}
    assert single.gate["buffer"] == []


# --- a gate in a method ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma_v": 0.0}, "sigma_v=0.0 must be positive"),
        ({"clip_loss": -1.0}, "clip_loss=-1.0 must be positive"),
        ({"threshold": -inf}, "threshold=-inf never accepts"),
        ({"buffer": 0}, "buffer=0 must be at least 1"),
        ({"max_rejects": 0}, "max_rejects=0 must be at least 1"),
        ({"theta_k": -1.0}, "theta_k=-1.0 must not be negative"),
        ({"decay_fast": 1.5}, "decay_fast=1.5 must lie in"),
        ({"accounting": "paper"}, "accounting='paper' must be one of trial-level, every-trial"),
        ({"validation_batch": 0}, "validation_batch=0 must be positive"),
        ({"clip_each": 0.0}, "clip_each=0.0 must be positive"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make_method("dpsgd-br", **options)


def test_the_method_is_a_sentence():
    method = make_method("dpsur", sigma_t=2.0)
    assert method == Method(name="dpsur", clip=Flat(0.1), rule=sgd(0.9), gate=NoisyLossTest(), noise_multiplier=2.0)
    with pytest.raises(ValueError, match=r"noise_multiplier=1\.0 and the method's own sigma 2\.0"):
        start(method)


def test_a_users_own_loop_refuses_a_gate():
    from torch.utils.data import DataLoader, TensorDataset

    model, data = make_toy()
    with pytest.raises(ValueError, match="has a gate"):
        vestige.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*data), batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method="dpsur",
        )


def test_an_infinite_threshold_is_written_down_and_read_back(tmp_path):
    from vestige.training import job as jobs
    from vestige.training.run_folder import RunFolder

    options = {"threshold": inf, "validation_batch": 50, "accounting": "every-trial"}
    job = jobs.Job(task="digits-mlp", method="dpsur", options=options, noise_multiplier=2.0, steps=2, lr=0.1)
    result = jobs.complete(job, *jobs.start(job, tmp_path / "run")).to_json()
    assert jobs.load(RunFolder(tmp_path / "run")) == job
    assert {key: result[key] for key in ("trials", "accepted", "rejected", "updates", "degraded")} == {
        "trials": 2, "accepted": 2, "rejected": 0, "updates": 2, "degraded": 0,
    }  # fmt: skip
    assert "published_claim_epsilon" in result
    assert verify(tmp_path / "run").guarantee.epsilon == pytest.approx(result["epsilon"])
