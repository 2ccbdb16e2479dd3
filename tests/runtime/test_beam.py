"""Beam search against a plain one that re-runs the original on every hypothesis."""

import numpy as np
import pytest

import kvfuse
from kvfuse.beam import beam_search, log_softmax
from kvfuse.decoder import Decoder
from models import tiny_decoder

PROMPT = [3, 17, 5, 40]


@pytest.fixture(scope="module")
def original():
    return tiny_decoder.build("decomposed")


@pytest.fixture(scope="module")
def decoder(original):
    model = kvfuse.rewrite(original, n_recent=4096).model
    return Decoder(kvfuse.InferenceSession(model.SerializeToString()))


def plain_beam_search(original, beams, count):
    """Without caches or ends: every hypothesis is run from its first token."""
    session = Decoder(kvfuse.InferenceSession(original.SerializeToString()))
    live = [((), 0.0)]
    for _ in range(count):
        grown = []
        for tokens, total in live:
            session.reset()
            gains = log_softmax(session.prefill([*PROMPT, *tokens]))
            grown += [((*tokens, token), total + gain) for token, gain in enumerate(gains)]
        live = sorted(grown, key=lambda pair: -pair[1])[:beams]
    return live


@pytest.mark.parametrize("beams", [1, 2, 4])
def test_beams_are_those_of_a_search_without_caches(original, decoder, beams):
    expected = plain_beam_search(original, beams, 6)
    before = kvfuse.memory_in_use()
    found = beam_search(decoder, PROMPT, beams=beams, max_new_tokens=6)
    assert [h.token_ids for h in found] == [tokens for tokens, _ in expected]
    # Six log probabilities of logits that exact mode gives to 1e-5.
    np.testing.assert_allclose(
        [h.log_probability for h in found], [total for _, total in expected], atol=1e-4
    )
    assert kvfuse.memory_in_use() == before


def test_one_beam_is_greedy(decoder):
    from kvfuse.generate import Generation

    greedy = list(Generation(decoder, PROMPT, max_new_tokens=8))
    (found,) = beam_search(decoder, PROMPT, beams=1, max_new_tokens=8)
    assert list(found.token_ids) == greedy


def test_an_end_token_ends_a_hypothesis(decoder):
    (first,) = beam_search(decoder, PROMPT, beams=1, max_new_tokens=3)
    end = first.token_ids[1]
    found = beam_search(
        decoder, PROMPT, beams=2, max_new_tokens=5, length_penalty=0.0, eos_ids=frozenset([end])
    )
    assert any(h.finished for h in found)
    assert all(end not in h.token_ids for h in found)
    scores = [h.score(0.0) for h in found]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("options", [{"beams": 0}, {"max_new_tokens": 0}])
def test_bad_options_are_named(decoder, options):
    with pytest.raises(kvfuse.OptionError, match=rf"\[{next(iter(options))}\] expected at least 1; found 0"):
        beam_search(decoder, PROMPT, **options)


def test_a_model_with_float_caches_is_refused(original):
    with pytest.raises(kvfuse.ModelError, match="caches are all inside"):
        beam_search(Decoder(kvfuse.InferenceSession(original.SerializeToString())), PROMPT)
