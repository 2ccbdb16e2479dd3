import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
from tiny_feeds import IDS, feeds, logits

import kvfuse
from kvfuse import _native

HALF = len(IDS) // 2


def test_an_original_model_runs_as_in_onnxruntime(original):
    ours = kvfuse.InferenceSession(original)
    plain = onnxruntime.InferenceSession(original, providers=["CPUExecutionProvider"])
    empty = {i.name: np.zeros((1, 2, 0, 16), np.float32) for i in plain.get_inputs() if "past" in i.name}
    for got, expected in zip(
        ours.run(None, feeds([IDS]) | empty), plain.run(None, feeds([IDS]) | empty), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    assert ours.get_providers() == ["CPUExecutionProvider"]
    assert ours.sequences == []
    assert ours.past_length == 0
    ours.reset()


def test_bytes_and_path_objects_are_accepted(exact, session):
    from_bytes = kvfuse.InferenceSession(exact.read_bytes())
    np.testing.assert_array_equal(logits(from_bytes, [IDS]), logits(session, [IDS]))


def test_the_cache_goes_on_from_run_to_run(exact, session):
    whole = logits(kvfuse.InferenceSession(exact), [IDS])
    first = logits(session, [IDS[:HALF]])
    assert session.past_length == HALF
    second = logits(session, [IDS[HALF:]], past=HALF)
    assert session.past_length == len(IDS)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-5)


def test_each_batch_row_has_its_own_sequence(session):
    rows = [IDS[:4], IDS[4:8]]
    together = logits(session, rows)
    assert [len(sequence) for sequence in session.sequences] == [4, 4]
    for row, ids in enumerate(rows):
        session.reset()
        np.testing.assert_allclose(logits(session, [ids])[0], together[row], atol=1e-5)
        assert session.past_length == 4


def test_reset_starts_a_new_conversation(session):
    first = logits(session, [IDS])
    session.reset()
    assert session.past_length == 0
    np.testing.assert_array_equal(logits(session, [IDS]), first)


def test_past_length_is_refused_when_rows_differ(session):
    logits(session, [IDS[:4], IDS[4:]])
    session.sequences[1].truncate(1)
    with pytest.raises(
        kvfuse.SequenceError, match=r"\[past_length\] expected rows of one length; found \[4, 1\]"
    ):
        session.past_length  # noqa: B018


def test_kv_past_length_rolls_back_and_starts_again(session):
    whole = logits(session, [IDS])
    again = logits(session, [IDS[HALF:]], past=HALF, kv_past_length=[HALF])
    np.testing.assert_allclose(again, whole[:, HALF:], atol=1e-5)
    np.testing.assert_array_equal(logits(session, [IDS], kv_past_length=[0]), whole)


def test_two_sessions_of_one_file_share_nothing(exact, session):
    other = kvfuse.InferenceSession(exact)
    logits(session, [IDS])
    assert (session.past_length, other.past_length) == (len(IDS), 0)
    assert {s.id for s in session.sequences}.isdisjoint(s.id for s in other.sequences)


def test_one_options_object_serves_several_sessions(exact):
    options = onnxruntime.SessionOptions()
    first, second = (kvfuse.InferenceSession(exact, options) for _ in range(2))
    logits(first, [IDS])
    logits(second, [IDS[:3]])
    assert (first.past_length, second.past_length) == (len(IDS), 3)


def test_set_providers_starts_over(session):
    logits(session, [IDS])
    session.set_providers(["CPUExecutionProvider"])
    assert session.past_length == 0
    logits(session, [IDS[:3]])
    assert session.past_length == 3


def test_the_sequences_go_with_the_session(exact):
    gc.collect()
    before = _native.live_sequences()
    session = kvfuse.InferenceSession(exact)
    logits(session, [IDS])
    view = session.sequences[0]
    assert _native.live_sequences() == before + 1
    del session
    gc.collect()
    assert _native.live_sequences() == before
    with pytest.raises(kvfuse.SequenceError, match=f"found {view.id}"):
        len(view)


