"""What does the paper of FO-DP-SGD compute? Its weights and its recursion in float64, one lag at a time."""

import numpy as np


def paper_weights(past, trend, *, alpha, lam, tau, kappa, zeta):
    """Equations 5 to 8 of FO-DP-SGD, one lag at a time, in float64; `past[0]` is lag 1."""
    norm = np.linalg.norm(trend)
    chi = norm / (norm + zeta)
    raw = []
    for j, vector in enumerate(past, start=1):
        nu = np.linalg.norm(vector - trend) / (max(norm, kappa) + 1e-12)
        raw.append((j + 1) ** (alpha - 1) * np.exp(-(lam + chi * tau * nu) * j))
    return np.array(raw) / np.sum(raw)


def paper_recursion(
    fresh, *, beta=0.9, window=8, alpha=0.8, lam=0.01, tau=0.1, gamma=0.2, kappa=1e-6, zeta=1.0, post=False
):
    """Algorithm 1 on y = s + Z / beta (so that beta * y = beta * s + Z), or Post-FM (equations 13 to 17)."""
    kept, outputs, trend = [], [], None
    for y in fresh.double().numpy():
        past = kept[::-1][: window - 1]
        u = 0 * y
        if past:
            u = paper_weights(past, trend, alpha=alpha, lam=lam, tau=tau, kappa=kappa, zeta=zeta) @ np.stack(past)
        out = beta * y + (1 - beta) * u
        keep = y if post else out
        trend = keep if trend is None else gamma * keep + (1 - gamma) * trend
        kept.append(keep)
        outputs.append(out)
    return np.stack(outputs)
