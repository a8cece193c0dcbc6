"""Can this model's uses of its parameters be watched, and does each example stay by itself? Tried on made-up examples.

Nothing here looks at data: shapes and types are the data's, values and weights are made up. What is assumed later is
tried here once: where the examples are in every use, that no example's output moves with the examples beside it, that
nothing in the model keeps something of them, and that the watched gradients are those of ordinary autograd.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vestige.devices import seed_draws, without_tf32
from vestige.engines.per_example.expressions import ANCHOR, Axis, Key, Kind, Observation, Pass
from vestige.engines.per_example.gradients import Gradient, combine
from vestige.engines.per_example.recorded_ways import as_if_recorded, asked
from vestige.engines.per_example.taps import Taps
from vestige.engines.per_example.uses import Misfit
from vestige.engines.rehearsal.calm import Calm, InOrder
from vestige.engines.rehearsal.drawn import LARGEST, LEAST, Drawn, unsaid_draws
from vestige.engines.rehearsal.holdings import Holdings, buffers, current, describe, equal
from vestige.engines.rehearsal.smooth import Smooth
from vestige.engines.rehearsal.way_back import COMPANIES, Moved, moved
from vestige.engines.rehearsal.ways import Vary, Way, variations

Rows = Sequence[Tensor]
"""A batch of made-up examples: every tensor has them on its first axis."""
Run = Callable[[Rows], Tensor]
"""The model on a batch: what each example gets, [examples, ...], as a function of the installed parameters."""
Made = Callable[[int, int], Rows]
"""Made-up examples: how many, and of which seed."""

TOLERANCE = 1e-4
"""How far rounding may move an output in float32, relative to the largest."""
GRADIENT_TOLERANCE = 1e-2
"""How far a watched gradient may be from autograd's: a use that was missed or misread is off by far more."""
COINS, BETWEEN = 6, (0.25, 0.5, 0.75)
"""How often, and for which draws beside the least and the largest, it is tried whether examples are mixed by chance."""
KINKS = 0.1
"""How far one may be where numbers at a kink went another way: it is then looked at without kinks."""
RULE_TOLERANCE = 1e-3
"""How far one may be that a rule of the user's makes: it is the whole of what bounds an example there."""
ROUNDS = 6
MOST_WAYS = 4
"""So many other ways are tried that a model goes by what it is given; one that routes tokens has no end of them."""
BESIDE = (1.0, 1e3, 1e30, torch.inf, -torch.inf, torch.nan)
"""What made-up examples are multiplied by, to stand beside another: none of them may be seen there."""


class Unwatchable(Exception):
    """The model's uses of its parameters cannot be watched; the message says why."""


class WrongRule(ValueError):
    """A rule of the user's for a module gives other gradients than autograd."""


class Unclear(Exception):
    """Made-up examples do not tell: what the model makes of them is not finite."""


class Dependent(ValueError):
    """An example's output depends on the examples beside it, or the model keeps something of them."""


@dataclass(frozen=True)
class Rehearsal:
    """What was found out about a model."""

    kinds: Mapping[Key, Kind | None]
    recorded: Mapping[Key, Kind | None] | None
    """The same where it is told that it is recorded: a model that asks may go another way. None if it must not be."""
    changing: frozenset[str]
    """Buffers and parameters that a forward pass changes, but never by what it is given: caches, counters of steps."""


def rehearsed(taps: Taps, run: Run, made: Made, views: int = 1) -> Rehearsal:
    """Try a model out, where each example is so many rows; raises `Dependent`, `Unwatchable` or `Unclear`."""
    problem: Unclear | None = None
    for seed in (0, 1, 2):
        try:
            with left_as_found(taps.model) as held, warnings.catch_warnings(), torch.enable_grad(), _unrounded(taps):
                warnings.simplefilter("ignore")
                most = Drawn(LARGEST)
                found = _Rehearsing(taps, run, made, seed, held, most).found(views)
                if not most.met:
                    return found
                for number in BETWEEN:
                    _Rehearsing(taps, run, made, seed, held, Drawn(number))._check_independent(made(3, seed))
                return _either(found, _Rehearsing(taps, run, made, seed, held, Drawn(LEAST)).found(views))
        except Unclear as error:
            problem = error
    assert problem is not None
    raise problem


