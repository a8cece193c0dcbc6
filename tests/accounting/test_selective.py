"""Is a selective run priced from its public facts, as published and as proved?"""

import pytest

from histories import DELTA
from vestige.accounting import published_claim_epsilon


def test_the_published_claim_for_selective_updates():
    claim = published_claim_epsilon(1246, 1024 / 60_000, 3.0, 256 / 60_000, 1.37, DELTA)
    assert claim == pytest.approx(1.0, abs=0.001)
