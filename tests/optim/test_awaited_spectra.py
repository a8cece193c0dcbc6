"""Does a spectrum that is found beside the training arrive at its step, whatever the threads do meanwhile?"""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
import textwrap
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from conftest import make_toy
from vestige.compare.stacked import Stack, StackedRun
from vestige.files import write_json
from vestige.layout import Layout
from vestige.mechanism.groups import Layers
from vestige.optim.spectral import memory_by_tail_exponent as spectral
from vestige.optim.spectral import tail_exponent
from vestige.optim.spectral.memory_by_tail_exponent import Spectral, group_exponents
from vestige.randomness.sum_and_release_types import Release
from vestige.tasks import models
from vestige.training.job import Job, load, start

LOSS = nn.functional.cross_entropy
RATE, STEPS = 0.25, 20
OUTSIDE = (2.0, 2.1)
"""An interval that no layer's exponent lies in, so that every spectrum shows in the direction."""


@pytest.fixture(scope="module")
def walk():
    """A layout, releases, and parameters of their own for every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(14, 20), nn.LayerNorm(20), nn.Linear(20, 12))
    points = [{name: p + 0.5 * torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(STEPS)]
    points = [{name: p.detach() for name, p in point.items()} for point in points]
    layout = Layout.of(model, Layers())
    return layout, torch.randn(STEPS, layout.size), points


def filtered(memory, walk, points=None, between=lambda state: state):
    """The directions and the exponents that were used; `between` may replace the state between two steps."""
    layout, releases, own = walk
    state = memory.init(layout, torch.device("cpu"))
    directions, used = [], []
    for release, point in zip(releases, points or own, strict=True):
        direction, state, seen = memory.step(Release(release.clone(), 1.0, 10.0, RATE), state, point)
        directions.append(direction.clone())
        used.append(seen["exponent"].clone())
        state = between(state)
    return torch.stack(directions), torch.stack(used)


def schedule(refresh, lag):
    """Of which step's parameters is the spectrum that each step uses?"""
    return [max(0, step - lag) // refresh * refresh for step in range(STEPS)]


@pytest.mark.parametrize("refresh", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("lag", [0, 1, 3, 4, 9])
@pytest.mark.everyday("0-None", "0-7")
def test_a_step_uses_the_spectrum_of_the_step_that_the_lag_says(walk, refresh, lag):
    layout, _, points = walk
    late = [points[step] for step in schedule(refresh or 4, lag)]  # rate 1/4: an epoch is 4 steps
    found, used = filtered(Spectral(interval=OUTSIDE, refresh=refresh, lag=lag), walk)
    wanted, exponents = filtered(Spectral(interval=OUTSIDE, refresh=1, lag=0), walk, late)
    torch.testing.assert_close(used, exponents, rtol=1e-9, atol=0)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    other, _ = filtered(Spectral(interval=OUTSIDE, refresh=1, lag=0), walk, [points[0]] * STEPS)
    assert not torch.allclose(found, other)  # the spectra do show


def test_a_lag_of_zero_is_the_memory_that_waits_bit_for_bit(walk):
    layout, _, points = walk
    states = []
    keep = lambda state: states.append(state) or state
    _, used = filtered(Spectral(interval=OUTSIDE, refresh=2, lag=0), walk, between=keep)
    groups = [segment.group for segment in layout.segments]
    now = [group_exponents(points[step // 2 * 2], groups, "flatten") for step in range(STEPS)]
    assert torch.equal(used, torch.stack(now))
    assert "awaited" not in states[-1]


def test_a_spectrum_begun_before_the_step_is_the_steps_own(walk):
    """Whether `prepare` was called, for these parameters or an earlier step's, makes no difference."""
    layout, releases, points = walk
    memory = Spectral(interval=OUTSIDE)
    wanted, _ = filtered(memory, walk)
    state, found = memory.init(layout, torch.device("cpu")), []
    for step, (release, point) in enumerate(zip(releases, points, strict=True)):
        if step % 3:
            memory.prepare(state, points[0], RATE)  # of a step that failed
            memory.prepare(state, point, RATE)
        direction, state, _ = memory.step(Release(release.clone(), 1.0, 10.0, RATE), state, point)
        found.append(direction.clone())
    assert torch.equal(torch.stack(found), wanted)


# --- whatever the threads do -------------------------------------------------------------------------------------------


def at_once(monkeypatch):
    """Every spectrum is there before the training goes on."""
    go_on = tail_exponent.Background.go_on
    monkeypatch.setattr(tail_exponent.Background, "go_on", lambda self: (go_on(self), self._future.result()))


def delayed(monkeypatch, seconds):
    solve = tail_exponent._solved
    monkeypatch.setattr(tail_exponent, "_solved", lambda *given: (time.sleep(seconds()), solve(*given))[1])


def law_of_timing(memory, walk):
    """Threads that are fast, slow or both give the same directions, bit for bit."""
    lots = random.Random(0)
    ways = [at_once, partial(delayed, seconds=lambda: 0.03), partial(delayed, seconds=lambda: lots.random() / 30)]
    found = []
    for way in ways:
        with pytest.MonkeyPatch.context() as patched:
            way(patched)
            found.append(filtered(memory, walk)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_no_delay_changes_anything(walk):
    law_of_timing(Spectral(interval=OUTSIDE, refresh=2, lag=3), walk)


class WhateverIsReady(Spectral):
    """Uses a spectrum as soon as it is found."""

    def _due(self, state, parameters, every, lead):
        found = super()._due(state, parameters, every, lead)
        for begun in spectral._begun.get(state.get("awaited"), {}).values() if "awaited" in state else ():
            if begun._future.done():
                _, owners = spectral._weights(parameters, state["groups"], lead)
                found = spectral._by_group(begun.result(), owners, 1 + max(state["groups"]), lead)
        return found


def test_the_law_of_timing_rejects_a_memory_that_uses_whatever_is_ready(walk):
    with pytest.raises(AssertionError):
        law_of_timing(WhateverIsReady(interval=OUTSIDE, refresh=2, lag=3), walk)


@pytest.mark.parametrize("worth", [0, tail_exponent.WORTH_DIVIDING], ids=["divided", "whole"])
def test_the_result_is_the_same_on_any_number_of_threads(worth, monkeypatch):
    monkeypatch.setattr(tail_exponent, "WORTH_DIVIDING", worth)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 40, generator=generator) for n in (30, 20, 30, 12, 30, 5)]
    found = []
    for count in (1, 2, 5):
        threads = tail_exponent._Threads()
        threads._count, threads._solving = count, tail_exponent._single(count)
        monkeypatch.setattr(tail_exponent, "_threads", lambda process, threads=threads: threads)
        found.append(tail_exponent.Background(weights).result())
    assert all(torch.equal(found[0].nan_to_num(), other.nan_to_num()) for other in found[1:])
    torch.testing.assert_close(found[0], tail_exponent.exponents(weights), rtol=1e-9, atol=0, equal_nan=True)


def test_threads_beside_the_training_leave_torch_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert tail_exponent._single(2).submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_solver_that_fails_says_so_at_the_step_that_needs_it(walk, monkeypatch):
    def fails(matrices, floor, squared):
        raise torch.linalg.LinAlgError("no convergence")

    layout, releases, points = walk
    memory = Spectral(refresh=1, lag=2)
    state = memory.init(layout, torch.device("cpu"))
    memory.step(Release(releases[0].clone(), 1.0, 10.0, RATE), state, points[0])
    monkeypatch.setattr(tail_exponent, "_solved", fails)
    for step in (1, 2):
        memory.step(Release(releases[step].clone(), 1.0, 10.0, RATE), state, points[step])
    with pytest.raises(torch.linalg.LinAlgError, match="no convergence"):
        memory.step(Release(releases[3].clone(), 1.0, 10.0, RATE), state, points[3])


# --- copies, checkpoints and ends --------------------------------------------------------------------------------------


def reloaded(state, file):
    torch.save(state, file)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("way", ["deepcopy", "file"])
def test_a_copy_of_the_state_finds_what_was_awaited_again(walk, tmp_path, way):
    memory = Spectral(interval=OUTSIDE, refresh=2, lag=5)
    again = copy.deepcopy if way == "deepcopy" else partial(reloaded, file=tmp_path / "state.pt")
    assert torch.equal(filtered(memory, walk)[0], filtered(memory, walk, between=again)[0])


def test_parameters_that_change_in_place_do_not_reach_a_spectrum_that_is_awaited(walk):
    """As a training's do: the point of every step lies in the same memory."""
    memory, (_, _, points) = Spectral(interval=OUTSIDE, refresh=2, lag=3), walk
    here = {name: p.clone() for name, p in points[0].items()}
    after = iter([*points[1:], points[0]])

    def move(state):
        for name, p in next(after).items():
            here[name].copy_(p)
        return state

    assert torch.equal(filtered(memory, walk)[0], filtered(memory, walk, [here] * STEPS, move)[0])


def test_nothing_is_kept_of_a_state_that_is_gone(walk):
    state = []
    filtered(Spectral(refresh=1, lag=4), walk, between=lambda each: state.append(each) or each)
    begun = [weakref.ref(each) for each in spectral._begun[state[-1]["awaited"]].values()]
    for each in begun:
        each().result()
    assert begun
    state.clear()
    gc.collect()
    assert all(each() is None for each in begun)


@pytest.mark.parametrize("stop", range(2, 7))
@pytest.mark.everyday("2", "3")
def test_a_run_interrupted_while_a_spectrum_is_awaited_resumes_to_the_same_weights(tmp_path, stop):
    options = {"refresh_spectrum": 2, "spectrum_lag": 3, "interval": OUTSIDE}
    job = Job(task="digits-mlp", method="sma-dp-sgd", options=options, noise_multiplier=1.0, steps=9, reproducible=True)
    task, training = start(job, None)
    list(training)
    _, training = start(job, tmp_path / "run")
    for record in training:
        if record.step == stop:
            break
    training.ledger.close()
    again, training = start(job, tmp_path / "run", resume=True)
    assert training.state.step == stop + 1
    list(training)
    for one, other in zip(task.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_users_loop_and_the_training_use_the_same_spectra_and_a_checkpoint_holds_them(tmp_path):
    method = vestige.sma_dp_sgd(refresh_spectrum=2, spectrum_lag=3, interval=OUTSIDE)
    model, data = make_toy(features=14)
    loop = copy.deepcopy(model)
    common = {"noise_multiplier": 1.0, "reproducible": 5}
    list(vestige.train(model, LOSS, data, method=method, sample_rate=0.25, steps=8, delta=1e-3, lr=0.2, **common))
    engine = vestige.PrivacyEngine(reproducible=5)
    loader = DataLoader(TensorDataset(*data), batch_size=len(data[1]) // 4)
    loop, optimizer, loader = engine.make_private(
        module=loop, optimizer=torch.optim.SGD(loop.parameters(), lr=0.2), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, method=method,
    )  # fmt: skip
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            LOSS(loop(x), y).backward()
            optimizer.step()
    for one, other in zip(model.parameters(), loop.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    engine.save_checkpoint(path=tmp_path / "c.pt", module=loop, optimizer=optimizer)
    memory = torch.load(tmp_path / "c.pt", weights_only=True)["memory"]
    assert torch.equal(memory["awaited"], engine._steps.learner().memory["awaited"])
    assert memory["awaited"].any()


def test_a_stack_uses_the_spectra_of_the_run_alone():
    torch.manual_seed(0)
    data = torch.randn(60, 16), torch.randint(3, (60,))
    runs = [
        StackedRun(models.mlp(16, 3, (14, 12)), vestige.sma_dp_sgd(interval=OUTSIDE, **options), 1.0, 0.4, seed)
        for seed, options in enumerate([{"refresh_spectrum": 2, "spectrum_lag": 3}] * 2 + [{"spectrum_lag": 0}])
    ]
    fresh = [copy.deepcopy(run.model) for run in runs]
    stack = Stack(runs, data, sample_rate=0.25, steps=12, device=torch.device("cpu"))
    list(stack.train())
    for run, model, progress in zip(runs, fresh, stack.progress(), strict=True):
        *_, last = vestige.train(
            model, LOSS, data, method=run.method, sample_rate=0.25, steps=12, delta=1e-3, noise_multiplier=1.0, lr=0.4,
            reproducible=run.seed,
        )  # fmt: skip
        assert progress.diagnostics["exponent"].isfinite().any()
        torch.testing.assert_close(
            progress.diagnostics["exponent"], last.diagnostics["exponent"], rtol=1e-3, atol=0, equal_nan=True
        )
        for one, other in zip(run.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_run_of_an_earlier_version_goes_on_as_it_began(tmp_path):
    """Before 0.3 there was no such option: every step waited for its spectrum."""
    job = Job(task="digits-mlp", method="sma-dp-sgd", options={"spectrum_lag": 0}, noise_multiplier=1.0, steps=3)
    _, training = start(job, tmp_path / "run")
    next(iter(training))
    training.ledger.close()
    request = training.folder.request()
    del request["job"]["options"]["spectrum_lag"]
    del request["public"]["method"]["options"]["spectrum_lag"]
    write_json(tmp_path / "run" / "run.json", request)
    _, again = start(load(training.folder), tmp_path / "run", resume=True)
    list(again)
    assert again.method.memory.lag == 0


def test_a_run_begun_with_one_spectrum_an_epoch_goes_on_with_it(tmp_path):
    """Until 0.3 that was the default of sma-dp-sgd, so that no option of the job said so."""
    before = {"refresh_spectrum": None, "spectrum_lag": 4}
    job = Job(task="digits-mlp", method="sma-dp-sgd", options=dict(before), noise_multiplier=1.0, steps=3)
    _, training = start(job, tmp_path / "run")
    next(iter(training))
    training.ledger.close()
    request = training.folder.request()
    for name in before:
        del request["job"]["options"][name]
    for name in ("shuffled", "clip_per_layer"):
        del request["public"]["method"]["options"][name]
    write_json(tmp_path / "run" / "run.json", request)
    _, again = start(load(training.folder), tmp_path / "run", resume=True)
    list(again)
    assert (again.method.memory.refresh, again.method.memory.lag) == (None, 4)


ENDS = """
    import os, signal, sys, time
    import torch
    from vestige.layout import Layout
    from vestige.optim.spectral import tail_exponent as spectrum
    from vestige.optim.spectral.memory_by_tail_exponent import Spectral
    from vestige.randomness.sum_and_release_types import Release

    solve = spectrum._solved
    spectrum._solved = lambda *given: (time.sleep(SECONDS), solve(*given))[1]
    model = torch.nn.Linear(20, 15)
    layout, point = Layout.of(model), {name: p.detach() for name, p in model.named_parameters()}
    memory = Spectral(refresh=1, lag=2)
    state = memory.init(layout, torch.device("cpu"))

    def step():
        memory.step(Release(torch.randn(layout.size), 1.0, 10.0, 0.25), state, point)
"""


def ended(seconds, code):
    script = textwrap.dedent(ENDS).replace("SECONDS", str(seconds)) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_process_finds_its_own_spectra_and_ctrl_c_ends_one_that_is_awaited():
    done = ended(
        "pause",
        """
        pause = 0.0
        for _ in range(4):
            step()
        child = os.fork()
        for _ in range(4):
            step()
        if not child:
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        pause = 0.5
        for _ in range(3):
            step()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        step()
        """,
    )
    assert done.stdout == "0\n", done.stderr
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_process_finds_its_own_spectra():
    done = ended(
        0.0,
        """
        for _ in range(4):
            step()
        child = os.fork()
        for _ in range(4):
            step()
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    assert done.returncode == 0, done.stderr