def test_an_unknown_handle_is_refused_by_name_and_changes_nothing(session):
    expected = logits(session, [IDS])
    session.reset()
    logits(session, [IDS[:HALF]])
    with pytest.raises(kvfuse.SequenceError, match=r"^\[sequence\] expected .*; found 987654321$") as caught:
        logits(session, [IDS], kv_sequence=[987654321])
    assert type(caught.value.__cause__).__module__.startswith("onnxruntime")
    assert session.past_length == HALF
    np.testing.assert_allclose(logits(session, [IDS[HALF:]], past=HALF), expected[:, HALF:], atol=1e-5)


def test_a_destroyed_handle_is_refused_by_name(session):
    sequence = kvfuse.KvSequence()
    logits(session, [IDS], kv_sequence=[sequence.id])
    sequence.close()
    with pytest.raises(kvfuse.SequenceError, match=f"found {sequence.id}"):
        logits(session, [IDS], kv_sequence=[sequence.id])


def test_a_past_length_beyond_the_end_is_refused_and_changes_nothing(session):
    logits(session, [IDS[:HALF]])
    with pytest.raises(kvfuse.SequenceError, match=f"present length {HALF}; found {HALF + 1}"):
        logits(session, [IDS], past=HALF + 1, kv_past_length=[HALF + 1])
    assert session.past_length == HALF


def test_a_sequence_of_another_model_is_refused(session, low_bit):
    with kvfuse.KvSequence() as sequence:
        logits(session, [IDS], kv_sequence=[sequence.id])
        with pytest.raises(
            kvfuse.SequenceError, match=rf"\[.*\] expected .*{sequence.id}|\[sequence {sequence.id}\]"
        ):
            logits(kvfuse.InferenceSession(low_bit), [IDS], kv_sequence=[sequence.id])
        assert len(sequence) == len(IDS)


def test_two_runs_at_once_on_one_sequence_never_mix(session):
    """Each run either gives what it would alone or says that the sequence is in use."""
    expected = logits(session, [IDS])

    def attempts():
        outcomes = []
        for _ in range(40):
            try:
                outcomes.append(logits(session, [IDS], kv_past_length=[0]))
            except kvfuse.SequenceError as error:
                outcomes.append(error)
        return outcomes

    with ThreadPoolExecutor(2) as pool:
        outcomes = [
            outcome for future in [pool.submit(attempts) for _ in range(2)] for outcome in future.result()
        ]
    for outcome in outcomes:
        if isinstance(outcome, kvfuse.SequenceError):
            assert "sequence in use" in str(outcome)
        else:
            np.testing.assert_allclose(outcome, expected, atol=1e-5)
    assert sum(not isinstance(outcome, kvfuse.SequenceError) for outcome in outcomes) > 0
    session.reset()
    np.testing.assert_array_equal(logits(session, [IDS]), expected)


def test_sequences_run_at_once(exact, session):
    """Each thread decodes its own sequence and gets what it would get alone."""
    prompts = [IDS[i:] + IDS[:i] for i in range(4)]
    expected = [logits(kvfuse.InferenceSession(exact), [ids]) for ids in prompts]

    def decode(ids):
        with kvfuse.KvSequence() as sequence:
            steps = [
                logits(session, [[token]], past=past, kv_sequence=[sequence.id])
                for past, token in enumerate(ids)
            ]
        return np.concatenate(steps, axis=1)

    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(decode, prompts), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("way", ["run", "run_with_ort_values", "run_with_iobinding"])
def test_every_way_to_run_translates_our_errors(session, way):
    arrays = feeds([IDS], kv_sequence=[987654321])
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("logits")
    calls = {
        "run": lambda: session.run(None, arrays),
        "run_with_ort_values": lambda: session.run_with_ort_values(["logits"], values),
        "run_with_iobinding": lambda: session.run_with_iobinding(binding),
    }
    with pytest.raises(kvfuse.SequenceError, match="found 987654321"):
        calls[way]()


def test_errors_of_onnxruntime_pass_untouched(session):
    with pytest.raises(Exception, match="Invalid input name: nonsense") as caught:
        session.run(None, feeds([IDS]) | {"nonsense": np.zeros(1, np.int64)})
    assert not isinstance(caught.value, kvfuse.KVFuseError)
