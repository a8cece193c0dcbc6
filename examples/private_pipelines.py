"""Three pipelines that usually fit something to the rows first, done privately: epsilon covers the fitted parts too.

Beside each stands the leaking version: the same training, with the scaler, vocabulary or weights fitted without noise.
"""

import torch
from torch import nn

import vestige

DELTA, EPSILON, STATISTICS = 1e-5, 3.0, 0.5
"""Of the epsilon of 3, so much is for the statistics; the run's own guarantee states the total."""


def trained(model, loss, data, test, statistics=None):
    training = vestige.train(
        model,
        loss,
        data,
        method="dp-sgd",
        epsilon=EPSILON,
        delta=DELTA,
        sample_rate=0.1,
        steps=120,
        statistics=statistics,
    )
    for _ in training:
        pass
    return vestige.accuracy(model, test), training.guarantee()


def scaler(private=True, rows=6000):
    """StandardScaler and a small network, on columns of very different sizes."""
    torch.manual_seed(0)
    sizes, shifts = torch.tensor([1.0, 50.0, 1000.0, 0.1]), torch.tensor([0.0, 200.0, -3000.0, 5.0])
    z = torch.randn(2 * rows, 4)
    x, y = z * sizes + shifts, (z @ torch.tensor([1.0, -1.0, 1.0, 1.0]) > 0).long()
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    if not private:
        mean, deviation = x[:rows].mean(0), x[:rows].std(0)
        scaled, found = (x - mean) / deviation, None
    else:  # the bounds are public: what such columns can hold
        bounds = {0: (-10.0, 10.0), 1: (-200.0, 600.0), 2: (-9000.0, 3000.0), 3: (4.0, 6.0)}
        found = vestige.private_statistics(x[:rows], means=bounds, epsilon=STATISTICS, delta=DELTA)
        scaled = found.scaled(x)
    return trained(model, nn.functional.cross_entropy, (scaled[:rows], y[:rows]), (scaled[rows:], y[rows:]), found)


class Reader(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embed, self.read = nn.Embedding(words + 2, 12), nn.LSTM(12, 16, batch_first=True)
        self.answer = nn.Linear(16, 2)

    def forward(self, numbers):
        return self.answer(self.read(self.embed(numbers))[0].mean(1))


def vocabulary(private=True, rows=6000, size=40):
    """A vocabulary and an LSTM, on texts of which some words tell the class."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (2 * rows,), generator=random)
    told = [["bad", "poor", "dull", "worst"], ["good", "great", "fine", "best"]]
    common = [f"word{number}" for number in range(30)]
    texts = []
    for label in labels.tolist():
        picks = torch.randint(30, (6,), generator=random).tolist()
        own = torch.randint(4, (2,), generator=random).tolist()
        texts.append(" ".join([common[each] for each in picks] + [told[label][each] for each in own]))
    candidates = [*common, *told[0], *told[1], *(f"other{number}" for number in range(200))]
    if private:
        wanted = vestige.Vocabulary(size=size, words_per_row=8, candidates=candidates)
        found = vestige.private_statistics(
            {"text": texts[:rows]}, vocabulary={"text": wanted}, epsilon=STATISTICS, delta=DELTA
        )
    else:
        seen = sorted({word for text in texts[:rows] for word in text.split()})
        found = vestige.PrivateStatistics(words={"text": tuple(seen[:size])})
    numbers = found.encoded("text", texts, length=8)
    data, test = (numbers[:rows], labels[:rows]), (numbers[rows:], labels[rows:])
    return trained(Reader(size), nn.functional.cross_entropy, data, test, found if private else None)


def weights(private=True, rows=6000):
    """Class weights, on rows of which one in ten is of the rarer class; the test set has as many of both."""
    torch.manual_seed(0)
    y = (torch.rand(2 * rows) < 0.1).long()
    y[rows:] = torch.arange(rows) % 2
    x = torch.randn(2 * rows, 6) + 0.9 * y[:, None]
    if private:
        labels = {"label": [0, 1]}
        found = vestige.private_statistics({"label": y[:rows]}, classes=labels, epsilon=STATISTICS, delta=DELTA)
        each = found.class_weights("label")
    else:
        found, counts = None, torch.bincount(y[:rows])
        each = rows / (2 * counts)
    loss = nn.CrossEntropyLoss(weight=each, reduction="sum")  # of one example at a time: its own weight counts
    return trained(nn.Linear(6, 2), loss, (x[:rows], y[:rows]), (x[rows:], y[rows:]), found)


PIPELINES = {"scaler + MLP": scaler, "vocabulary + LSTM": vocabulary, "class weights": weights}

if __name__ == "__main__":
    for name, pipeline in PIPELINES.items():
        accuracy, promise = pipeline()
        leaking, _ = pipeline(private=False)
        print(f"{name}: {accuracy:.1%} at epsilon {promise.epsilon:.3f} in all; {leaking:.1%} where it leaks")
