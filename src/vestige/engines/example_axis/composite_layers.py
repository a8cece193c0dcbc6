"""How do recurrent layers, bags of words, attention and mixtures of experts run when every operator is followed?

torch runs some of these modules as one operation, which hides the linear maps inside, or copies what it need not;
experts sort the positions of all examples. Here they are spelled out, with the same results, as plain functions of the
module's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from vestige.engines.per_example.expert_products import routed
from vestige.engines.per_example.recurrence_operator import in_loop, recurrence

HiddenState = tuple[Tensor, ...]
States = Tensor | HiddenState
Forward = Callable[..., Any]
"""Of a module, which is its first argument."""


def recurrent(
    module: nn.RNNBase, input: Tensor | PackedSequence, hx: States | None = None
) -> tuple[Tensor | PackedSequence, States]:
    """`nn.LSTM.forward`, `nn.GRU.forward` and `nn.RNN.forward`."""
    if isinstance(input, PackedSequence):
        return _packed(module, input, hx)
    if input.dim() != 3 or not input.shape[1 if module.batch_first else 0]:
        raise ValueError(
            f"{type(module).__name__} over {tuple(input.shape)}: a batch of sequences has three axes, and steps"
        )
    sequence, states = _layers(module, input if module.batch_first else input.transpose(0, 1), hx, None)
    return (sequence if module.batch_first else sequence.transpose(0, 1)), states


def _packed(module: nn.RNNBase, input: PackedSequence, hx: States | None) -> tuple[PackedSequence, States]:
    """Padded, in the order of the batch; a sequence that has ended keeps its state."""
    sequence, lengths = pad_packed_sequence(input, batch_first=True)
    output, states = _layers(module, sequence, hx, lengths.to(sequence.device))
    sorted_by_length = input.sorted_indices is None
    return pack_padded_sequence(output, lengths, batch_first=True, enforce_sorted=sorted_by_length), states


def _layers(module: nn.RNNBase, sequence: Tensor, hx: States | None, lengths: Tensor | None) -> tuple[Tensor, States]:
    """The last layer's outputs [examples, steps, width], and the last states of all layers and directions."""
    initial = _initial(module, sequence, hx)
    weights = {name: getattr(module, name) for name in module._flat_weights_names}
    going = None
    if lengths is not None:
        going = (torch.arange(sequence.shape[1], device=sequence.device) < lengths[:, None])[..., None]
    directions, final = 2 if module.bidirectional else 1, []
    for layer in range(module.num_layers):
        ends = [f"_l{layer}" + "_reverse" * reverse for reverse in range(directions)]
        entering = [F.linear(sequence, weights["weight_ih" + end], weights.get("bias_ih" + end)) for end in ends]
        recurrent = [(weights["weight_hh" + end], weights.get("bias_hh" + end)) for end in ends]
        projections = [weights["weight_hr" + end] for end in ends] if module.proj_size else []
        here = slice(layer * directions, (layer + 1) * directions)
        state = None if initial is None else tuple(part[here] for part in initial)
        outputs, state = recurrence(module.mode, entering, state, recurrent, projections, going)
        final.append(state)
        sequence = torch.cat(outputs, dim=-1)
        if going is not None:
            sequence = torch.where(going, sequence, 0.0)
        if layer < module.num_layers - 1:
            sequence = F.dropout(sequence, module.dropout, module.training)
    states = tuple(torch.cat(parts) for parts in zip(*final, strict=True))
    return sequence, states if len(states) > 1 else states[0]


def _initial(module: nn.RNNBase, sequence: Tensor, hx: States | None) -> HiddenState | None:
    if hx is None:
        return None
    states = hx if isinstance(hx, tuple) else (hx,)
    count = module.num_layers * (2 if module.bidirectional else 1)
    widths = (module.proj_size or module.hidden_size, module.hidden_size)[: 2 if module.mode == "LSTM" else 1]
    shapes, expected = [tuple(part.shape) for part in states], [(count, len(sequence), width) for width in widths]
    if shapes != expected:
        raise ValueError(f"{type(module).__name__} is given states of shapes {shapes}: it takes {expected}")
    return states


