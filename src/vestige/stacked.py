"""How do many runs of one task train at once? Stacked along a leading axis, each with its own sample and noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vestige.clipping import LARGEST_NORM, Flat, Loss
from vestige.layout import Layout
from vestige.memory import Blend, Exponential, Fractional, Identity, Uniform
from vestige.method import Method
from vestige.noise import Randomness, normal
from vestige.probes import Here
from vestige.questions import Question
from vestige.rules import sgd
from vestige.sampling import Poisson, check_rate

KERNELS = (Uniform, Exponential, Fractional)
SLOPES: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.Tanh: lambda output: 1 - output.square(),
    nn.ReLU: lambda output: (output > 0).to(output.dtype),
    nn.Sigmoid: lambda output: output * (1 - output),
}
"""Each activation's derivative, from its output."""
ROUNDING = 1 + 2**-10
"""How much a tf32 product may exceed its operand, each: an example's share of the sum is kept below the clip anyway."""
BLOCK, LARGEST_BLOCK = 16, 1 << 25
"""Steps whose samples are drawn together, so that the host waits for the device once per block; and the most coin flips
that a block may hold."""


@dataclass(frozen=True)
class StackedRun:
    """One run of a stack: everything in which runs may differ. `model` is trained in place."""

    model: nn.Module
    method: Method
    noise_multiplier: float
    lr: float
    seed: int | None = None
    """Makes this run's noise and sampling those of `train(..., reproducible=seed)`: such a run protects nobody."""


@dataclass(frozen=True)
class Progress:
    """What one run has asked, and what may be looked at: all of it from releases and public facts."""

    asked: Counter[Question]
    diagnostics: dict[str, Tensor]


def why_not(model: nn.Module, loss: Loss, method: Method, sampling: str = "poisson") -> str | None:
    """Why a run cannot be stacked, or None if it can."""
    if _chain(model) is None:
        return "the model is not a chain of linear layers and activations"
    if loss is not functional.cross_entropy:
        return "the loss is not cross_entropy"
    if sampling != "poisson":
        return f"sampling is {sampling}"
    # Whatever parts a method may have, all but these must be the neutral ones.
    if replace(method, clip=Flat(), memory=Identity(), rule=sgd()) != Method(name=method.name):
        return f"{method.name} asks or gates in a way of its own"
    if not isinstance(method.clip, Flat):
        return f"{method.name} does not clip whole gradients"
    memory = method.memory
    if not (isinstance(memory, Identity) or (isinstance(memory, Blend) and isinstance(memory.kernel, KERNELS))):
        return f"{method.name} remembers in a way of its own"
    if method.rule.optimizer is not torch.optim.SGD or not set(method.rule.options) <= {"momentum", "weight_decay"}:
        return f"{method.name} moves by {method.rule.name}"
    return None


def footprint(model: nn.Module, method: Method, expected_batch: float) -> int:
    """Bytes that one run of a stack takes, roughly and from above."""
    layout = Layout.of(model)
    layers = _chain(model) or []
    width = sum(layer.linear.in_features + 2 * layer.linear.out_features for layer in layers)
    batch = expected_batch + 8 * expected_batch**0.5 + 8
    return int(4 * (layout.size * (method.memory.copies + 7) + 2 * batch * width))


# --- the network as a chain ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One linear layer, the names of its parameters and what follows it."""

    linear: nn.Linear
    weight: str
    bias: str | None
    activation: nn.Module | None


def _chain(model: nn.Module) -> list[Layer] | None:
    """The model as linear layers, each but the last followed by one known activation; None if it is anything else."""
    if not isinstance(model, nn.Sequential) or not all(p.requires_grad for p in model.parameters()):
        return None
    layers: list[Layer] = []
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            if layers and layers[-1].activation is None:
                return None
            bias = f"{name}.bias" if module.bias is not None else None
            layers.append(Layer(module, f"{name}.weight", bias, None))
        elif type(module) in SLOPES and layers and layers[-1].activation is None:
            layers[-1] = replace(layers[-1], activation=module)
        elif not (isinstance(module, nn.Flatten) and not layers and module.start_dim == 1):
            return None
    return layers if layers and layers[-1].activation is None else None


