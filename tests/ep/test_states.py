"""States are interchangeable: what one device has written goes on on another, bit by bit."""

from collections.abc import Iterator

import numpy as np
import pytest
from op_harness import OpSession
from token_model import FORMATS, check_outputs, check_state, fresh_state, run, two_layers

import kvfuse
from kvfuse import _native

TOKENS = [(7 * index) % 40 for index in range(150)]


@pytest.fixture(params=FORMATS)
def pair(request, device) -> Iterator[tuple[OpSession, OpSession]]:
    """Sessions of one model, on the CPU and on the device."""
    graph = two_layers(FORMATS[request.param])
    return OpSession(graph, device="cpu"), OpSession(graph, device=device)


def test_both_write_the_same_frozen_bytes(pair):
    on_cpu, on_device = pair
    for length in (1, 40, 100):
        assert fresh_state(on_device, TOKENS[:length]) == fresh_state(on_cpu, TOKENS[:length])


def test_a_sequence_moves_between_devices_at_every_run(pair):
    with kvfuse.KvSequence() as sequence:
        held = 0
        for turn, count in enumerate((20, 1, 50, 3, 1, 40)):
            session = pair[turn % 2]
            held += count
            results = run(session, [sequence.id], [TOKENS[held - count : held]])
            check_outputs(session, results, 0, TOKENS[:held], count)
            check_state(session, sequence.id, TOKENS[:held])


@pytest.mark.parametrize("back", [False, True])
def test_a_frozen_state_goes_on_elsewhere(pair, back):
    source, target = pair[::-1] if back else pair
    with kvfuse.KvSequence() as sequence:
        run(source, [sequence.id], [TOKENS[:70]])
        state = sequence.freeze()
    with kvfuse.KvSequence.unfreeze(state) as thawed:
        results = run(target, [thawed.id], [TOKENS[70:90]])
        check_outputs(target, results, 0, TOKENS[:90], 20)
        check_state(target, thawed.id, TOKENS[:90])


def test_a_fork_on_another_device_leaves_the_original(pair):
    on_cpu, on_device = pair
    with kvfuse.KvSequence() as sequence:
        run(on_device, [sequence.id], [TOKENS[:70]])
        with sequence.fork() as fork, sequence.fork() as sibling:
            run(on_cpu, [fork.id], [TOKENS[100:110]])
            run(on_device, [sibling.id], [TOKENS[110:120]])
            run(on_device, [sequence.id], [TOKENS[70:75]])
            check_state(on_cpu, fork.id, TOKENS[:70] + TOKENS[100:110])
            check_state(on_device, sibling.id, TOKENS[:70] + TOKENS[110:120])
            check_state(on_device, sequence.id, TOKENS[:75])


def test_truncating_on_a_device_and_going_on(pair):
    _, on_device = pair
    with kvfuse.KvSequence() as sequence:
        run(on_device, [sequence.id], [TOKENS[:60]])
        sequence.truncate(55)
        results = run(on_device, [sequence.id], [TOKENS[80:90]])
        held = TOKENS[:55] + TOKENS[80:90]
        check_outputs(on_device, results, 0, held, 10)
        check_state(on_device, sequence.id, held)


def test_a_batch_mixes_sequences_of_both_devices(pair):
    on_cpu, on_device = pair
    with kvfuse.KvSequence() as first, kvfuse.KvSequence() as second:
        run(on_cpu, [first.id], [TOKENS[:30]])
        run(on_device, [second.id], [TOKENS[:45]])
        results = run(on_device, [first.id, second.id], [TOKENS[30:33], TOKENS[45:48]])
        for row, (sequence, length) in enumerate(((first, 33), (second, 48))):
            check_outputs(on_device, results, row, TOKENS[:length], 3)
            check_state(on_device, sequence.id, TOKENS[:length])


def test_a_refused_run_leaves_a_sequence_of_another_device_as_it_was(pair):
    on_cpu, on_device = pair
    with kvfuse.KvSequence() as sequence:
        run(on_cpu, [sequence.id], [TOKENS[:30]])
        state = sequence.freeze()
        with pytest.raises(Exception, match="expected a kv_past_length from -1 to"):
            run(on_device, [sequence.id], [TOKENS[:3]], kv_past_length=[31])
        assert sequence.freeze() == state


def test_bytes_on_a_device_are_counted(device):
    graph = two_layers(FORMATS["int4"])
    on_device = OpSession(graph, device=device)
    with kvfuse.KvSequence() as sequence:
        run(on_device, [sequence.id], [TOKENS])
        held = _native.sequence_nbytes(sequence.id)
        assert set(held) == {"first", "second"}
        # 150 tokens of one kv head: 4 bytes of codes and a 4-byte scale a side
        assert all(size >= 150 * 2 * 8 for size in held.values())
    assert np.isfinite(list(held.values())).all()