def _either(one: Rehearsal, other: Rehearsal) -> Rehearsal:
    """What is found whichever way a model decides by numbers that it draws on the host."""
    if not _agree(one.kinds, other.kinds):
        raise Unwatchable("the model uses its parameters differently by what it draws")
    recorded = None
    if one.recorded is not None and other.recorded is not None and _agree(one.recorded, other.recorded):
        recorded = {**other.recorded, **one.recorded}
    return Rehearsal({**other.kinds, **one.kinds}, recorded, one.changing | other.changing)


def _agree(one: Mapping[Key, Kind | None], other: Mapping[Key, Kind | None]) -> bool:
    return all(one[key] == other[key] for key in one.keys() & other.keys())


def _on_a_gpu(environment: Mapping[str, Tensor]) -> bool:
    """Where passes are recorded."""
    return any(value.is_cuda for value in environment.values())


class _Rehearsing:
    def __init__(self, taps: Taps, run: Run, made: Made, seed: int, held: Holdings, drawn: Drawn) -> None:
        self.taps, self.model, self.made, self.seed, self.drawn = taps, taps.model, made, seed, drawn
        self._run, self._host_seed = run, seed
        self.environment = _made_up_weights(taps, seed)
        self.weights = {name: value.clone() for name, value in self.environment.items()}
        self.held, self.moving = held, set[str]()
        self._devices = {torch.device("cpu"), *(value.device for value in taps.model.parameters())}
        held_in = {each.dtype for each in (*taps.model.parameters(), *taps.model.buffers()) if each.is_floating_point()}
        self.tolerance = max(TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in held_in))  # frozen bfloat16, say

    def found(self, views: int) -> Rehearsal:
        three = [part.clone() for part in self.made(3, self.seed)]
        self._check_finite(three)
        changing = self._changing(three)
        self._check_independent(three)
        if self._draws_on_the_host(three):  # what it decides by them, it may decide otherwise
            for number in range(1, COINS + 1):
                self._host_seed = self.seed + number
                self._check_independent(three)
            self._host_seed = self.seed
        kinds = self._kinds(three)
        self._check_gradients(three, kinds)
        self._check_independent_gradients(three, kinds)
        if views > 1:  # two tell whether views add up: (a, b), (c, c), (b, a)
            self._check_gradients([torch.cat([part, part.flip(0)]) for part in three], kinds, views=2)
        if self.taps.ruled:
            self._check_rules(three, kinds)
        kinds = {**kinds, **self._unmasked(three, kinds)}
        self._check_other_ways(three, kinds)
        recorded = self._as_recorded(three, kinds) if _on_a_gpu(self.environment) else kinds
        return Rehearsal(kinds, recorded, changing)

    def _check_rules(self, three: Rows, kinds: Mapping[Key, Kind | None]) -> None:
        """A rule may have forgotten what numbers between 0 and 1 do not show."""
        either_sign = [4 * part - 2 if part.is_floating_point() else part for part in three]
        with torch.no_grad():
            finite = bool(self.plainly(either_sign).isfinite().all())
        if finite:
            self._check_gradients(either_sign, kinds)

    def _unmasked(self, three: Rows, kinds: Mapping[Key, Kind | None]) -> dict[Key, Kind | None]:
        """Uses that are met only where every whole number is a one, as in a mask that hides nothing."""
        ones = [part if part.is_floating_point() else torch.ones_like(part) for part in three]
        return {} if all(one is part for one, part in zip(ones, three, strict=True)) else self._met_besides(ones, kinds)

    def _met_besides(self, rows: Rows, kinds: Mapping[Key, Kind | None]) -> dict[Key, Kind | None]:
        """Uses that are met here, and were not before."""
        try:
            if self._watched(rows, kinds, None)[1].keys() <= kinds.keys():
                return {}
            found = {**self._kinds(rows), **kinds}
            self._check_gradients(rows, found)
        except WrongRule:
            raise
        except Exception:
            return {}  # a model may refuse such numbers; what was not met here is a doubt later
        return {key: kind for key, kind in found.items() if key not in kinds}

    def _check_other_ways(self, three: Rows, kinds: Mapping[Key, Kind | None]) -> None:
        """By what it is given a model may go another way (`ways`). Beside examples that go it too, or beside which it
        is gone, each example stays by itself."""
        met, made = [self._way(three, kinds)], self.made
        for vary in variations(three):
            rows = vary(three)
            try:
                way = self._way(rows, kinds)
                if way is None or way in met:
                    continue
                met.append(way)
                self._check_independent(rows, BESIDE[:1])
                self.made = partial(_varied, made, vary)
                self._check_independent(three, BESIDE[:1])
                self._check_independent(rows)
                self._check_independent_gradients(three, kinds, companies=1)
                self._check_independent_gradients(rows, kinds)
                self.made = made
                self._check_independent_gradients(rows, kinds, companies=1)
            except Dependent:
                raise
            except Exception:
                continue  # a model may refuse such numbers; a use that was not met before is a doubt later
            finally:
                self.made = made
            if len(met) > MOST_WAYS:
                return

    def _way(self, rows: Rows, kinds: Mapping[Key, Kind | None]) -> list[Any] | None:
        """What a pass runs, forward and back; None if it ends in what is not finite."""
        with Way() as way:
            outputs = self._watched(rows, kinds, _weights_like, observing=False, usual=True)[0]
        return way.steps if bool(outputs.isfinite().all()) else None

    def _as_recorded(self, three: Rows, kinds: Mapping[Key, Kind | None]) -> Mapping[Key, Kind | None] | None:
        """The uses of a pass that is told that it is recorded: others, or the same ones with the examples elsewhere.
        None if it goes a way that does not keep the examples apart, or ends elsewhere."""
        try:
            with Calm(), torch.no_grad():
                usual = self.plainly(three)
            with as_if_recorded():
                with Calm(), torch.no_grad():
                    told = self.plainly(three)
                if not asked():
                    return kinds
                if not bool(((told - usual).abs() <= 10 * self.tolerance * usual.abs().max().clamp(min=1e-6)).all()):
                    return None
                self._check_independent(three)
                found = self._kinds(three)
                self._check_gradients(three, found)
                self._check_independent_gradients(three, found)
        except WrongRule:
            raise
        except Exception:
            return None
        return {**kinds, **found}

    # --- running ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _again(self) -> Iterator[None]:
        """With the same random numbers, buffers and parameters as every time."""
        self.held.restore(self.moving | buffers(self.model))
        for name, value in self.environment.items():
            if not equal(value.detach(), self.weights[name]):
                value.data.copy_(self.weights[name])
        for device in self._devices:
            seed_draws(device, self.seed)
        random.seed(self._host_seed)
        np.random.seed(self._host_seed)  # noqa: NPY002
        with self.drawn:
            yield

    def plainly(self, rows: Rows) -> Tensor:
        """The outputs, [examples, width], without watching."""
        with self._again(), self.taps.installed(self.environment):
            return _flat(self._run(rows), len(rows[0]))

    def _watched(
        self,
        rows: Rows,
        kinds: Mapping[Key, Kind | None],
        weights: Tensor | Callable[[Tensor], Tensor] | None,
        observing: bool = True,
        views: int = 1,
        usual: bool = False,
    ) -> tuple[Tensor, dict[Key, Observation], dict[str, list[Gradient]], Pass]:
        uses: dict[str, list[Gradient]] = {}

        def deliver(found: Mapping[str, Gradient]) -> None:
            for name, gradient in found.items():
                uses.setdefault(name, []).append(gradient)

        observed: dict[Key, Observation] | None = {} if observing else None
        examples = len(rows[0]) // views
        now = Pass(examples, self.environment, kinds, deliver, observed, views=views, usual=usual)
        with self._again(), self.taps.watching(now):
            try:
                outputs = _flat(self._run(rows), len(rows[0]))
                now.going_back = True
                if weights is not None and outputs.requires_grad:
                    back = weights if isinstance(weights, Tensor) else weights(outputs.detach())
                    torch.autograd.grad(outputs, [ANCHOR], back, allow_unused=True)
            except (Misfit, TypeError, RuntimeError, NotImplementedError) as problem:
                raise Unwatchable(first_line(problem)) from problem
        return outputs.detach(), now.observed or {}, uses, now

    # --- what is tried ------------------------------------------------------------------------------------------------

    def _check_finite(self, three: Rows) -> None:
        with torch.no_grad():
            outputs = self.plainly(three)
        self.moving = self.held.changed()
        if len(outputs) != 3:
            raise Dependent(f"the model made {len(outputs)} rows of 3 examples: each example must be one row")
        if not bool(outputs.isfinite().all()):
            raise Unclear("what the model makes of made-up examples is not finite")

    def _changing(self, three: Rows) -> frozenset[str]:
        """What a pass changes in the model; refused where the change depends on what the pass was given."""
        with torch.no_grad():
            self.plainly(three)
            first = self._movable()
            for other in (self.made(3, self.seed + 10), [part[:2] for part in three]):
                self.plainly(other)
                now = self._movable()
                for name in sorted(first.keys() | now.keys()):
                    if name not in first or name not in now or not equal(now[name], first[name]):
                        raise Dependent(
                            f"{describe(self.model, name)} is changed by the forward pass, by what the pass is given: "
                            "it would hold something of the examples without noise. Keep it out of the model, or do "
                            "not change it while training"
                        )
        return frozenset(self.moving)

    def _movable(self) -> dict[str, Tensor]:
        """Copies of what a pass may have changed: buffers, parameters that one did change, and made-up weights."""
        own = {name: value.detach().clone() for name, value in self.environment.items()}
        return {**current(self.model, self.moving | buffers(self.model)), **own}

    def _check_independent(self, three: Rows, factors: Sequence[float] = BESIDE) -> None:
        """The middle example's output, with other examples beside it, so many times, and, beside all, with fewer."""
        with torch.no_grad():
            alone = self.plainly(three)
            allowed = self.tolerance * float(alone.abs().max().clamp(min=1e-6))
            for place, how in enumerate(factors):
                others = self.made(3, self.seed + 20 + place)
                changed = [_beside(part, other, how) for part, other in zip(three, others, strict=True)]
                try:
                    now = self.plainly(changed)[1]
                except Exception:
                    continue  # a model may refuse such numbers
                if not bool(((now - alone[1]).abs() <= allowed).all()):
                    raise Dependent(
                        "an example's output changes with the examples beside it, so no example's influence can be "
                        "bounded: compute each example's output from that example alone"
                    )
            if len(factors) < len(BESIDE):
                return
            with Calm():
                calm = self.plainly(three)
                again = self.plainly(three)
                fewer = self.plainly([part[:2] for part in three])
                drawn = self._draws_on_the_host(three)
                turned = self.plainly([part.roll(1, 0) for part in three])
            steady = bool(((again - calm).abs() <= allowed).all())
            if steady and not bool(((fewer - calm[:2]).abs() <= allowed).all()):
                raise Dependent(
                    "an example's output changes with the number of examples beside it, so no example's influence can "
                    "be bounded: compute each example's output from that example alone"
                )
            if steady and not drawn and not bool(((turned - calm.roll(1, 0)).abs() <= allowed).all()):
                raise Dependent(
                    "an example's output changes with its place in the batch, which others decide: compute each "
                    "example's output from that example alone"
                )

    def _check_independent_gradients(
        self, three: Rows, kinds: Mapping[Key, Kind | None], companies: int = len(COMPANIES)
    ) -> None:
        """The middle example's gradients, with other examples beside it (`way_back`)."""
        found = self._moved(three, kinds, companies)
        if found.name is not None and found.slight:  # numbers at a kink may go another way
            with Smooth():
                found = self._moved(three, kinds, companies)
        if found.name is not None:
            raise Dependent(
                f"an example's gradient of {found.name!r} changes with the examples beside it, so no example's "
                "influence can be bounded: compute each example's backward pass from that example alone"
            )

    def _moved(self, three: Rows, kinds: Mapping[Key, Kind | None], companies: int) -> Moved:
        def gradients(rows: Rows, signals: Tensor, place: int) -> Mapping[str, Tensor]:
            _, _, uses, now = self._watched(rows, kinds, signals, observing=False, usual=True)
            if now.doubt is not None:
                raise Unwatchable(now.doubt)  # by what it is given, a model may use parameters in another way
            with torch.no_grad():
                return {name: combine(parts).dense()[place].clone() for name, parts in uses.items()}

        others = [self.made(3, self.seed + 30 + place) for place in range(companies)]
        signals, drawn = _weights_like(self.plainly(three).detach()), self._draws_on_the_host(three)
        return moved(gradients, three, others, signals, drawn, max(GRADIENT_TOLERANCE, self.tolerance), KINKS)

    def _draws_on_the_host(self, rows: Rows) -> bool:
        """Whether a pass draws by Python's generator or NumPy's: then each place has numbers of its own."""
        with self._again():
            before = unsaid_draws()
            with self.taps.installed(self.environment):
                self._run(rows)
            return before != unsaid_draws()

    def _kinds(self, three: Rows) -> dict[Key, Kind | None]:
        """Where the examples are in every use, found by their number and by whom a gradient reaches."""
        kinds: dict[Key, Kind | None] = {}
        two = [part[:2] for part in three]
        for _ in range(ROUNDS):
            seen = [self._watched(rows, kinds, None)[1] for rows in (two, three)]
            if seen[0].keys() != seen[1].keys():
                raise Unwatchable("the model uses its parameters differently for 2 and for 3 examples")
            new = {key: _grown(key, seen[0][key], seen[1][key]) for key in seen[0]}
            if new == kinds:
                break
            kinds = new
        else:
            raise Unwatchable("the model's uses of its parameters keep changing")
        only_middle = torch.zeros_like(self.plainly(three).detach())
        only_middle[1] = _weights_like(only_middle[1])
        observed = self._watched(three, kinds, only_middle)[1]
        found = {key: kind and _located(key, kind, observed[key]) for key, kind in kinds.items()}
        return {**found, **_further(found)}

    def _check_gradients(self, rows: Rows, kinds: Mapping[Key, Kind | None], views: int = 1) -> None:
        """Watched gradients against ordinary autograd's, example by example. What may differ without a fault, numbers
        that are drawn for another layout and what is rounded at a kink, is taken out where they do."""
        problem: Exception | None = None
        for order in ((), (InOrder,)):
            problem, slight = self._difference(rows, kinds, views, order)
            if problem is None:
                return
            if slight and not isinstance(problem, WrongRule):  # a user's rule is the whole of what bounds an example
                problem, _ = self._difference(rows, kinds, views, (*order, Smooth))
                if problem is None:
                    return
        assert problem is not None
        raise problem

    def _difference(
        self, rows: Rows, kinds: Mapping[Key, Kind | None], views: int, modes: Sequence[Any]
    ) -> tuple[Exception | None, bool]:
        """What speaks against the watched gradients, under such modes, and whether it is slight: a few numbers that
        went another way at a kink."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.environment.items()}
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            with self._again(), self.taps.installed(leaves):
                plain = _flat(self._run(rows), len(rows[0]))
                weights = _weights_like(plain.detach())
                wanted = _one_at_a_time(plain, weights, leaves)  # in here: activations may be recomputed
            outputs, _, uses, now = self._watched(rows, kinds, weights, observing=False, views=views)
        if now.doubt is not None:
            raise Unwatchable(now.doubt)
        if not bool(((outputs - plain).abs() <= 10 * self.tolerance * plain.abs().max().clamp(min=1e-6)).all()):
            return Unwatchable("the model's outputs change when its parameters are watched"), False
        with torch.no_grad():
            found = {name: combine(parts).dense() for name, parts in uses.items()}
        sizes = [torch.stack([gradient.square().sum() for gradient in each.values()]).sum().sqrt() for each in wanted]
        problem: Exception | None = None
        slight = True
        for name in leaves:
            want = torch.stack([each[name].reshape(-1) for each in wanted]).unflatten(0, (-1, views)).sum(dim=1)
            got = found[name].reshape(want.shape).to(want.dtype) if name in found else torch.zeros_like(want)
            off, size = torch.linalg.vector_norm(got - want, dim=1), torch.linalg.vector_norm(want, dim=1)
            allowed = max(RULE_TOLERANCE if name in self.taps.ruled else GRADIENT_TOLERANCE, self.tolerance)
            least = 1e-5 * torch.stack(sizes).max()
            slight = slight and bool((off <= KINKS * size + 10 * least).all())
            if problem is None and not bool((off <= allowed * size + least).all()):
                problem = self._wrong(name)
        return problem, slight

    def _wrong(self, name: str) -> Exception:
        if name in self.taps.ruled:
            return WrongRule(
                f"the rule for {self.taps.ruled[name]} gives another gradient of {name!r} than autograd does: "
                "correct it, or leave it out"
            )
        return Unwatchable(
            f"parameter {name!r} is used where that cannot be watched (of activation checkpointing, the form "
            "with use_reentrant=False can be), or gradients of several examples are mixed on their way to it"
        )


def _varied(made: Made, vary: Vary, size: int, seed: int) -> Rows:
    return vary(made(size, seed))


def _grown(key: Key, two: Observation, three: Observation) -> Kind | None:
    """A use as its shapes tell: where a size is two for two examples and three for three, or multiples of that."""
    outputs = [_growing(a, b) for a, b in zip(two.outputs, three.outputs, strict=True)]
    operands = [_growing(a, b) for a, b in zip(two.operands, three.operands, strict=True)]
    if not any(outputs):
        return None
    if not all(outputs):
        raise Unwatchable(f"{key[0]} of {', '.join(key[1])} has examples in some of its outputs only")
    rows = tuple(shape[axes[0]] // 3 for shape, axes in zip(three.outputs, outputs, strict=True))
    places = tuple(Axis(axes[0]) if axes else None for axes in operands)
    return Kind(tuple(Axis(axes[0]) for axes in outputs), places, rows)


def _growing(two: tuple[int, ...], three: tuple[int, ...]) -> list[int]:
    if len(two) != len(three):
        raise Unwatchable(f"a tensor of shape {two} for 2 examples has shape {three} for 3")
    changed = [place for place, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if any(3 * two[place] != 2 * three[place] for place in changed):
        raise Unwatchable(f"a tensor of shape {two} for 2 examples has shape {three} for 3")
    return changed


def _located(key: Key, kind: Kind, seen: Observation) -> Kind:
    """The kind with the order of examples and positions, from a gradient that only the middle example may have."""
    outputs = []
    signals: Sequence[Tensor | None] = seen.signals or [None] * len(kind.outputs)
    for axis, signal in zip(kind.outputs, signals, strict=True):
        unshared = signal is None or signal.shape[axis.place] == 3
        choices = [axis] if unshared else [axis, Axis(axis.place, minor=True)]
        chosen = next((each for each in choices if signal is None or each.confined(signal, 3, 1)), None)
        if chosen is None:
            raise Unwatchable(
                f"in {key[0]} of {', '.join(key[1])} the examples cannot be told apart, there or on the way back"
            )
        outputs.append(chosen)
    minor = outputs[0].minor
    operands = tuple(None if each is None else Axis(each.place, minor) for each in kind.operands)
    return Kind(tuple(outputs), operands, kind.rows)


def _further(kinds: Mapping[Key, Kind | None]) -> dict[Key, Kind | None]:
    """What a further use of the same function and parameters is, where those that are known are all alike."""
    alike: dict[tuple[str, tuple[str, ...]], set[Kind | None]] = {}
    for (function, names, _), kind in kinds.items():
        alike.setdefault((function, names), set()).add(kind)
    single = {use: next(iter(known)) for use, known in alike.items() if len(known) == 1}
    return {(*use, -1): kind and replace(kind, rows=()) for use, kind in single.items()}


def _one_at_a_time(outputs: Tensor, weights: Tensor, leaves: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    rows = []
    for output, weight in zip(outputs, weights, strict=True):
        if not output.requires_grad:
            found: Sequence[Any] = [None] * len(leaves)
        else:
            found = torch.autograd.grad(output, list(leaves.values()), weight, retain_graph=True, allow_unused=True)
        rows.append(
            {
                n: torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
                for (n, p), g in zip(leaves.items(), found, strict=True)
            }
        )
    return rows


# --- made up ----------------------------------------------------------------------------------------------------------


def _made_up_weights(taps: Taps, seed: int) -> dict[str, Tensor]:
    """The parameters with random numbers of their own size added: one that is zero would hide what depends on it."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, parameter in taps.layout.parameters(taps.model).items():
        value = parameter.detach()
        spread = float(value.square().mean().sqrt()) or 0.1
        noise = torch.randn(value.shape, generator=random).to(value.device, value.dtype)
        made[name] = value + 0.3 * min(spread, 1.0) * noise
    return made