class Network:
    """The chain for a stack of runs: parameters [runs, size], inputs [runs, batch, width]."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layers, self.layout = _chain(model) or [], layout

    def forward(self, parameters: dict[str, Tensor], inputs: Tensor) -> list[Tensor]:
        """The input of every layer, and the outputs of the last."""
        values = [inputs]
        for layer in self.layers:
            out = _apply(values[-1], parameters[layer.weight])
            if layer.bias is not None:
                out = out + parameters[layer.bias].unsqueeze(-2)
            values.append(layer.activation(out) if layer.activation is not None else out)
        return values

    def backward(self, parameters: dict[str, Tensor], values: list[Tensor], targets: Tensor) -> list[Tensor]:
        """Per-example gradients of cross-entropy with respect to each layer's output before its activation."""
        error = torch.softmax(values[-1], dim=-1)
        error.scatter_add_(-1, targets.unsqueeze(-1), torch.full_like(error[..., :1], -1.0))
        errors = [error]
        for index in range(len(self.layers) - 1, 0, -1):
            slope = SLOPES[type(self.layers[index - 1].activation)]  # type: ignore[index]
            errors.append((errors[-1] @ parameters[self.layers[index].weight]) * slope(values[index]))
        return errors[::-1]

    def norms(self, values: list[Tensor], errors: list[Tensor], input_squares: Tensor) -> Tensor:
        """Norms of the per-example gradients, without forming them: |error|^2 (|input|^2 + 1) layer by layer."""
        total = torch.zeros_like(input_squares)
        for index, (layer, error) in enumerate(zip(self.layers, errors, strict=True)):
            square = input_squares if index == 0 else _square(values[index])
            total += _square(error) * (square + 1 if layer.bias is not None else square)
        return total.sqrt()

    def add_weighted(self, values: list[Tensor], errors: list[Tensor], weights: Tensor, into: Tensor) -> None:
        """The sum of the examples' gradients, each times its weight; a weight of zero silences even a NaN."""
        used = (weights > 0).unsqueeze(-1)
        views = self.layout.views(into)
        for index, (layer, error) in enumerate(zip(self.layers, errors, strict=True)):
            scaled = torch.where(used, error * weights.unsqueeze(-1), 0.0)
            value = values[index] if index == 0 else torch.where(used, values[index], 0.0)
            views[layer.weight].copy_(scaled.transpose(-1, -2) @ value)
            if layer.bias is not None:
                views[layer.bias].copy_(scaled.sum(-2))


def _apply(inputs: Tensor, weight: Tensor) -> Tensor:
    """inputs @ weight^T for every run; inputs that all runs share are multiplied once, by all weights side by side."""
    if inputs.dim() == weight.dim():
        return inputs @ weight.transpose(-1, -2)
    runs, width, _ = weight.shape
    return (inputs @ weight.reshape(runs * width, -1).t()).view(len(inputs), runs, width).transpose(0, 1)


def _square(rows: Tensor) -> Tensor:
    return rows.double().square().sum(-1)


# --- memory over a stack ---------------------------------------------------------------------------------------------


