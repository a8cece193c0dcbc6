"""Which attention do people write? torch's layers with their masks, and einsum by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from sensitivity.examples import language, numbers, regression, tokens
from sensitivity.measuring import Case


class Pooled(nn.Module):
    """Attention over tokens, without the padding, and their mean."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.attend, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        pad = x == 0
        e = self.embed(x)
        out, _ = self.attend(e, e, e, key_padding_mask=pad)
        return self.fc(out.masked_fill(pad[..., None], 0).sum(1) / (~pad).sum(1, keepdim=True))


class TimeFirstAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.fc = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        x = x.permute(1, 0, 2)
        out = self.attend(x, x, x, need_weights=False)[0]
        return self.fc(out.mean(0))


class WeightsToo(nn.Module):
    """Returns the attention's weights beside the answer."""

    def __init__(self):
        super().__init__()
        self.attend, self.fc = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True), nn.Linear(4, 3)

    def forward(self, x):
        out, weights = self.attend(x, x, x)
        return self.fc(out.mean(1)), weights


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.block = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        t = x.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        h = self.words(x) + self.places(torch.arange(t))
        return self.head(self.block(h, src_mask=mask, is_causal=True)).permute(0, 2, 1)


class Encoder(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8, padding_idx=0), nn.Parameter(torch.randn(1, 6, 8) * 0.02)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder, self.fc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x):
        h = self.encoder(self.embed(x) + self.place[:, : x.size(1)], src_key_padding_mask=x.eq(0))
        return self.fc(h[:, 0])


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.queries = nn.Linear(4, 8), nn.Parameter(torch.randn(3, 8))
        self.decoder, self.out = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        queries = self.queries.unsqueeze(0).repeat(x.size(0), 1, 1)
        mask = torch.triu(torch.full((3, 3), float("-inf")), diagonal=1)
        return self.out(self.decoder(queries, self.lift(x), tgt_mask=mask)).squeeze(-1)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 11)

    def forward(self, source, target):
        mask = self.net.generate_square_subsequent_mask(target.size(1))
        h = self.net(self.embed(source), self.embed(target), tgt_mask=mask, src_key_padding_mask=source == 0)
        return self.out(h).transpose(1, 2)


def pairs(n):
    target = torch.randint(1, 11, (n, 6))
    return tokens(4)(n)[0], target[:, :-1].clone(), target[:, 1:].clone()


class Einsum(nn.Module):
    """Queries, keys and values from one matrix, heads by einsum."""

    def __init__(self, causal=True):
        super().__init__()
        self.heads, self.causal = 2, causal
        self.qkv, self.proj, self.fc = nn.Linear(4, 12, bias=False), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(d // self.heads)
        if self.causal:
            scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(b, t, d)
        return self.fc(self.proj(out)[:, -1])


class EinsumWeights(nn.Module):
    """Matrices by head as bare parameters, applied by einsum."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(2, 4, 3) * 0.5) for _ in range(3))
        self.wo, self.bias = nn.Parameter(torch.randn(2, 3, 3) * 0.5), nn.Parameter(torch.zeros(2, 5, 5))

    def forward(self, x):
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (self.wq, self.wk, self.wv))
        weights = (q @ k.transpose(-1, -2) / 3**0.5 + self.bias).softmax(-1)
        return torch.einsum("bhte,hec->btc", weights @ v, self.wo).mean(1)


class Fused(nn.Module):
    """scaled_dot_product_attention, one key for all heads."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = (part.unsqueeze(1).expand(-1, 2, -1, -1) for part in self.kv(x).chunk(2, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2)[:, -1])


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.cls = nn.Conv2d(1, 8, 4, stride=4), nn.Parameter(torch.zeros(1, 1, 8))
        self.pos = nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.block, self.norm = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, img):
        x = self.patch(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.block(x))[:, 0])


class Rotary(nn.Module):
    """Rotary positions, an RMS norm and a gated feed-forward part."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.RMSNorm(8)
        self.wq, self.wk, self.wv = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.gate, self.up, self.down = (
            nn.Linear(8, 16, bias=False),
            nn.Linear(8, 16, bias=False),
            nn.Linear(16, 8, bias=False),
        )
        self.head = nn.Linear(8, 11, bias=False)
        angles = torch.outer(torch.arange(16.0), 10000 ** -(torch.arange(4.0) / 4))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def turned(self, x):
        t = x.size(1)
        left, right = x.chunk(2, -1)
        return x * self.cos[:t] + torch.cat([-right, left], -1) * self.sin[:t]

    def forward(self, ids):
        h = self.embed(ids)
        x = self.norm(h)
        h = h + F.scaled_dot_product_attention(
            self.turned(self.wq(x)), self.turned(self.wk(x)), self.wv(x), is_causal=True
        )
        return self.head(h + self.down(F.silu(self.gate(h)) * self.up(h)))


def shifted(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


CASES = [
    Case(name="attention with key padding", model=Pooled, data=tokens(6)),
    Case(name="attention, time first inside", model=TimeFirstAttention, data=numbers(5, 4)),
    Case(
        name="attention that returns its weights",
        model=WeightsToo,
        data=numbers(5, 4),
        loss=lambda out, y: F.cross_entropy(out[0], y),
    ),
    Case(name="gpt, tied head", model=GPT, data=language(6)),
    Case(name="transformer encoder, padded", model=Encoder, data=tokens(6)),
    Case(
        name="transformer encoder with dropout",
        model=lambda: Encoder(0.2),
        data=tokens(6),
        random=True,
    ),
    Case(
        name="transformer decoder, learned queries",
        model=Decoder,
        data=regression(5, 4, to=(3,)),
        loss=F.smooth_l1_loss,
    ),
    Case(name="encoder and decoder", model=Translator, data=pairs),
    Case(name="einsum heads, causal", model=Einsum, data=numbers(5, 4)),
    Case(name="einsum heads", model=lambda: Einsum(False), data=numbers(5, 4)),
    Case(name="einsum with matrices of one's own", model=EinsumWeights, data=numbers(5, 4)),
    Case(name="fused attention, one key", model=Fused, data=numbers(5, 4)),
    Case(name="vision transformer", model=ViT, data=numbers(1, 8, 8)),
    Case(name="rotary llama block", model=Rotary, data=language(6), loss=shifted),
]
