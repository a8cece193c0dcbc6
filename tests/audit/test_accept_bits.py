"""Do accept bits break the papers' claim, and no price of ours?"""

import pytest

from vestige.audit.accept_bits import attack_selection


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpsur", "dpsgd-br"])
def test_the_first_accepted_candidate_breaks_the_claim_and_no_price_of_ours(method):
    found = attack_selection(method, runs=1000, confidence=0.999)
    assert found.claim_broken
    assert not found.contradicts
    assert found.claimed_area < found.area.low < found.allowed_area


def test_few_runs_break_nothing_and_other_methods_select_nothing():
    found = attack_selection("dpsur", runs=16, trials=3, threshold=1.0)
    assert not found.contradicts
    assert found.to_json()["runs"] == 16
    with pytest.raises(ValueError, match="method='dp-sgd'"):
        attack_selection("dp-sgd")
    with pytest.raises(ValueError, match="runs=2"):
        attack_selection("dpsur", runs=2)