class Remembering:
    """`memory.Blend` over the runs `part` of a stack, which all blend alike. The algebra is that of `Blend.step`."""

    def __init__(self, memory: Blend, part: slice, size: int, noise_norms: Tensor) -> None:
        self.memory, self.part = memory, part
        self.depth, self.count = memory.window - 1, 0
        self.seen: dict[str, Tensor] = {}
        runs, device = part.stop - part.start, noise_norms.device
        self.noise_norms = noise_norms * memory.fresh_share
        self.past = torch.zeros(runs, self.depth, size, device=device)
        self.follows_trend = memory.kernel.smoothing is not None and self.depth > 0
        if self.follows_trend:
            self.squares = torch.zeros(runs, self.depth, dtype=torch.float64, device=device)
            self.trend = torch.zeros(runs, size, device=device)

    def step(self, fresh: Tensor) -> Tensor:
        share, filled = self.memory.share, min(self.count, self.depth)
        blend = fresh * share
        if filled:
            slots = torch.arange(filled, device=fresh.device)
            lags = (self.count - 1 - slots) % self.depth + 1
            trend_norm, distances = self._compare(filled)
            weigh = cast(Callable[..., tuple[Tensor, Tensor]], self.memory.kernel.weigh)
            weights, confidence = weigh(lags.double(), distances, trend_norm, self.noise_norms)
            weights = weights.expand(len(fresh), filled)
            recalled = torch.bmm(weights.to(fresh.dtype).unsqueeze(1), self.past[:, :filled]).squeeze(1)
            blend.add_(recalled, alpha=1 - share)
            self.seen = {"weights": weights[:, torch.argsort(lags)], "effective_depth": (weights * lags).sum(-1)}
            if self.follows_trend:
                self.seen["confidence"] = confidence
        if self.depth:
            self._remember(blend if self.memory.remembers == "blend" else fresh)
        return blend

    def _compare(self, filled: int) -> tuple[Tensor, Tensor]:
        if not self.follows_trend:
            nothing = torch.zeros(len(self.past), dtype=torch.float64, device=self.past.device)
            return nothing, nothing.unsqueeze(1).expand(-1, filled)
        square = torch.linalg.vector_norm(self.trend, dim=-1).double().square()
        products = torch.bmm(self.past[:, :filled], self.trend.unsqueeze(2)).squeeze(2).double()
        distances = (self.squares[:, :filled] - 2 * products + square.unsqueeze(1)).clamp(min=0).sqrt()
        return square.sqrt(), distances

    def _remember(self, kept: Tensor) -> None:
        slot = self.count % self.depth
        self.past[:, slot] = kept
        if self.follows_trend:
            self.squares[:, slot] = torch.linalg.vector_norm(kept, dim=-1).double().square()
            smoothing = self.memory.kernel.smoothing
            assert smoothing is not None
            self.trend.lerp_(kept, smoothing if self.count else 1.0)
        self.count += 1


# --- samples and noise -----------------------------------------------------------------------------------------------


class Draws:
    """Poisson samples and standard normal noise for every run of a stack.

    Runs with a seed meet the very streams they would meet alone. Secret runs share one key, drawn from the operating
    system for this stack alone: their samples and noise are different parts of one stream, so they are independent.
    """

    def __init__(self, seeds: Sequence[int | None], population: int, rate: float, device: torch.device) -> None:
        self.population, self.rate, self.device, self.runs = population, rate, device, len(seeds)
        self._alone = [Randomness.reproducible(seed) for seed in seeds if seed is not None]
        if self._alone and len(self._alone) != len(seeds):
            raise ValueError("seed: give every run of a stack a seed, or none")
        self._secret = Randomness.secret()
        self._generator = torch.Generator(device)
        if device.type != "cpu":
            self._generator.manual_seed(int(self._secret.stream("stack", 0).integers(2**63)))

    def samples(self, first: int, steps: int) -> list[tuple[Tensor, Tensor]]:
        """For each step: indices [runs, widest sample] and which of them are real; every drawn row is there."""
        joined = self._joined(first, steps)
        counts = joined.sum(-1)
        widths = counts.amax(-1).clamp(min=1).tolist()  # the one wait for the device in a block
        step, run, row = joined.nonzero(as_tuple=True)
        starts = counts.flatten().cumsum(0) - counts.flatten()
        place = torch.arange(len(row), device=self.device) - starts[step * self.runs + run]
        padded = torch.zeros(steps, self.runs, max(widths), dtype=torch.long, device=self.device)
        padded[step, run, place] = row
        real = torch.arange(max(widths), device=self.device) < counts.unsqueeze(-1)
        return [(padded[i, :, :width], real[i, :, :width]) for i, width in enumerate(widths)]

    def _joined(self, first: int, steps: int) -> Tensor:
        if self._alone:
            sampling = Poisson(self.rate)
            joined = torch.zeros(steps, self.runs, self.population, dtype=torch.bool)
            for i in range(steps):
                for run, randomness in enumerate(self._alone):
                    joined[i, run, sampling.draw(self.population, first + i, randomness)] = True
            return joined.to(self.device)
        shape = (steps, self.runs, self.population)
        if self.device.type == "cpu":
            return torch.from_numpy(self._secret.stream("sample", first).random(shape) < self.rate)
        # In double precision, so that the inclusion probability is the rate to 53 bits.
        return torch.rand(shape, generator=self._generator, device=self.device, dtype=torch.float64) < self.rate

    def noise(self, step: int, into: Tensor) -> Tensor:
        if self._alone:
            for run, randomness in enumerate(self._alone):
                into[run] = normal(into.shape[-1], randomness.stream("noise", step), self.device)
            return into
        if self.device.type == "cpu":
            # NumPy keeps the tails that torch's CPU generator cuts off (see `noise.normal`).
            self._secret.stream("noise", step).standard_normal(dtype="float32", out=into.numpy())
            return into
        return torch.randn(into.shape, generator=self._generator, device=self.device, out=into)