def made_up(
    blank: Sequence[Tensor],
    size: int,
    seed: int,
    device: torch.device,
    raised: Sequence[int] = (),
    ending: int | None = None,
) -> list[Tensor]:
    """Examples of these shapes and types: numbers between 0 and 1, and zeros and ones, which are tokens, classes,
    indices and masks in every range; in the `raised` places ones and twos, which are lengths. Four in a row, which may
    be corners of boxes, are in order. With an `ending`, the first sequences end with that token, and have it nowhere
    else."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for place, part in enumerate(blank):
        shape = (size, *part.shape[1:])
        if part.is_floating_point():
            rows.append(torch.rand(shape, generator=random).to(device, torch.promote_types(part.dtype, torch.float32)))
            continue
        drawn = torch.randint(2, shape, generator=random) + (place in raised)
        if len(shape) == 3 and shape[2] == 4:
            drawn = drawn.sort(dim=2).values
        elif ending is not None and len(shape) == 2 and shape[1]:
            drawn += ending + 1
            drawn[:, -1] = ending
            ending = None
        rows.append(drawn.to(device, part.dtype))
    return rows


def single_axes(batch: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which axes behind the examples' have a single place. A rehearsal holds for batches of other lengths, but not of
    other such axes: where an example has one position, examples and positions in one axis cannot be told apart."""
    return tuple(size == 1 for part in batch for size in part.shape[1:])


