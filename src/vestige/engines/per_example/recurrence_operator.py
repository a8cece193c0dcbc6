"""How does a recurrent layer run over time? One operator for all steps, and one for its backward pass.

Following each step's operators one by one costs a hundred times what they compute. Here the tracker sees two operators
with one rule (`example_axis.rules.recurrence`): row b of whatever they give depends on row b of the sequence, of the
initial state and of the mask, and on weights. The backward pass gives the gradient of each step's gates, so that the
recurrent weights are those of a linear map over the states of all steps.

Both directions of a layer run in the same loop: tensors are [steps, directions, rows, width], the second direction
reversed in time; states are [directions, rows, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vestige.engines.per_example.execution import full_precision, unseen
from vestige.fused.operators import operator

State = tuple[Tensor, ...]
"""The hidden state; of an LSTM, its cells too."""


def recurrence(
    mode: str,
    entering: Sequence[Tensor],
    state: State | None,
    recurrent: Sequence[tuple[Tensor, Tensor | None]],
    projections: Sequence[Tensor],
    going: Tensor | None,
) -> tuple[list[Tensor], State]:
    """One layer, of torch's `mode`: its outputs [rows, steps, width], one for each direction, and its last state.

    `entering` is what the sequence adds to the gates, [rows, steps, gates]; `recurrent` are weight and bias of the
    hidden state, `projections` an LSTM's own, all for each direction. Where `going` [rows, steps, 1] is False, a
    sequence has ended: the state stays.
    """
    inputs = _in_time(entering)
    mask = None if going is None else _in_time([going] * len(entering))
    weights, biases = [own for own, _ in recurrent], [shift for _, shift in recurrent if shift is not None]
    found, *last = in_loop(mode, inputs, state or (), weights, projections, biases, mask)
    outputs, *others = found.unbind(1)
    both = [each.transpose(0, 1) for each in (outputs, *(one.flip(0) for one in others))]
    return both, (found[-1], *last)


def in_loop(
    mode: str,
    inputs: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    projections: Sequence[Tensor],
    biases: Sequence[Tensor],
    mask: Tensor | None,
) -> tuple[Tensor, ...]:
    """All states, in the layout of the loop; of an LSTM also the last cells."""
    hidden, cells, *_ = (*(part.to(inputs.dtype) for part in state), None, None)
    found: tuple[Tensor, ...] = _Recurrence.apply(
        mode, inputs, hidden, cells, mask, len(biases), *weights, *projections, *biases
    )
    return found


def _in_time(parts: Sequence[Tensor]) -> Tensor:
    """[rows, steps, width] of each direction in the layout of the loop."""
    first, *others = (part.transpose(0, 1) for part in parts)
    return torch.stack([first, *(part.flip(0) for part in others)], dim=1)


class _Recurrence(torch.autograd.Function):
    """The states that the loop gave, and its backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        mode: str,
        inputs: Tensor,
        hidden: Tensor | None,
        cells: Tensor | None,
        mask: Tensor | None,
        biases: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """`parameters` are weights, projections and biases, of each direction."""
        directions = inputs.shape[1]
        parts = [parameters[start : start + directions] for start in range(0, len(parameters), directions)]
        stacked = [torch.stack(part).to(inputs.dtype) for part in parts]
        bias = stacked.pop() if biases else None
        weight, projection = stacked[0], stacked[1] if len(stacked) > 1 else None
        saved = torch.ops.vestige.recurrence(mode, inputs, hidden, cells, weight, bias, projection, mask)
        ctx.mode, ctx.biases = mode, biases
        ctx.save_for_backward(weight, projection, mask, *saved)
        ctx.set_materialize_grads(False)
        states = saved[0][1:]
        return (states, saved[1][-1]) if mode == "LSTM" else (states,)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, signal: Tensor | None, last: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        weight, projection, mask, *saved = ctx.saved_tensors
        if signal is None:
            signal = torch.zeros_like(saved[0][1:])
        found = torch.ops.vestige.recurrence_backward(ctx.mode, signal, last, weight, projection, mask, saved)
        gates, hidden = found[1:3] if ctx.mode == "GRU" else found[:2]
        cells = found[2] if ctx.mode == "LSTM" else None
        maps = [(gates, saved[0][:-1])]
        if projection is not None:
            shown = saved[1][1:].tanh()
            maps.append((found[3], saved[2][..., -shown.shape[-1] :] * shown))
        places = iter(ctx.needs_input_grad[6:])
        back = [
            _of_linear(made[:, direction], given[:, direction]) if next(places) else None
            for made, given in maps
            for direction in range(gates.shape[1])
        ]
        back += [gates[:, direction].sum((0, 1)) if next(places) else None for direction in range(ctx.biases)]
        back = [None, found[0], hidden, cells, None, None, *back]
        return tuple(each if wanted else None for each, wanted in zip(back, ctx.needs_input_grad, strict=True))


