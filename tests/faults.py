"""Which faults must an audit notice? Put into the mechanism's own code, for as long as a test lasts."""

from vestige.compare.stacked import curator, draws
from vestige.engines import reference
from vestige.randomness import lattice


def none(monkeypatch):
    pass


def less_noise(monkeypatch, share=0.7):
    """Noise has 0.7 of the deviation that was priced: on the lattice, and in float32 where it is correlated."""
    steps, normal = lattice.add_steps, draws.Draws.noise
    monkeypatch.setattr(
        lattice, "add_steps", lambda total, spacing, *rest, **more: steps(total, spacing * share, *rest, **more)
    )
    monkeypatch.setattr(draws.Draws, "noise", lambda self, *args: normal(self, *args).mul_(share))


def looser_clip(monkeypatch, times=2.0):
    """An example may move a sum by twice its bound."""
    whole = reference.weights
    for module in (curator, reference):
        monkeypatch.setattr(module, "weights", lambda clip, norms: times * whole(clip, norms))


FAULTS = {"noise": less_noise, "clip": looser_clip}
