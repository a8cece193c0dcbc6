"""How are per-example gradients of many multilayer perceptrons computed at once? By layer, along a leading axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vestige.layout import Layout
from vestige.mechanism.clipping import Parameters

SLOPES: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.Tanh: lambda output: 1 - output.square(),
    nn.ReLU: lambda output: (output > 0).to(output.dtype),
    nn.Sigmoid: lambda output: output * (1 - output),
}
"""Each activation's derivative, from its output."""


StackedScales = Mapping[str, Tensor] | None
"""The constants of balanced steps, [runs, 1, ...] by the name of the parameter; None where all are 1."""


@dataclass(frozen=True)
class MLPLayer:
    """One linear layer, the names of its parameters and what follows it."""

    linear: nn.Linear
    weight: str
    bias: str | None
    activation: nn.Module | None


def chain(model: nn.Module) -> list[MLPLayer] | None:
    """The model as linear layers, each but the last followed by one known activation; None if it is anything else."""
    if not isinstance(model, nn.Sequential) or not all(p.requires_grad for p in model.parameters()):
        return None
    layers: list[MLPLayer] = []
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            if layers and layers[-1].activation is None:
                return None
            bias = f"{name}.bias" if module.bias is not None else None
            layers.append(MLPLayer(module, f"{name}.weight", bias, None))
        elif type(module) in SLOPES and layers and layers[-1].activation is None:
            layers[-1] = replace(layers[-1], activation=module)
        elif not (isinstance(module, nn.Flatten) and not layers and module.start_dim == 1):
            return None
    return layers if layers and layers[-1].activation is None else None


class MLP:
    """The chain for a stack of runs: parameters [runs, size], inputs [runs, batch, width]."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layers, self.layout = chain(model) or [], layout

    def forward(self, parameters: Parameters, inputs: Tensor) -> list[Tensor]:
        """The input of every layer, and the outputs of the last."""
        values = [inputs]
        for layer in self.layers:
            out = _apply(values[-1], parameters[layer.weight])
            if layer.bias is not None:
                out = out + parameters[layer.bias].unsqueeze(-2)
            values.append(layer.activation(out) if layer.activation is not None else out)
        return values

    def backward(self, parameters: Parameters, values: list[Tensor], targets: Tensor) -> list[Tensor]:
        """Per-example gradients of cross-entropy with respect to each layer's output before its activation."""
        error = torch.softmax(values[-1], dim=-1)
        error.scatter_add_(-1, targets.unsqueeze(-1), torch.full_like(error[..., :1], -1.0))
        errors = [error]
        for index in range(len(self.layers) - 1, 0, -1):
            slope = SLOPES[type(self.layers[index - 1].activation)]  # type: ignore[index]
            errors.append((errors[-1] @ parameters[self.layers[index].weight]) * slope(values[index]))
        return errors[::-1]

    def squares(
        self, values: list[Tensor], errors: list[Tensor], input_squares: Tensor, scales: StackedScales = None
    ) -> Tensor:
        """Squared norms of the per-example gradients by layer, [runs, batch, layers], in float64 and without forming
        them: |error|^2 (|input|^2 + 1), each term times the square of its constant where steps are balanced."""
        found = []
        for index, (layer, error) in enumerate(zip(self.layers, errors, strict=True)):
            inner = input_squares if index == 0 else square(values[index])
            one = 1.0 if scales is None or layer.bias is None else scales[layer.bias].double().square()
            if scales is not None:
                inner = inner * scales[layer.weight].squeeze(-1).double().square()
            found.append(square(error) * (inner + one if layer.bias is not None else inner))
        return torch.stack(found, dim=-1)

    def add_weighted(
        self,
        values: list[Tensor],
        errors: list[Tensor],
        weights: Tensor,
        into: Tensor,
        scales: StackedScales = None,
    ) -> None:
        """The sum of the examples' gradients, each layer times its weight, [runs, batch, layers], and each parameter
        times its constant; a weight of zero silences even a NaN."""
        views = self.layout.views(into)
        for index, (layer, error) in enumerate(zip(self.layers, errors, strict=True)):
            weight = weights[..., index, None]
            used = weight > 0
            scaled = torch.where(used, error * _times(weight, scales, layer.weight), 0.0)
            value = values[index] if index == 0 else torch.where(used, values[index], 0.0)
            views[layer.weight].copy_(scaled.transpose(-1, -2) @ value)
            if layer.bias is not None:
                if scales is not None:
                    scaled = torch.where(used, error * _times(weight, scales, layer.bias), 0.0)
                views[layer.bias].copy_(scaled.sum(-2))

    def owners(self, layout: Layout) -> list[int] | None:
        """The group of each layer; None if a layout's groups split one."""
        group_of = {segment.name: segment.group for segment in layout.segments}
        if any(layer.bias is not None and group_of[layer.bias] != group_of[layer.weight] for layer in self.layers):
            return None
        return [group_of[layer.weight] for layer in self.layers]


def _apply(inputs: Tensor, weight: Tensor) -> Tensor:
    """inputs @ weight^T for every run; inputs that all runs share are multiplied once, by all weights side by side."""
    if inputs.dim() == weight.dim():
        return inputs @ weight.transpose(-1, -2)
    runs, width, _ = weight.shape
    return (inputs @ weight.reshape(runs * width, -1).t()).view(len(inputs), runs, width).transpose(0, 1)


def _times(weights: Tensor, scales: StackedScales, name: str) -> Tensor:
    """Weights, [runs, batch, 1], times a parameter's constant."""
    return weights if scales is None else weights * scales[name].view(-1, 1, 1)


def square(rows: Tensor) -> Tensor:
    return rows.double().square().sum(-1)