# --- the stack -------------------------------------------------------------------------------------------------------


class Stack:
    """Runs of one task trained together: same data, same length, same rate; everything else may differ.

    Formal guarantees: each run asks one Poisson-subsampled Gaussian question per step with its own multiplier, as if it
    were alone; `progress()[i].asked` counts them, each before its answer exists.
    """

    def __init__(
        self, runs: Sequence[StackedRun], data: tuple[Tensor, Tensor], *, sample_rate: float, device: torch.device
    ) -> None:
        check_rate(sample_rate)
        if not runs:
            raise ValueError("runs=[] must hold at least one run")
        for run in runs:
            reason = why_not(run.model, functional.cross_entropy, run.method)
            if reason:
                raise ValueError(f"runs: {reason}, so it cannot be stacked; train it alone")
        # Runs that blend alike stand together, so that each kind of memory sees one contiguous part of the stack.
        self._order = sorted(range(len(runs)), key=lambda i: repr(runs[i].method.memory))
        self.runs = [runs[i] for i in self._order]
        self.device, self.sample_rate = device, sample_rate
        self.step = self.asked = 0
        self.layout = Layout.of(runs[0].model)
        self.network = Network(runs[0].model, self.layout)
        self._load_data(data)
        self.expected_batch = sample_rate * self.population
        self.parameters = torch.stack([self.layout.pack(dict(run.model.named_parameters())) for run in self.runs])
        self.parameters = self.parameters.to(device)
        self._per_run()
        self.draws = Draws([run.seed for run in self.runs], self.population, sample_rate, device)
        self.fresh = torch.zeros_like(self.parameters)
        self._noise = torch.zeros_like(self.parameters)
        self.memories = self._memories()
        # Sums in tf32 are faster on a GPU; the slack keeps every example's share within the clip all the same.
        self._fast = device.type == "cuda" and not any(run.seed is not None for run in self.runs)
        self._slack = 1 / ROUNDING**2 if self._fast else 1.0

    def train(self, steps: int) -> Iterator[int]:
        """Yield the number of steps done after each step, until `steps` are done."""
        largest = max(1, min(BLOCK, LARGEST_BLOCK // (len(self.runs) * self.population)))
        while self.step < steps:
            block = min(largest, steps - self.step)
            for rows, real in self.draws.samples(self.step, block):
                with torch.no_grad(), _tf32(self._fast):
                    self._advance(rows, real)
                yield self.step
        self.settle()

    def progress(self) -> list[Progress]:
        """In the order in which the runs were given."""
        shown: list[Progress] = []
        for run in self.runs:
            questions = Here().questions(self.sample_rate, run.noise_multiplier)
            shown.append(Progress(Counter({question: self.asked for question in questions if self.asked}), {}))
        for memory in self.memories:
            seen = {name: values.cpu() for name, values in memory.seen.items()}
            for row, progress in enumerate(shown[memory.part]):
                progress.diagnostics.update({name: values[row] for name, values in seen.items()})
        return [shown[i] for i in self._given()]

    @torch.no_grad()
    def accuracies(self, test: tuple[Tensor, Tensor], chunk: int = 512) -> list[float]:
        """Each run's share of right answers on PUBLIC data, in the order given."""
        views = self.layout.views(self.parameters)
        right = torch.zeros(len(self.runs), dtype=torch.long, device=self.device)
        for inputs, targets in zip(test[0].flatten(1).split(chunk), test[1].split(chunk), strict=True):
            outputs = self.network.forward(views, inputs.to(self.device))[-1]
            right += (outputs.argmax(-1) == targets.to(self.device)).sum(-1)
        shares = (right.double() / len(test[1])).tolist()
        return [shares[i] for i in self._given()]

    @torch.no_grad()
    def settle(self) -> None:
        """Write the parameters back into the runs' models."""
        for run, vector in zip(self.runs, self.parameters, strict=True):
            views = self.layout.views(vector)
            for name, parameter in self.layout.parameters(run.model).items():
                parameter.copy_(views[name])

    def _given(self) -> list[int]:
        return sorted(range(len(self._order)), key=lambda i: self._order[i])

    def _load_data(self, data: tuple[Tensor, Tensor]) -> None:
        inputs, targets = data[0].flatten(1).to(self.device), data[1].to(self.device)
        finite = inputs.isfinite().all(dim=1)
        # An input with NaN or infinity has no usable gradient: it is sampled and counted, and adds exactly zero.
        self.inputs = torch.where(finite.unsqueeze(1), inputs, 0.0)
        self.targets, self.population = targets, len(targets)
        self.input_squares = torch.where(finite, _square(self.inputs), torch.inf)

    def _per_run(self) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=self.device, dtype=torch.float64).unsqueeze(1)

        clips = [cast(Flat, run.method.clip).bound for run in self.runs]
        self._clip = column(clips)
        stds = [run.noise_multiplier * clip for run, clip in zip(self.runs, clips, strict=True)]
        self._std = column(stds).float()
        self._noise_norms = column(stds).squeeze(1) * self.layout.size**0.5
        self._lr = column([run.lr for run in self.runs]).float()
        options = [run.method.rule.options for run in self.runs]
        momentum = [float(each.get("momentum", 0.0)) for each in options]
        decay = [float(each.get("weight_decay", 0.0)) for each in options]
        self._momentum = column(momentum).float() if any(momentum) else None
        self._decay = column(decay).float() if any(decay) else None
        self._velocity = torch.zeros_like(self.parameters) if any(momentum) else None

    def _memories(self) -> list[Remembering]:
        found, start = [], 0
        while start < len(self.runs):
            memory = self.runs[start].method.memory
            stop = start
            while stop < len(self.runs) and self.runs[stop].method.memory == memory:
                stop += 1
            if isinstance(memory, Blend):
                norms = self._noise_norms[start:stop]
                found.append(Remembering(memory, slice(start, stop), self.layout.size, norms))
            start = stop
        return found

    def _advance(self, rows: Tensor, real: Tensor) -> None:
        self.asked += 1  # one question of every run, counted before its answer exists
        self._clipped_sums(rows, real)
        self.fresh.addcmul_(self.draws.noise(self.step, self._noise), self._std)
        direction = self.fresh
        for memory in self.memories:
            direction[memory.part] = memory.step(self.fresh[memory.part])
        self._move(direction)
        self.step += 1

    def _clipped_sums(self, rows: Tensor, real: Tensor) -> None:
        views = self.layout.views(self.parameters)
        values = self.network.forward(views, self.inputs[rows])
        errors = self.network.backward(views, values, self.targets[rows])
        norms = self.network.norms(values, errors, self.input_squares[rows])
        usable = real & (norms < LARGEST_NORM)  # False for NaN and for padding
        weights = torch.where(usable, (self._clip * self._slack / norms).clamp(max=self._slack), 0.0)
        self.network.add_weighted(values, errors, weights.float(), self.fresh)

    def _move(self, direction: Tensor) -> None:
        gradient = direction.mul_(1 / self.expected_batch)
        if self._decay is not None:
            gradient.addcmul_(self.parameters, self._decay)
        if self._velocity is not None:
            assert self._momentum is not None
            gradient = self._velocity.mul_(self._momentum).add_(gradient)
        self.parameters.addcmul_(gradient, self._lr, value=-1)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Allow tf32 products, or forbid them whatever the caller allowed elsewhere: the slack must match."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
