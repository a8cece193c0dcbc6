"""Which embeddings and shared weights do people write? Padded, bagged, tied, and ones whose gradients cancel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sensitivity.examples import copied, language, numbers, tokens
from sensitivity.measuring import Case


class Bag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(11, 6, **options), nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.bag(x))


class WeightedBag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(11, 6, mode="sum"), nn.Linear(6, 3)

    def forward(self, ids, weights):
        return self.fc(self.bag(ids, per_sample_weights=weights))


class Averaged(nn.Module):
    """fastText by hand: the mean of what is no padding."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.fc = nn.Embedding(11, 6, **options), nn.Linear(6, 3)

    def forward(self, x):
        real = (x != 0).unsqueeze(-1)
        return self.fc((self.embed(x) * real).sum(1) / real.sum(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = torch.tanh(self.mix(self.embed(x)))
        return (h @ self.embed.weight.t()).transpose(1, 2)


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre, self.context = nn.Embedding(11, 6), nn.Embedding(11, 6)

    def forward(self, centre, context):
        return torch.bmm(self.context(context), self.centre(centre).unsqueeze(2)).squeeze(2)


class Factors(nn.Module):
    """Matrix factorisation with biases."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(9, 4), nn.Embedding(8, 4)
        self.user_bias, self.item_bias, self.mean = (
            nn.Embedding(9, 1),
            nn.Embedding(8, 1),
            nn.Parameter(torch.zeros(())),
        )

    def forward(self, u, i):
        return (
            (self.user(u) * self.item(i)).sum(-1)
            + self.user_bias(u).squeeze(-1)
            + self.item_bias(i).squeeze(-1)
            + self.mean
        )


class Difference(nn.Module):
    """The difference of two words' vectors: where they are the same word, everything cancels."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.embed, self.fc, self.scale = nn.Embedding(5, 6), nn.Linear(6, 2), scale

    def forward(self, a, b):
        return self.fc(torch.tanh(self.scale * (self.embed(a) - self.embed(b)).sum(1)))


class TransE(nn.Module):
    """Head plus relation minus tail."""

    def __init__(self):
        super().__init__()
        self.entities, self.relations = nn.Embedding(6, 4), nn.Embedding(3, 4)

    def forward(self, head, relation, tail):
        return (self.entities(head) + self.relations(relation) - self.entities(tail)).norm(p=2, dim=-1)


class Tabular(nn.Module):
    """Columns of categories and of numbers, side by side."""

    def __init__(self):
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(size, 3) for size in (4, 5, 6)])
        self.net = nn.Sequential(nn.Linear(9 + 4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, categories, values):
        parts = [embed(categories[:, i]) for i, embed in enumerate(self.embeds)]
        return self.net(torch.cat([*parts, values], dim=1))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.relu(self.inner(torch.relu(self.inner(x)))))


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b, self.c = (
            nn.Parameter(torch.randn(4, 8) * 0.3),
            nn.Parameter(torch.zeros(4)),
            nn.Parameter(torch.zeros(8)),
        )

    def forward(self, x):
        return F.linear(torch.sigmoid(F.linear(x, self.w, self.b)), self.w.t(), self.c)


class Recurrent(nn.Module):
    """One block applied four times, and a head that shares its matrix."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.GELU()), nn.Linear(5, 5)
        self.head.weight = self.block[1].weight

    def forward(self, x):
        for _ in range(4):
            x = x + self.block(x)
        return self.head(x)


def ids(*sizes, length=None):
    def make(n):
        return tuple(torch.randint(size, (n,) if length is None else (n, length)) for size in sizes)

    return make


def with_class(made, classes=2):
    return lambda n: (*made(n), torch.randint(classes, (n,)))


def with_number(made):
    return lambda n: (*made(n), torch.rand(n))


def weighted(n):
    return torch.randint(11, (n, 5)), torch.rand(n, 5), torch.randint(3, (n,))


def same_word(n):
    a = torch.randint(5, (n, 7))
    return a, a[:, torch.randperm(7)], torch.randint(2, (n,))


def skip_grams(n):
    return torch.randint(11, (n,)), torch.randint(11, (n, 4)), torch.tensor([1.0, 0, 0, 0]).repeat(n, 1)


CASES = [
    Case(name="embeddings averaged by hand", model=lambda: Averaged(padding_idx=0), data=tokens(6)),
    Case(name="embedding bag, mean", model=Bag, data=tokens(6)),
    Case(name="embedding bag, sum", model=lambda: Bag(mode="sum", padding_idx=0), data=tokens(6)),
    Case(name="embedding bag, max", model=lambda: Bag(mode="max"), data=tokens(6)),
    Case(name="embedding bag with weights", model=WeightedBag, data=weighted),
    Case(
        name="sparse embedding",
        model=lambda: Averaged(sparse=True),
        data=tokens(6),
        refused="a sparse or nested tensor",
    ),
    Case(
        name="embedding scaled by frequency",
        model=lambda: Averaged(scale_grad_by_freq=True),
        data=tokens(6),
        refused={"loop": "the gradient of 'embed.weight' is not"},
    ),
    Case(
        name="embedding kept in a ball",
        model=lambda: Averaged(max_norm=1.0),
        data=tokens(6),
        refused={"train": "max_norm", "loop": "embedding_renorm_"},
    ),
    Case(name="embedding and head tied", model=Tied, data=language(5)),
    Case(name="skip-gram", model=SkipGram, data=skip_grams, loss=F.binary_cross_entropy_with_logits, outlying=()),
    Case(name="matrix factorisation", model=Factors, data=with_number(ids(9, 8)), loss=F.mse_loss),
    Case(name="difference of embeddings", model=Difference, data=with_class(ids(5, 5, length=7)), daily=True),
    Case(name="difference of the same words", model=Difference, data=same_word),
    Case(
        name="difference of the same words, scaled",
        model=lambda: Difference(1e7),
        data=same_word,
        tolerance=0.02,  # all that there is of any gradient is rounding: docs/privacy.md, `rounding`
    ),
    Case(name="translations of entities", model=TransE, data=with_number(ids(6, 3, 6)), loss=F.mse_loss),
    Case(
        name="tabular",
        model=Tabular,
        data=lambda n: (torch.randint(4, (n, 3)), torch.randn(n, 4), torch.randint(2, (n,))),
    ),
    Case(name="one layer twice", model=Twice, data=numbers(5)),
    Case(name="tied autoencoder", model=TiedAutoencoder, data=copied(8), loss=F.mse_loss),
    Case(name="one block four times, tied head", model=Recurrent, data=numbers(5, classes=5)),
]
