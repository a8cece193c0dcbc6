"""Which recurrent networks do people write? torch's own, packed or not, cells in a loop, and some by hand."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sensitivity.examples import language, numbers, regression, sequences, tokens
from sensitivity.measuring import ODD, Case


class Last(nn.Module):
    """The last output of a recurrent layer, classified."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.fc = layer, nn.Linear(width, 3)

    def forward(self, x):
        out, _ = self.layer(x)
        return self.fc(out[:, -1])


class TimeFirst(nn.Module):
    """As torch's recurrent layers want it by default."""

    def __init__(self):
        super().__init__()
        self.gru, self.fc = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        _, h = self.gru(x.transpose(0, 1))
        return self.fc(h[-1])


class TimeFirstOutputs(nn.Module):
    """Outputs [time, examples, classes]: no row of them is an example's."""

    def __init__(self):
        super().__init__()
        self.gru, self.fc = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        out, _ = self.gru(x.transpose(0, 1))
        return self.fc(out)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 5, batch_first=True, bidirectional=True), nn.Linear(10, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.fc(torch.cat([h[0], h[1]], dim=1))


class PackedAndPadded(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.fc(out.sum(1) / lengths[:, None])


class PaddedToTheLongest(PackedAndPadded):
    """As torch pads where no length is said, and a mean over all steps, padding too."""

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.fc(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0].mean(1))


class OverTheLongest(PackedAndPadded):
    """Divided by a number that is the longest sequence's, as the size of something packed shows it."""

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.fc(self.rnn(packed)[1][-1]) * 10 / len(packed.batch_sizes)


class OverAllSteps(PackedAndPadded):
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.fc(self.rnn(packed)[1][-1]) * 10 / packed.data.shape[0]


class OverWhatIsMade(PackedAndPadded):
    """The same, by something that is made of the packed steps."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.fc(self.rnn(packed)[1][-1]) * 10 / self.size(packed.data)


SIZES_OF_STEPS = {
    "a column": lambda data: data[:, 0].shape[0],
    "a product": lambda data: len(data @ torch.ones(data.shape[-1], 2)),
    "ones": lambda data: torch.ones_like(data).sum() / 4,
    "unbind": lambda data: len(data.unbind(0)),
    "a list": lambda data: sum(1 for _ in data),
    "a stride": lambda data: data.t().contiguous().stride(0),
}


def one_is_longer(n):
    """Sequences of which one alone goes on to the end."""
    x, lengths, targets = sequences(6, 4)(n)
    lengths[:] = 2
    lengths[ODD] = 6
    return x, lengths, targets


class MaskedMean(nn.Module):
    """Lengths without packing: a mask instead."""

    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.LSTM(4, 5, num_layers=2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x, lengths):
        out, _ = self.rnn(x)
        mask = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)
        return self.fc((out * mask).sum(1) / lengths[:, None])


class CellLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.fc = nn.LSTMCell(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = c = torch.zeros(x.size(0), 5)
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
        return self.fc(h)


class LearnedStart(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.h0, self.fc = nn.GRUCell(4, 5), nn.Parameter(torch.zeros(5)), nn.Linear(5, 3)

    def forward(self, x):
        h = self.h0.expand(x.size(0), -1)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.fc(h)


class LearnedStates(nn.Module):
    """Learned initial states for a whole LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)
        self.h0, self.c0 = nn.Parameter(torch.randn(1, 1, 5)), nn.Parameter(torch.randn(1, 1, 5))

    def forward(self, x):
        n = x.size(0)
        out, _ = self.lstm(x, (self.h0.repeat(1, n, 1), self.c0.expand(-1, n, -1).contiguous()))
        return self.fc(out.mean(1))


class Elman(nn.Module):
    """By hand, with two matrices."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(4, 6) * 0.3), nn.Parameter(torch.randn(6, 6) * 0.3)
        self.b, self.out = nn.Parameter(torch.zeros(6)), nn.Linear(6, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), 6)
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] @ self.w + h @ self.u + self.b)
        return self.out(h).squeeze(-1)


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(11, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, 11)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0]).transpose(1, 2)


class Seq2Seq(nn.Module):
    """Teacher forcing, with the target's words as a second input."""

    def __init__(self):
        super().__init__()
        self.embed, self.encoder, self.decoder = (
            nn.Embedding(11, 6),
            nn.GRU(6, 6, batch_first=True),
            nn.GRU(6, 6, batch_first=True),
        )
        self.out = nn.Linear(6, 11)

    def forward(self, source, target):
        _, h = self.encoder(self.embed(source))
        return self.out(self.decoder(self.embed(target), h)[0])


