"""The cheapest formats within a budget of error."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfuse.auto.allocate import Candidate, allocate
from kvfuse.formats import KvFormat


def candidate(size: float, key: float, value: float = 0.0) -> Candidate:
    # Only to tell candidates apart: allocation never looks into a format.
    return Candidate(KvFormat(n_recent=int(size * 16)), size, key, value)


CHEAP, GOOD = candidate(4, 0.1), candidate(8, 0.01)


def test_a_wide_budget_takes_the_cheapest_of_all():
    assert allocate({"0": [GOOD, CHEAP], "1": [CHEAP, GOOD]}, 1.0) == {"0": CHEAP, "1": CHEAP}


def test_an_impossible_budget_takes_the_best_of_all():
    assert allocate({"0": [GOOD, CHEAP], "1": [CHEAP, GOOD]}, 0.0) == {"0": GOOD, "1": GOOD}


def test_the_layer_that_loses_most_for_a_byte_comes_first():
    worse = candidate(4, 0.2)
    chosen = allocate({"0": [CHEAP, GOOD], "1": [worse, GOOD]}, 0.0102)  # 0.1^2 + 0.01^2, and rounding
    assert chosen == {"0": CHEAP, "1": GOOD}


def test_equal_layers_are_taken_in_the_order_of_the_graph():
    chosen = allocate({"b": [CHEAP, GOOD], "a": [CHEAP, GOOD]}, 0.0102)  # 0.1^2 + 0.01^2, and rounding
    assert chosen == {"b": GOOD, "a": CHEAP}


def test_a_candidate_that_costs_more_and_gives_less_is_never_taken():
    useless = candidate(6, 0.11)
    assert allocate({"0": [CHEAP, useless, GOOD]}, 0.011) == {"0": CHEAP}
    assert allocate({"0": [CHEAP, useless, GOOD]}, 0.009) == {"0": GOOD}


def test_both_sides_count():
    assert candidate(4, 0.03, 0.04).square == pytest.approx(0.05**2)


SIZES = st.integers(1, 40)
ERRORS = st.integers(0, 60).map(lambda n: n / 100)
LAYERS = st.lists(st.lists(st.tuples(SIZES, ERRORS), min_size=1, max_size=4), min_size=1, max_size=3)


@given(LAYERS, st.integers(0, 100))
def test_no_choice_of_as_few_bytes_has_less_error(layers, percent):
    """The choice is on the lower convex hull of all choices: exact for its own error as the budget."""
    named = {str(i): [candidate(*pair) for pair in pairs] for i, pairs in enumerate(layers)}
    chosen = list(allocate(named, percent / 100).values())
    size, square = sum(c.bytes_per_token for c in chosen), sum(c.square for c in chosen)
    for other in itertools.product(*named.values()):
        other_size, other_square = sum(c.bytes_per_token for c in other), sum(c.square for c in other)
        assert other_size >= size or other_square >= square - 1e-12