def cell(module: nn.RNNCellBase, input: Tensor, hx: States | None = None) -> States:
    """`nn.LSTMCell.forward`, `nn.GRUCell.forward` and `nn.RNNCell.forward`."""
    mode = "LSTM" if isinstance(module, nn.LSTMCell) else "GRU"
    if isinstance(module, nn.RNNCell):
        mode = f"RNN_{module.nonlinearity.upper()}"
    entering = F.linear(input, module.weight_ih, module.bias_ih)
    states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
    gates, *first = [part.reshape(1, 1, -1, part.shape[-1]) for part in (entering, *states)]
    biases = [] if module.bias_hh is None else [module.bias_hh]
    last = in_loop(mode, gates, [part[0] for part in first], [module.weight_hh], [], biases, None)
    state = tuple(part.reshape(*input.shape[:-1], -1) for part in last)
    return state if mode == "LSTM" else state[0]


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a layer of transformers' (`use_experts_implementation`), positions in their order throughout.

    Which positions an expert gets depends on the examples, and so does their number; here a product says for each
    position which expert it is of.
    """
    positions, several = top_k_index.shape
    index = top_k_index.flatten()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")

    def linear(name: str, input: Tensor) -> Tensor:
        weight = getattr(module, name)
        output = routed(input, weight.transpose(1, 2) if module.is_transposed else weight, index)
        return output + F.embedding(index, getattr(module, f"{name}_bias")) if module.has_bias else output

    inside = linear(names[0], hidden_states.repeat_interleave(several, dim=0))
    inside = module._apply_gate(inside) if module.has_gate else module.act_fn(inside)
    output = linear(names[1], inside)
    if getattr(module, "has_post_expert_norm", False):
        output = module.post_expert_norm(output)
    weighted = output * top_k_weights.reshape(-1, 1)
    return weighted.view(positions, several, -1).sum(dim=1).to(hidden_states.dtype)


EXPERTS = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "num_experts", "down_proj")
"""What transformers' layers of experts have in common; their classes are as many as its models."""


def bag(
    module: nn.EmbeddingBag, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    """`nn.EmbeddingBag.forward` of [examples, words]."""
    if input.dim() != 2:
        return nn.EmbeddingBag.forward(module, input, offsets, per_sample_weights)
    rows = F.embedding(input, module.weight, module.padding_idx)
    counted = torch.ones_like(input, dtype=torch.bool)
    if module.padding_idx is not None:
        counted = input != module.padding_idx % module.num_embeddings
    if module.mode == "max":
        largest = rows.masked_fill(~counted[..., None], -torch.inf).max(dim=1)[0]
        return largest.masked_fill(~counted.any(dim=1, keepdim=True), 0.0)
    weights = counted.to(rows.dtype) if per_sample_weights is None else counted * per_sample_weights
    total = (rows * weights[..., None]).sum(dim=1)
    return total if module.mode == "sum" else total / counted.sum(dim=1, keepdim=True).clamp(min=1)


def attention(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """`nn.MultiheadAttention.forward`; of sequences that attend to themselves without masks, examples first throughout:
    torch's own puts positions first, and copies there and back."""
    own = query is key and key is value and query.dim() == 3 and module.batch_first
    masks = (options.get("attn_mask"), options.get("key_padding_mask"), module.bias_k)
    masked = module.add_zero_attn or any(each is not None for each in masks)
    if not own or masked or options.get("need_weights", True) or module.in_proj_weight is None:
        return nn.MultiheadAttention.forward(module, query, key, value, **options)
    joint = F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in joint)
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=module.dropout if module.training else 0.0)
    return F.linear(mixed.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias), None


COMPOSITES: dict[type[nn.Module], Forward] = {
    nn.MultiheadAttention: attention,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.RNN: recurrent,
    nn.LSTMCell: cell,
    nn.GRUCell: cell,
    nn.RNNCell: cell,
    nn.EmbeddingBag: bag,
}


REGISTERED: dict[type[nn.Module], Forward] = {}
"""Modules with a rule of their user's (`engines.own_rules`)."""


def _registered(module: nn.Module) -> Forward | None:
    found = next((kind for kind in type(module).__mro__ if kind in REGISTERED), None)
    return REGISTERED[found] if found is not None and type(module).forward is found.forward else None


def composite_of(module: nn.Module) -> Forward | None:
    """The spelled-out form of a module, if there is one for all that this module does."""
    own = _registered(module)
    if own is not None:
        return own
    if all(hasattr(module, name) for name in EXPERTS):
        return experts if not getattr(module, "_is_expert_parallel", False) else None
    found = next((kind for kind in type(module).__mro__ if kind in COMPOSITES), None)
    if found is None or type(module).forward is not found.forward or "forward" in vars(module):
        return None
    if isinstance(module, nn.EmbeddingBag):
        return bag if module.max_norm is None and not module.scale_grad_by_freq else None
    return COMPOSITES[found]