def _of_linear(signal: Tensor, input: Tensor) -> Tensor:
    """The gradient of the weight of a linear map, over [steps, rows, width]."""
    return signal.flatten(0, 1).t() @ input.flatten(0, 1)


# --- forward ----------------------------------------------------------------------------------------------------------


@operator(
    "recurrence(str mode, Tensor entering, Tensor? hidden, Tensor? cells, Tensor weight, Tensor? bias, "
    "Tensor? projection, Tensor? going) -> Tensor[]"
)
def _forward(
    mode: str,
    entering: Tensor,
    hidden: Tensor | None,
    cells: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    going: Tensor | None,
) -> list[Tensor]:
    """States before the first step and after each; and what the backward pass needs of the gates."""
    steps, *rows, width = entering.shape
    with unseen(), torch.no_grad(), full_precision(entering):
        states = _states(entering, hidden, weight.shape[2])
        keep = None if going is None else _of_shape(going, (steps, *rows, 1)).unbind(0)
        shift = entering.new_zeros(1) if bias is None else bias[:, None]
        if mode == "LSTM":
            memory = _states(entering, cells, width // 4)
            gates, candidates = _added(entering, shift), entering.new_empty(steps, *rows, width // 4)
            _lstm(states, memory, gates, candidates, weight.mT, projection, keep)
            return [states, memory, gates, candidates]
        if mode == "GRU":
            inside, gates = entering.new_empty(steps, *rows, width), entering.new_empty(steps, *rows, width)
            _gru(states, entering, gates, inside, weight.mT, shift.expand(len(weight), 1, width), keep)
            return [states, gates, inside]
        _rnn(mode, states, _added(entering, shift), weight.mT, keep)
        return [states]


def _states(entering: Tensor, first: Tensor | None, width: int) -> Tensor:
    steps, *rows, _ = entering.shape
    made = entering.new_zeros(steps + 1, *rows, width)
    if first is not None:
        made[0] = _of_shape(first, (*rows, width))
    return made


def _of_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Nothing is broadcast: one example's row would be spread over the others."""
    if tuple(tensor.shape) != shape:
        raise RuntimeError(f"a recurrent layer is given {tuple(tensor.shape)} where {shape} is expected")
    return tensor


def _added(entering: Tensor, shift: Tensor) -> Tensor:
    return torch.add(entering, shift, out=entering.new_empty(entering.shape))


def _lstm(
    states: Tensor,
    memory: Tensor,
    gates: Tensor,
    candidates: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    keep: Sequence[Tensor] | None,
) -> None:
    """Gates are enter, forget, candidate, leave, as torch has them; the third is left aside once it is a candidate."""
    hidden, cells, parts = states.unbind(0), memory.unbind(0), gates.unflatten(-1, (4, -1))
    enter, forget, candidate, leave = (parts[..., place, :].unbind(0) for place in range(4))
    for step, (gate, new) in enumerate(zip(gates.unbind(0), candidates.unbind(0), strict=True)):
        gate.baddbmm_(hidden[step], weight)
        torch.tanh(candidate[step], out=new)
        gate.sigmoid_()
        cell, after = cells[step + 1], hidden[step + 1]
        torch.mul(forget[step], cells[step], out=cell).addcmul_(enter[step], new)
        if projection is None:
            torch.mul(leave[step], cell.tanh(), out=after)
        else:
            torch.bmm(leave[step] * cell.tanh(), projection.mT, out=after)
        if keep is not None:
            torch.where(keep[step], cell, cells[step], out=cell)
            torch.where(keep[step], after, hidden[step], out=after)


def _gru(
    states: Tensor,
    entering: Tensor,
    gates: Tensor,
    inside: Tensor,
    weight: Tensor,
    shift: Tensor,
    keep: Sequence[Tensor] | None,
) -> None:
    """Gates are reset, update, candidate; `inside` is what the hidden state adds to them."""
    hidden, width = states.unbind(0), states.shape[-1]
    first = [each[..., : 2 * width].unbind(0) for each in (entering, gates, inside)]
    last = [each[..., 2 * width :].unbind(0) for each in (entering, gates, inside)]
    reset, update = (gates[..., place * width : (place + 1) * width].unbind(0) for place in range(2))
    for step, own in enumerate(inside.unbind(0)):
        torch.baddbmm(shift, hidden[step], weight, out=own)
        torch.add(first[0][step], first[2][step], out=first[1][step]).sigmoid_()
        new, after = last[1][step], hidden[step + 1]
        torch.addcmul(last[0][step], reset[step], last[2][step], out=new).tanh_()
        torch.lerp(new, hidden[step], update[step], out=after)
        if keep is not None:
            torch.where(keep[step], after, hidden[step], out=after)


def _rnn(mode: str, states: Tensor, gates: Tensor, weight: Tensor, keep: Sequence[Tensor] | None) -> None:
    hidden, bounded = states.unbind(0), torch.tanh if mode == "RNN_TANH" else torch.relu
    for step, gate in enumerate(gates.unbind(0)):
        after = bounded(gate.baddbmm_(hidden[step], weight))
        hidden[step + 1].copy_(after if keep is None else torch.where(keep[step], after, hidden[step]))


# --- backward ---------------------------------------------------------------------------------------------------------


@operator(
    "recurrence_backward(str mode, Tensor signal, Tensor? last, Tensor weight, Tensor? projection, Tensor? going, "
    "Tensor[] saved) -> Tensor[]"
)
def _backward(
    mode: str,
    signal: Tensor,
    last: Tensor | None,
    weight: Tensor,
    projection: Tensor | None,
    going: Tensor | None,
    saved: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of what enters, of the recurrent map's output where that is another one (GRU), of the first state, of
    the first cells and of projected states (LSTM); from those of all states, and of the last cells.

    Derivatives of a step by its gates are numbers in the same place: they are made for all steps at once, and the loop
    multiplies by them.
    """
    with unseen(), torch.no_grad(), full_precision(signal):
        _of_shape(signal, (len(saved[0]) - 1, *saved[0].shape[1:]))
        ended = None if going is None else ~going
        if mode == "LSTM":
            return _lstm_backward(signal, last, weight, projection, ended, saved)
        if mode == "GRU":
            return _gru_backward(signal, weight, ended, saved)
        after = saved[0][1:]
        factor = 1 - after * after if mode == "RNN_TANH" else (after > 0).to(after.dtype)
        kept = None if ended is None else ended.to(signal.dtype)
        _, gates, hidden = _loop(signal, weight, _zero(factor, ended).unsqueeze(-2), kept)
        return [gates, hidden]


def _zero(tensor: Tensor, where: Tensor | None) -> Tensor:
    return tensor if where is None else tensor.masked_fill(where, 0.0)


def _loop(signal: Tensor, weight: Tensor, factors: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of all states, of all gates (`factors` times that of the state after them), and of the first state.

    `kept` is how much of a state goes over into the next one by itself.
    """
    totals, gates = signal.new_empty(signal.shape), signal.new_empty(*signal.shape[:3], *factors.shape[3:])
    whole, flat, own = totals.unbind(0), gates.flatten(-2).unbind(0), gates.unbind(0)
    tall = totals.unsqueeze(-2).unbind(0)
    given, factor, keep = signal.unbind(0), factors.unbind(0), None if kept is None else kept.unbind(0)
    whole[-1].copy_(given[-1])
    first = torch.empty_like(given[0])
    for step in reversed(range(len(signal))):
        torch.mul(tall[step], factor[step], out=own[step])
        if step:
            before = torch.baddbmm(given[step - 1], flat[step], weight, out=whole[step - 1])
        else:
            before = torch.bmm(flat[step], weight, out=first)
        if keep is not None:
            before.addcmul_(whole[step], keep[step])
    return totals, gates.flatten(-2), first


def _gru_backward(signal: Tensor, weight: Tensor, ended: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
    states, gates, inside = saved
    (reset, update, new), hidden = gates.chunk(3, dim=-1), inside.chunk(3, dim=-1)[2]
    by_new = _zero((1 - update) * (1 - new * new), ended)
    by_update = _zero((states[:-1] - new) * update * (1 - update), ended)
    by_reset = by_new * hidden * reset * (1 - reset)
    factors = torch.stack([by_reset, by_update, by_new * reset], dim=-2)
    kept = update if ended is None else update.masked_fill(ended, 1.0)
    totals, recurrent, first = _loop(signal, weight, factors, kept)
    entering = recurrent.clone()
    torch.mul(totals, by_new, out=entering.chunk(3, dim=-1)[2])
    return [entering, recurrent, first]


def _lstm_backward(
    signal: Tensor,
    last: Tensor | None,
    weight: Tensor,
    projection: Tensor | None,
    ended: Tensor | None,
    saved: Sequence[Tensor],
) -> list[Tensor]:
    _, memory, gates, new = saved
    enter, forget, _, leave = gates.chunk(4, dim=-1)
    shown = memory[1:].tanh()
    by_cell = [new * enter * (1 - enter), memory[:-1] * forget * (1 - forget), enter * (1 - new * new)]
    factors = torch.stack([_zero(each, ended) for each in by_cell], dim=-2).unbind(0)
    # Of one step, as rows of which there are as many as gates: [directions, rows, 1, width].
    to_cell = _zero(leave * (1 - shown * shown), ended).unsqueeze(-2).unbind(0)
    by_leave = _zero(shown * leave * (1 - leave), ended).unsqueeze(-2).unbind(0)
    kept = (forget if ended is None else forget.masked_fill(ended, 1.0)).unsqueeze(-2).unbind(0)
    over = None if ended is None else ended.to(signal.dtype).unbind(0)
    found = gates.new_empty(gates.shape)
    parts, flat = found.unflatten(-1, (4, -1)), found.unbind(0)
    of_cell, of_leave = parts[..., :3, :].unbind(0), parts[..., 3:, :].unbind(0)
    totals = signal.new_empty(signal.shape)
    whole, tall, given = totals.unbind(0), totals.unsqueeze(-2).unbind(0), signal.unbind(0)
    whole[-1].copy_(given[-1])
    first = torch.empty_like(whole[0])
    cell = (torch.zeros_like(memory[0]) if last is None else _of_shape(last, tuple(memory.shape[1:]))).unsqueeze(-2)
    for step in reversed(range(len(signal))):
        inner = tall[step] if projection is None else torch.bmm(whole[step], projection).unsqueeze(-2)
        cell = torch.addcmul(cell, inner, to_cell[step])
        torch.mul(cell, factors[step], out=of_cell[step])
        torch.mul(inner, by_leave[step], out=of_leave[step])
        cell = cell * kept[step]
        if step:
            before = torch.baddbmm(given[step - 1], flat[step], weight, out=whole[step - 1])
        else:
            before = torch.bmm(flat[step], weight, out=first)
        if over is not None:
            before.addcmul_(whole[step], over[step])
    projected = [] if projection is None else [_zero(totals, ended)]
    return [found, first, cell.squeeze(-2), *projected]
