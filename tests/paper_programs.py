"""What do the papers' algorithms compute, line by line? Plain float64 programs that share nothing with the package.

Each takes the data, the initial weights and the random draws (standard normal numbers and coins), and follows the
printed algorithm. Every example is in every batch (rate 1), so that gradients and losses are computed here as well.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm


@dataclass
class Network:
    """A tanh network with one hidden layer and the cross-entropy: losses, accuracy and per-example gradients."""

    x: np.ndarray
    y: np.ndarray

    def outputs(self, w):
        hidden = np.tanh(self.x @ w[0].T + w[1])
        return hidden, hidden @ w[2].T + w[3]

    def loss(self, w):
        _, z = self.outputs(w)
        z = z - z.max(1, keepdims=True)
        return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), self.y]))

    def accuracy(self, w):
        return float(np.mean(self.outputs(w)[1].argmax(1) == self.y))

    def gradients(self, w):
        """One list of four gradients for each example."""
        hidden, z = self.outputs(w)
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        rows = []
        for i in range(len(self.x)):
            out = p[i].copy()
            out[self.y[i]] -= 1
            back = (w[2].T @ out) * (1 - hidden[i] ** 2)
            rows.append([np.outer(back, self.x[i]), back, np.outer(out, hidden[i]), out])
        return rows


def clipped_sum(gradients, groups, bounds):
    """The sum over examples of gradients whose groups are scaled to their bounds."""
    total = [np.zeros_like(part) for part in gradients[0]]
    for rows in gradients:
        for members, bound in zip(groups, bounds, strict=True):
            size = np.sqrt(sum(np.sum(rows[k] ** 2) for k in members))
            for k in members:
                total[k] += rows[k] * min(1.0, bound / size)
    return total


def power_law_exponent(weight, fewest=10, floor=1e-5):
    """The maximum likelihood exponent of the tail that lies closest to its power law; NaN where there is none."""
    x = np.sort(np.linalg.svd(weight, compute_uv=False) ** 2)
    x = x[x > floor]
    if len(x) < fewest or np.log(x[-1] / x[0]) <= 1e-4:
        return np.nan
    best = (np.inf, np.nan)
    for i in range(len(x) - 1):
        tail = x[i:]
        alpha = 1 + len(tail) / np.sum(np.log(tail / tail[0]))
        distance = max(abs(1 - (t / tail[0]) ** (1 - alpha) - k / len(tail)) for k, t in enumerate(tail))
        best = min(best, (distance, alpha))
    return best[1]


def sma_as_printed(net, w, draws, *, lr, sigma, clips, beta, alpha, window, interval, c_lambda, gamma_ema, warm_up,
                   norm_cap, order=None):  # fmt: skip
    """Algorithm 1 of SMA-DP-SGD, lines 2 to 24. `draws[t]` are the standard normal numbers of step t, and `order(t)`
    says which group's exponent each group gets (shuffled spectra). Returns the releases and the exponents."""
    groups, lot = [(0, 1), (2, 3)], len(net.x)
    w, history, trend, releases, exponents = [part.copy() for part in w], [[], []], [None, None], [], []
    for t, z in enumerate(draws):
        omega = 1 - np.exp(-t / warm_up) if warm_up else 1.0
        sums = clipped_sum(net.gradients(w), groups, clips)
        rho = [power_law_exponent(w[0]), power_law_exponent(w[2])]
        rho = [rho[k] for k in order(t)] if order else rho
        release = [None] * 4
        for g, members in enumerate(groups):
            flat = lambda parts, members=members: np.concatenate([parts[k].ravel() for k in members])
            s, noise = flat(sums), flat(z)
            branch = np.zeros_like(s)
            if t > 0:
                d = 0.0 if np.isnan(rho[g]) else max(0.0, interval[0] - rho[g], rho[g] - interval[1])
                lam = 1 - np.exp(-c_lambda * d)
                lags = np.arange(1, min(window - 1, t) + 1)
                if len(lags):
                    a = (lags + 1.0) ** (alpha - 1) * np.exp(-lam * lags)
                    nu = sum(weight * history[g][-j] for weight, j in zip(a / a.sum(), lags, strict=True))
                    mu = trend[g]
                    gate = max(0.0, mu @ nu / (np.linalg.norm(mu) * np.linalg.norm(nu) + 1e-12))
                    scale = min(norm_cap, np.linalg.norm(mu) / (np.linalg.norm(nu) + 1e-12))
                    branch = (1 - beta) * omega * gate * scale * nu
            out = beta * s + branch + sigma * clips[g] * noise
            history[g].append(out)
            trend[g] = out if t == 0 else gamma_ema * out + (1 - gamma_ema) * trend[g]
            start = 0
            for k in members:
                release[k] = out[start : start + w[k].size].reshape(w[k].shape)
                start += w[k].size
                w[k] = w[k] - lr * release[k] / lot
        releases.append(np.concatenate([part.ravel() for part in release]))
        exponents.append(rho)
    return np.stack(releases), np.array(exponents), np.concatenate([part.ravel() for part in w])


