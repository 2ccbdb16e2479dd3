"""The paper model of Apple GPUs: its counting against counts by hand, its bytes against the formula."""

import pytest

from benchmarks import apple_model
from benchmarks.metal_operations import Counting, Text

SMALL = """
#define TWICE(q) for (int q = 0; q < 2; ++q)
inline int mixed(int a, uint b) {
  return a * 3 + int(b >> (2 * 4)) - 1;              // multiply, add, convert, shift, add
}
inline float4 lanes(float4 x, float4 y) {
  const float4 z = x * y;                            // 4 multiplies
  return z + y;                                      // an add: of what width is not said here
}
template <int N>
inline float chain(device const float* data, float x) {
  float sum[N];
  TWICE(q) sum[q] = fma(data[q], x, sum[q]);         // twice: load, multiply-add
  if (kSmall == 1) return sum[0];
  for (int i = 0; i < 3; ++i) sum[0] += exp(x);      // three times: add, special
  for (int step = 16; step > 0; step /= 2)           // five times: add, shuffle, convert
    x += simd_shuffle_xor(x, ushort(step));
  return as_type<float>(mixed(1, 2u));               // what mixed costs
}
"""
KERNELS = apple_model.kernel_text(apple_model.KERNELS)
of_the_counted_text = pytest.mark.skipif(
    apple_model.digest_of(KERNELS) != apple_model.COUNTED,
    reason="the kernel text has changed since it was counted: benchmarks/apple_model.py says what to do",
)
MIXED = {"multiply": 1, "bits": 1, "convert": 1, "add": 2}


def test_operators_and_vectors():
    counting = Counting(Text.read(SMALL))
    assert counting.function("mixed") == MIXED
    assert counting.function("lanes") == {"multiply": 4, "add": 1}


@pytest.mark.parametrize("small", [True, False])
def test_loops_branches_macros_and_calls(small):
    counting = Counting(Text.read(SMALL), truths={"kSmall == 1": small})
    start = {"load": 2, "multiply-add": 2}
    whole = {"add": 3 + 5 + 2, "special": 3, "shuffle": 5, "convert": 5 + 1, "multiply": 1, "bits": 1}
    assert counting.function("chain") == (start if small else start | whole)


def test_a_loop_of_unknown_length_is_an_error():
    text = Text.read("int f(int n) { int x = 0; for (int k = 0; k < n; ++k) x += 1; return x; }")
    with pytest.raises(ValueError, match="expected how often"):
        Counting(text).function("f")
    assert Counting(text, trips={"k": 7}).function("f") == {"add": 7}


@of_the_counted_text
def test_the_kernels_do_what_attention_takes():
    """Each of 128 channels of a value is one multiply-add; of a key one product."""
    text = Text.read(KERNELS)
    for simd in (True, False):
        counted = apple_model.operations(text, apple_model.FORMATS[1], 1, simd)
        assert 128 <= counted["multiply-add"] <= 128 + 8  # and a scale of each token
        assert counted["multiply"] >= 128


def test_bytes_are_those_of_the_formats():
    """2 * (head_dim * bits / 8 + bytes of scales), and in the default preset a 64th of an f16 mean."""
    assert [fmt.bytes for fmt in apple_model.FORMATS] == [2 * (64 + 8) + 4, 2 * (64 + 4), 2 * (128 + 4)]


@of_the_counted_text
def test_the_report_names_its_text_and_sources():
    report = apple_model.report(KERNELS)
    assert "sha256" in report
    assert all(line in report for line in apple_model.SOURCES)
    assert report.count("| M4 |") >= 2