def raisings(blank: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Which whole numbers to raise, until a model takes them: none, one of the tensors, all."""
    whole = [place for place, part in enumerate(blank) if not (part.is_floating_point() or part.dtype == torch.bool)]
    return list(dict.fromkeys([(), *((place,) for place in whole), tuple(whole)]))


def endings(model: nn.Module) -> tuple[int | None, ...]:
    """Tokens that sequences may have to end with: none, or the one that a model of transformers names, if it is one of
    its vocabulary, which that of a configuration in parts need not be."""
    config = getattr(model, "config", None)
    named, known = getattr(config, "eos_token_id", None), getattr(config, "vocab_size", None)
    return (None, named) if type(named) is int and not (type(known) is int and named >= known) else (None,)


def _weights_like(outputs: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(7)
    return (0.5 + torch.rand(outputs.shape, generator=random)).to(outputs.device, outputs.dtype)


def _beside(part: Tensor, other: Tensor, how: float) -> Tensor:
    """The middle example of one batch between examples of another, scaled by `how`."""
    changed = part.clone()
    beside = other[[0, 2]]
    changed[[0, 2]] = beside * how if part.is_floating_point() else beside
    return changed


@contextmanager
def _unrounded(taps: Taps) -> Iterator[None]:
    """Without autocast and TF32: what is tried out here must not be lost in rounding."""
    device = next(iter(taps.layout.parameters(taps.model).values())).device
    with torch.autocast(device.type, enabled=False), without_tf32():
        yield


@contextmanager
def left_as_found(model: nn.Module, buffers_only: bool = False) -> Iterator[Holdings]:
    """Nothing is spent on made-up examples: no random number, no buffer, no parameter, no count of passes;
    `buffers_only` where a pass is known not to change parameters."""
    held = Holdings(model, buffers_only)
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices):
            yield held
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        held.restore(held.changed())
        held.restore_counts()


def _flat(outputs: Tensor, examples: int) -> Tensor:
    return outputs.reshape(len(outputs), -1) if len(outputs) else outputs.reshape(0, 1)


def first_line(problem: BaseException) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]