def noisy_gain(heard, sigma, threshold, bound, weight=0.02):
    """How often candidates lower the loss, from noisy changes of which only those below the threshold were seen."""
    passed = below = 0.0
    for count, change in enumerate(heard, start=1):
        newest = max(weight, 1 / count)
        passed += newest * ((change is not None) - passed)
        below += newest * ((change or 0.0) - below)

    def excess(mean):
        edge = (threshold - mean) / sigma
        return below + (1 - passed) * (mean + sigma * norm.pdf(edge) / norm.sf(edge)) - mean

    if excess(-bound) <= 0:
        return 1.0
    return -1.0 if excess(bound) >= 0 else -brentq(excess, -bound, bound, xtol=1e-18) / bound


def br_as_printed(net, w, draws, *, lr, clip, momentum, sigma_t, sigma_v, clip_loss, beta, buffer, k, max_rejects, fast,
                  slow, p, worst_first=False, accuracy=None):  # fmt: skip
    """Algorithm 1 of DPSGD-BR with Definition 8 (one candidate is enough as soon as T_max are rejected in a row).

    `draws` gives for each trial a standard normal vector, a standard normal number, and a coin, which is used where two
    candidates tie. Noise on losses is 2 C_v sigma_v and the better candidate is taken, as the text has it; gradients
    are clipped one by one and averaged, with momentum. `accuracy` judges a model on public data; without it progress is
    heard from the noisy losses. Returns the weights after every trial and the number of candidates wanted."""
    shapes, speed = [part.shape for part in w], None
    w = np.concatenate([part.ravel() for part in w])
    lot, rejects, n, held, heard, path, wanted = len(net.x), 0, buffer, [], [], [], []
    for z, xi, coin in draws:
        parts = unflattened(w, shapes)
        total = np.concatenate([s.ravel() for s in clipped_sum(net.gradients(parts), [(0, 1, 2, 3)], [clip])])
        step = (total + sigma_t * clip * z) / lot
        moved = step if speed is None else momentum * speed + step
        candidate = w - lr * moved
        change = net.loss(unflattened(candidate, shapes)) - net.loss(parts)
        noisy = min(clip_loss, max(-clip_loss, change)) + 2 * clip_loss * sigma_v * xi
        if noisy < beta * clip_loss:
            held.append((noisy, candidate, moved))
            rejects = 0
            heard.append(noisy)
        else:
            rejects += 1
            heard.append(None)
            if rejects >= max_rejects:  # Definition 8
                n = 1
        if len(held) >= n:
            sign = -1 if worst_first else 1
            best = min(sign * each[0] for each in held)
            good = [each for each in held if sign * each[0] - best <= k * clip_loss]
            _, new, speed = good[coin % len(good)] if len(good) > 1 else good[0]
            if accuracy is None:
                gain = noisy_gain(heard, 2 * clip_loss * sigma_v, beta * clip_loss, clip_loss)
            else:
                gain = accuracy(unflattened(new, shapes)) - accuracy(parts)
            w, held = new, []
            if gain > p:  # lines 30 to 34
                sigma_t, sigma_v, lr = sigma_t * fast, sigma_v * fast, lr * fast
            else:
                sigma_t, beta, lr = sigma_t * slow, beta * slow, lr * slow
            n = 1 if rejects >= max_rejects else buffer  # line 4
        path.append(w)
        wanted.append(n)
    return np.stack(path), wanted


def unflattened(vector, shapes):
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(vector, cuts), shapes, strict=True)]