def translation(n):
    target = torch.randint(1, 11, (n, 6))
    return torch.randint(1, 11, (n, 4)), target[:, :-1].clone(), target[:, 1:].clone()


def flat_tokens(out, y):
    return F.cross_entropy(out.reshape(-1, out.size(-1)), y.reshape(-1))


def time_first_loss(out, y):
    return F.cross_entropy(out.transpose(0, 1)[:, -1], y)


class Tagger(nn.Module):
    """Embedding, BiLSTM, a tag for each word, and -100 where there is none."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.lstm, self.fc = nn.LSTM(6, 5, batch_first=True, bidirectional=True), nn.Linear(10, 4)

    def forward(self, x):
        return self.fc(self.lstm(self.embed(x))[0])


def tagged(n):
    text = tokens(6)(n)[0]
    return text, torch.where(text > 0, torch.randint(4, text.shape), -100)


CASES = [
    Case(name="rnn", model=lambda: Last(nn.RNN(4, 5, batch_first=True), 5), data=numbers(6, 4)),
    Case(
        name="rnn, relu, two layers",
        model=lambda: Last(nn.RNN(4, 5, 2, nonlinearity="relu", batch_first=True), 5),
        data=numbers(6, 4),
    ),
    Case(name="lstm", model=lambda: Last(nn.LSTM(4, 5, batch_first=True), 5), data=numbers(6, 4)),
    Case(
        name="gru, bidirectional, two layers",
        model=lambda: Last(nn.GRU(4, 3, 2, batch_first=True, bidirectional=True), 6),
        data=numbers(6, 4),
    ),
    Case(
        name="lstm with a projection",
        model=lambda: Last(nn.LSTM(4, 6, batch_first=True, proj_size=3), 3),
        data=numbers(6, 4),
    ),
    Case(
        name="lstm with dropout between layers",
        model=lambda: Last(nn.LSTM(4, 5, 2, dropout=0.4, batch_first=True), 5),
        data=numbers(6, 4),
        random=True,
    ),
    Case(name="gru, time first inside", model=TimeFirst, data=numbers(6, 4)),
    Case(
        name="gru, time first outputs",
        model=TimeFirstOutputs,
        data=numbers(6, 4),
        loss=time_first_loss,
    ),
    Case(
        name="packed bidirectional lstm",
        model=Packed,
        data=sequences(6, 4),
    ),
    Case(
        name="packed, and padded to the longest",
        model=PaddedToTheLongest,
        data=one_is_longer,
        daily=True,
    ),
    Case(
        name="packed, and divided by the longest",
        model=OverTheLongest,
        data=one_is_longer,
        refused={"loop": "looks at a value of the examples"},
        daily=True,
    ),
    Case(
        name="packed, and divided by all steps",
        model=OverAllSteps,
        data=one_is_longer,
        refused={"loop": "looks at a value of the examples"},
        daily=True,
    ),
    *(
        Case(
            name=f"packed, and divided by the steps of {name}",
            model=partial(OverWhatIsMade, size),
            data=one_is_longer,
            refused="puts examples in another order"
            if name == "ones"
            else {"loop": "looks at a value of the examples"},
            daily=True,
        )
        for name, size in SIZES_OF_STEPS.items()
    ),
    Case(
        name="packed and padded gru",
        model=PackedAndPadded,
        data=sequences(6, 4),
    ),
    Case(
        name="lstm with a mask",
        model=MaskedMean,
        data=sequences(6, 4),
    ),
    Case(name="lstm cells in a loop", model=CellLoop, data=numbers(6, 4)),
    Case(name="gru cells from a learned state", model=LearnedStart, data=numbers(6, 4)),
    Case(name="lstm from learned states", model=LearnedStates, data=numbers(6, 4)),
    Case(name="elman by hand", model=Elman, data=regression(6, 4, to=()), loss=nn.L1Loss()),
    Case(name="character language model", model=CharRNN, data=language(6)),
    Case(name="seq2seq, flattened", model=Seq2Seq, data=translation, loss=flat_tokens),
    Case(name="tagger, ignored padding", model=Tagger, data=tagged, loss=flat_tokens),
]
