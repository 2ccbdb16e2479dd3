"""Speculative decoding gives the target's greedy text, whatever the draft proposes."""

import pytest

import kvfuse
from examples.speculative import speculate
from kvfuse.decoder import Decoder
from kvfuse.generate import Generation
from models import tiny_decoder

PROMPT = [3, 17, 5, 40, 11]


def open_tiny(seed, **options):
    model = kvfuse.rewrite(tiny_decoder.build("decomposed", seed=seed), **options).model
    return Decoder(kvfuse.InferenceSession(model.SerializeToString()))


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("options", [{"n_recent": 4096}, {"format": "int4"}, {"n_recent": 4, "block": 8}])
@pytest.mark.parametrize("draft_seed", [0, 1], ids=["agreeing", "disagreeing"])
def test_the_text_is_the_targets_own(draft_seed, options, drafts):
    expected = list(Generation(open_tiny(0, **options), PROMPT, max_new_tokens=40))
    found, runs = speculate(open_tiny(0, **options), open_tiny(draft_seed, **options), PROMPT, 40, drafts)
    assert found == expected
    if draft_seed == 0:
        assert runs == -(-40 // (drafts + 1))  # every proposal is accepted


def test_a_rewind_beyond_the_tokens_is_refused():
    decoder = open_tiny(0)
    decoder.prefill(PROMPT)
    with pytest.raises(kvfuse.SequenceError, match=r"\[rewind\] expected a length from 0 to 5; found 6"):
        decoder.rewind(6)
