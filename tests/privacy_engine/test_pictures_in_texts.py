"""Does what a mask puts into a row come from the row's own numbers, as pictures into the places of a text?"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vestige
from loops import flat, oracle, private, same_step_of, unwatched

ROWS, PLACE = 12, 9
"""PLACE is the token that stands where a part of the picture goes."""


def scattered(texts, mask, parts):
    return texts.masked_scatter(mask.unsqueeze(-1), parts)


def expanded(texts, mask, parts):
    return torch.masked_scatter(texts, mask.unsqueeze(-1).expand_as(texts), parts.view(1, -1, texts.shape[-1]))


def by_number(texts, mask, parts):
    return texts.masked_scatter((mask.unsqueeze(-1) & texts.isfinite()), parts)


def assigned(texts, mask, parts):
    found = texts.clone()
    found[mask] = parts
    return found


WAYS = {each.__name__: each for each in (scattered, expanded, by_number, assigned)}


class PictureInText(nn.Module):
    def __init__(self, put):
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.picture, self.head = nn.Embedding(12, 4), nn.Linear(5, 8), nn.Linear(4, 3)
        self.put = put

    def forward(self, ids, picture):
        parts = torch.tanh(self.picture(picture)).view(-1, 4)  # two of each picture
        texts = self.put(self.tokens(ids), ids == PLACE, parts)
        logits = self.head(torch.tanh(texts.cumsum(1)).mean(1))
        return {"loss": (logits - 0.3).square().mean(), "logits": logits, "parts": parts, "all": parts.sum()}


def examples(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(8, (rows, 7), generator=generator)
    for place, row in enumerate(ids):
        row[[place % 5, 5 + place % 2]] = PLACE
    return ids, torch.randn(rows, 5, generator=generator)


def own(model, ids, picture):
    return model(ids, picture)["loss"]


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_steps_as_one_example_at_a_time(way):
    _, model, optimizer, loader = private(PictureInText(WAYS[way]), examples())
    for batch in loader:
        same_step_of(own, model, optimizer, *batch)


@pytest.mark.parametrize("way", WAYS)
def test_no_row_takes_what_another_one_leaves(way):
    """Where one has fewer places than parts, and the next one more."""
    ids, picture = examples()
    ids[0] = 1
    ids[1, :4] = PLACE
    changed = picture + 1
    changed[1] = picture[1]
    found = []
    for each in (picture, changed):
        _, model, _, loader = private(PictureInText(WAYS[way]), (ids, each))
        for batch in loader:
            outputs = model(*batch)["logits"]
            with unwatched():
                found += [output for row, output in zip(batch[0], outputs.detach(), strict=True) if row.equal(ids[1])]
    assert len(found) == 2
    torch.testing.assert_close(*found)


def test_pictures_in_another_order_are_refused():
    _, model, _, loader = private(PictureInText(lambda t, m, p: scattered(t, m, p.flip(0))), examples())
    for batch in loader:
        with pytest.raises(ValueError, match="masked_scatter|flip"):
            model(*batch)["loss"].backward()


def narrow(texts, mask, parts):
    found = texts.clone()
    found[mask] = parts[:, :1]
    return found


def widened(texts, mask, parts):
    return texts.mean(1, keepdim=True).masked_scatter(mask.unsqueeze(-1), parts)


@pytest.mark.parametrize("put", [narrow, widened])
def test_what_is_broadcast_to_the_places_is_given_one_example_at_a_time(put):
    _, model, _, loader = private(PictureInText(put), examples())
    for batch in loader:
        with pytest.raises(ValueError, match="by a mask|masked_scatter"):
            model(*batch)["loss"].backward()
    with pytest.warns(UserWarning, match="one example at a time|proved"):
        trained(lambda outputs, _: outputs["loss"], own, put)


def trained(loss, expected_of, put=scattered):
    ids, picture = examples()
    model = PictureInText(put)
    expected = oracle(model, expected_of, list(zip(ids, picture, strict=True)), 0.5)
    before = flat(model)
    training = vestige.train(
        model, loss, {"ids": ids, "picture": picture, "unused": torch.zeros(ROWS)}, target="unused",
        noise_multiplier=1e-9, delta=1e-5, steps=1, sample_rate=1.0, max_grad_norm=0.5, lr=1.0, reproducible=7,
    )  # fmt: skip
    list(training)
    moved = (before - flat(model)).double() * ROWS
    torch.testing.assert_close(moved, torch.from_numpy(expected), rtol=2e-3, atol=5e-5)


def test_outputs_without_a_row_for_each_example_may_be_left_alone():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="examples cannot be proved")
        trained(lambda outputs, _: outputs["loss"], own)


@pytest.mark.parametrize(
    "use",
    [
        *(lambda each: each.mean(), lambda each: 2 * each[0].sum(), lambda each: F.relu(each).sum()),
        *(lambda each: abs(each).sum(), lambda each: 2 ** each[0, 0], lambda each: each.sum() * (each.dim() == 2)),
        *(
            lambda each: each.sum() * bool((each == each).all()),
            lambda each: each.sum() if torch.is_tensor(each) else 0,
        ),
    ],
)
def test_a_loss_that_uses_them_is_given_one_example_at_a_time(use):
    def loss(outputs, _=None):
        return outputs["loss"] + use(outputs["parts"])

    said = re.escape("not a row for each example")
    with pytest.warns(UserWarning, match=said):
        trained(loss, lambda model, *example: loss(model(*example)))
