// Every kernel that this machine can run against the scalar reference, without Python and onnxruntime, so that it
// can be cross-compiled and run under an emulator:
//   kernel_vectors [--cases N] [--kernel NAME]...
// N attention problems at random and at most N of a fixed list, for each kernel; all kernels by default. It uses what
// the library exports, so that it can also be linked to the library as it is installed.
// Rotated rows, codes, scales and int32 scores must be equal; outputs within the bound of Tolerance().
#include <cstdio>
#include <cstdlib>

#include "kernel_case.h"
#include "kvfuse/error.h"
#include "query.h"

namespace kvfuse::vectors {
namespace {

constexpr double kUnit = 0x1p-24;  // half an ulp of 1.0f
constexpr int64_t kSpan = 256;     // tokens that share the steps of integer weights, and where keys may be split

const KernelTable& Reference() { return *FindKernel("reference"); }

int g_failures = 0;

void Report(const std::string& kernel, const std::string& what, const std::string& detail) {
  if (++g_failures > 20) return;
  std::printf("FAILED %s: %s: %s\n", kernel.c_str(), what.c_str(), detail.c_str());
}

// Rows that stress rounding: named in the printed sentence by their index.
std::vector<std::vector<float>> Rows(int dim) {
  Random random(static_cast<uint64_t>(dim));
  std::vector<std::vector<float>> rows(14, std::vector<float>(dim));
  for (int i = 0; i < dim; ++i) {
    const float normal = random.Normal();
    rows[0][i] = 0.0f;
    rows[1][i] = -0.0f;
    rows[2][i] = normal;
    rows[3][i] = normal * (i == dim / 2 ? 50.0f : 1.0f);                           // one outlier channel
    rows[4][i] = static_cast<float>(i % 27 - 13) / 2;                              // ties of 4-bit codes
    rows[5][i] = (static_cast<float>(i % 254) - 126.5f) * 3.0f;                    // ties that a reciprocal breaks
    rows[6][i] = normal * 0x1p-140f;                                               // subnormal numbers
    rows[7][i] = std::clamp(normal, -3.0f, 3.0f) * 1e38f;                          // may overflow when rotated
    rows[8][i] = static_cast<float>(i % 57 - 28) / 4 * (1 + 0x1p-11f + 0x1p-20f);  // scales that halves round up
    rows[9][i] = static_cast<float>(i % 57 - 28) / 4 * 7e4f;                       // scales beyond halves
    rows[10][i] = normal * 3e-8f;                                                  // scales that are subnormal halves
    rows[11][i] = i == dim - 1 ? std::nanf("") : normal;
    rows[12][i] = i == dim / 3 ? std::numeric_limits<float>::infinity() : normal;
    rows[13][i] = i < 2 ? (i == 0 ? 9.0f : -9.0f) : normal;  // the first of equal extremes counts
  }
  rows[4][0] = 7.0f;
  rows[5][0] = 381.0f;
  return rows;
}

bool SameBits(const float* a, const float* b, int count) {  // any NaN is any other
  for (int i = 0; i < count; ++i)
    if (std::memcmp(a + i, b + i, sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  return true;
}

void CheckRotation(const KernelTable& table) {
  for (const int dim :
       {1, 2, 3, 7, 8, 12, 15, 16, 17, 24, 32, 33, 40, 48, 64, 80, 96, 100, 112, 128, 160, 192, 256, 576}) {
    int number = 0;
    for (const std::vector<float>& row : Rows(dim)) {
      std::vector<float> expected = row, found = row;
      Reference().rotate(expected.data(), dim);
      table.rotate(found.data(), dim);
      if (!SameBits(expected.data(), found.data(), dim))
        Report(table.name, "rotate", "dim " + std::to_string(dim) + ", row " + std::to_string(number));
      ++number;
    }
  }
}

template <typename Function>
void ForEachSide(const Function& function) {
  for (const int dim : {1, 7, 8, 12, 16, 20, 32, 33, 36, 40, 64, 72, 80, 96, 112, 128, 192, 256})
    for (const int bits : {4, 8, 16})
      for (const int group_size : {0, 32, 64})
        for (const bool full : {false, true}) {
          if (bits == 16 && (group_size != 0 || full)) continue;
          SideFormat side;
          side.dim = dim;
          side.bits = bits;
          side.group_size = group_size;
          side.full = full;
          function(side);
        }
}

std::string Name(const SideFormat& side, bool key) { return (key ? "keys of " : "values of ") + Describe(side); }

// The scales of a row, NaN for NaN: a quantizer may give any of them.
bool SameRow(const SideFormat& side, const uint8_t* a, const uint8_t* b) {
  if (std::memcmp(a, b, side.code_bytes()) != 0) return false;
  a += side.code_bytes();
  b += side.code_bytes();
  for (int g = 0; g < side.groups(); ++g) {
    float scale[2];
    for (int i = 0; i < 2; ++i) {
      uint16_t half;
      if (side.group_size == 0)
        std::memcpy(&scale[i], (i == 0 ? a : b) + 4 * g, 4);
      else
        std::memcpy(&half, (i == 0 ? a : b) + 2 * g, 2), scale[i] = HalfToFloat(half);
    }
    if (!SameBits(&scale[0], &scale[1], 1)) return false;
  }
  return true;
}

void CheckQuantizer(const KernelTable& table) {
  ForEachSide([&](const SideFormat& side) {
    int number = 0;
    for (const std::vector<float>& row : Rows(side.dim)) {
      std::vector<uint8_t> expected(side.row_bytes(), 0xa5), found = expected;
      Reference().quantize_row(side, row.data(), expected.data(), expected.data() + side.code_bytes());
      table.quantize_row(side, row.data(), found.data(), found.data() + side.code_bytes());
      if (!SameRow(side, expected.data(), found.data()))
        Report(table.name, "quantize_row", Name(side, true) + ", row " + std::to_string(number));
      ++number;
    }
  });
}

// A row comes back as it was stored; storing one changes no other and nothing outside the side.
void CheckStore(const KernelTable& table) {
  constexpr int kGuard = 64;
  ForEachSide([&](const SideFormat& side) {
    for (const bool key : {true, false}) {
      const int64_t bytes = kPageTokens * side.row_bytes();
      std::vector<uint8_t> memory(bytes + 2 * kGuard, 0xa5);
      uint8_t* side_bytes = memory.data() + kGuard;
      std::vector<std::vector<uint8_t>> rows;
      Random random(static_cast<uint64_t>(bytes));
      for (int token = 0; token < kPageTokens; ++token) {
        std::vector<float> row(side.dim);
        for (float& x : row) x = random.Normal();
        rows.emplace_back(side.row_bytes());
        Reference().quantize_row(side, row.data(), rows.back().data(), rows.back().data() + side.code_bytes());
      }
      bool same = true;
      for (int round = 0; round < 2; ++round) {  // the second time over what is there, in another order
        for (int i = 0; i < kPageTokens; ++i) {
          const int token = round == 0 ? i : i * 37 % kPageTokens;
          table.store_row(side, key, side_bytes, token, rows[token].data());
        }
        for (int token = 0; token < kPageTokens; ++token) {
          std::vector<uint8_t> row(side.row_bytes(), 0x5a);
          table.load_row(side, key, side_bytes, token, row.data());
          same &= row == rows[token];
        }
      }
      if (!same) Report(table.name, "store_row, load_row", Name(side, key));
      for (int i = 0; i < kGuard; ++i)
        if (memory[i] != 0xa5 || memory[kGuard + bytes + i] != 0xa5) {
          Report(table.name, "store_row beyond the page", Name(side, key));
          break;
        }
    }
  });
}

// One piece of work cut by keys as well, then merged.
void AttendSplit(const KernelTable& table, AttendArgs args, int splits) {
  const int dim = args.cache.format->value.dim;
  const int64_t queries = (args.query_end - args.query_begin) * (args.step.num_heads / args.cache.format->kv_num_heads);
  const int64_t parts = (args.cache.total + kSpan - 1) / kSpan, floats = PartialFloats(dim);
  std::vector<float> partials(splits * queries * floats, std::nanf(""));
  for (int split = 0; split < splits; ++split) {
    args.key_begin = split * parts / splits * kSpan;
    args.key_end = split + 1 == splits ? INT64_MAX : (split + 1) * parts / splits * kSpan;
    args.partials = partials.data() + split * queries * floats;
    table.attend(args);
  }
  for (int i = 0; i < queries; ++i) {
    Partial result = PartialAt(&partials[i * floats], dim);
    for (int split = 1; split < splits; ++split) {
      const Partial other = PartialAt(&partials[(split * queries + i) * floats], dim);
      result.Add(other);
    }
    FinishQuery(args, i, result);
  }
}

// Attention of the whole problem, in pieces as a session's threads would take them.
std::vector<float> Attend(const KernelTable& table, const Problem& problem, const Cache& cache) {
  std::vector<float> output;
  AttendArgs args;
  args.step = problem.Step(output);
  args.cache = cache.view();
  SetExactWeights(problem.what.exact_weights);
  Random random(problem.what.seed);
  for (args.kv_head = 0; args.kv_head < problem.what.format.kv_num_heads; ++args.kv_head)
    for (int64_t begin = 0; begin < problem.what.count; begin = args.query_end) {
      args.query_begin = begin;
      args.query_end = begin + random.Between(1, static_cast<int>(problem.what.count - begin));
      if (table.splits && random.OneIn(3))
        AttendSplit(table, args, random.Between(2, 4));
      else
        table.attend(args);
    }
  return output;
}

double Norm(const float* row, int dim) {
  double sum = 0.0;
  for (int i = 0; i < dim; ++i) sum += static_cast<double>(row[i]) * row[i];
  return std::sqrt(sum);
}

// The largest partial sum of q . k over all keys that are finite.
double LargestSum(const Problem& problem, int head, int64_t token) {
  const Tensor& keys = problem.key;
  double largest = 0.0;
  for (int64_t j = 0; j < keys.tokens; ++j) {
    double sum = 0.0, most = 0.0;
    for (int i = 0; i < keys.dim; ++i) {
      sum += static_cast<double>(problem.query.at(head, token)[i]) * keys.at(head / problem.what.group, j)[i];
      most = std::max(most, std::fabs(sum));
    }
    if (std::isfinite(sum)) largest = std::max(largest, most);
  }
  return largest;
}

// The root of the sum over spans of (largest weight of the span / sum of all weights)^2, at most 1. From the float
// rows: a score of 4-bit rows may be off by 1, hence the factor e^2.
double LargestShare(const Problem& problem, int head, int64_t token) {
  const Case& c = problem.what;
  const int64_t position = c.past + token;
  std::vector<double> scores;
  double top = -1e30;
  for (int64_t j = 0; j < c.total(); ++j) {
    double score = 0.0;
    for (int i = 0; i < c.format.key.dim; ++i)
      score += static_cast<double>(problem.query.at(head, token)[i]) * problem.key.at(head / c.group, j)[i];
    score *= c.scale;
    if (c.softcap > 0.0f) score = c.softcap * std::tanh(score / c.softcap);
    if (c.bias != 0) score += problem.bias[c.bias == 1 ? (head * c.count + token) * c.total() + j : j];
    const bool seen = (!c.causal || j <= position) &&
                      (c.format.window_left < 0 || j >= position - c.format.window_left) &&
                      (!c.padding || problem.padding[j] != 0);
    scores.push_back(seen ? score : -1e30);
    if (std::isfinite(score)) top = std::max(top, scores.back());
  }
  double sum = 0.0, squares = 0.0, largest = 0.0;
  for (int64_t j = 0; j < c.total(); ++j) {
    const double weight = std::isfinite(scores[j]) ? std::exp(scores[j] - top) : 0.0;
    sum += weight;
    largest = std::max(largest, weight);
    if ((j + 1) % kSpan == 0 || j + 1 == c.total()) squares += largest * largest, largest = 0.0;
  }
  return std::min(1.0, std::exp(2.0) * std::sqrt(squares) / sum);
}

// How far the output vectors of two right kernels may lie apart for one query, u = 2^-24. Roundings are independent and
// as often up as down, so a sum with partial sums of at most s errs by at most 6 sqrt(n) u s (Hoeffding: but for one
// check in 3e7; Higham and Mary, SIAM J. Sci. Comput. 41, 2019), whatever its order:
//   scores     D products and additions where keys are floats, twice for centred keys, and 32 roundings in scales, soft
//   cap and bias; the sums
//              of low-bit rows, or in another order, are taken to be at most twice those of the float rows in order
//   weights    a score's error d makes d of weight, exp() is right within 8 u in either kernel
//   planes     integer weights: each weight times its value's scale is off by at most 1/65024 of the largest in its
//   tile
//              (tile_attend.h), independently: 6 sqrt(256) / 65024 of |v| for a span that has all the weight,
//              less where the weight is spread over spans (see LargestShare)
//   output     a mean of rows none of which is longer than 1.25 |v| (as 4 bits may round it), and rotations keep
//              lengths: relative errors of at most e in all weights move it by 2 e |v|; n additions in numerator and
//              denominator make 12 sqrt(n) u |v| in either kernel, log2 D + 2 roundings when rotating back likewise
double Tolerance(const Problem& problem, int head, int64_t token) {
  const Case& c = problem.what;
  double v = 0.0;
  for (int64_t j = 0; j < c.total(); ++j) {
    const double norm = Norm(problem.value.at(head / c.group, j), problem.value.dim);
    if (std::isfinite(norm)) v = std::max(v, 1.25 * norm);
  }
  const double sum = 2 * c.scale * LargestSum(problem, head, token);
  const bool exact = c.format.has_exact_window() || c.format.n_sink > 0 || c.format.key.bits == 16;
  const double added = c.softcap + (c.bias != 0 ? 8 : 0);
  const double score = 6 * std::sqrt(32 + (exact ? 2 * c.format.key.dim : 0)) * kUnit * (sum + added);
  const double weight = 2 * score + 16 * kUnit;
  const bool planes = c.format.value.scaled() && !c.exact_weights;
  const double share = planes ? LargestShare(problem, head, token) : 0.0;
  return v * (2 * weight + share * 6 * std::sqrt(kSpan) / 65024 + 24 * std::sqrt(c.total()) * kUnit +
              2 * (std::log2(c.format.value.dim) + 2) * kUnit);
}

// The largest error in parts of the tolerance; reports what is beyond.
double CheckAttention(const KernelTable& table, const Case& what) {
  const Problem problem(what);
  const KernelTable& truth = Reference();
  const std::vector<float> expected = Attend(truth, problem, Cache(truth, problem));
  std::vector<float> found = Attend(table, problem, Cache(table, problem));
  const int dim = what.format.value.dim;
  double worst = 0.0;
  for (int row = 0; row < what.count * what.num_heads(); ++row) {
    for (int i = row * dim; i < (row + 1) * dim; ++i) {
      if (std::isfinite(expected[i]) != std::isfinite(found[i])) {
        Report(table.name, "attend, what is finite", what.Describe());
        return 0.0;
      }
      found[i] = std::isfinite(expected[i]) ? found[i] - expected[i] : 0.0f;
    }
    const double error = Norm(&found[row * dim], dim);
    const double tolerance = Tolerance(problem, row % what.num_heads(), row / what.num_heads());
    worst = std::max(worst, error / tolerance);
    if (error <= tolerance) continue;
    Report(table.name, "attend",
           what.Describe() + ": error " + std::to_string(error) + ", allowed " + std::to_string(tolerance));
    break;
  }
  return worst;
}

SideFormat AnySide(Random& random) {
  SideFormat side;
  side.dim = random.OneIn(4) ? random.Between(1, 40) : random.Pick({16, 32, 64, 64, 80, 96, 128, 128, 160, 256});
  side.bits = random.Pick({4, 4, 4, 8, 8, 16});
  side.group_size = side.bits == 16 ? 0 : random.Pick({0, 32, 64});
  side.full = side.bits == 4 && random.OneIn(2);
  side.rotate = !random.OneIn(4);
  return side;
}

// The tokens of a cache: every tail of a SIMD register, sometimes several pages.
Case AnyCase(uint64_t seed) {
  Random random(seed);
  Case c;
  c.seed = seed;
  c.format.kv_num_heads = random.Between(1, 2);
  c.format.key = AnySide(random);
  c.format.value = AnySide(random);
  if (random.OneIn(2)) c.format.value.dim = c.format.key.dim;
  c.format.n_recent = random.OneIn(2) ? 0 : random.Pick({1, 5, 64, 200});
  c.format.block = random.Pick({1, 1, 4, 64, 64});
  c.format.n_sink = random.OneIn(2) ? 0 : random.Between(1, 5);
  c.format.window_left = random.OneIn(4) ? random.Pick({0, 7, 63, 100}) : -1;
  c.format.center_keys = c.format.block > 1 && random.OneIn(2);
  c.group = random.Between(1, 6);
  c.causal = !random.OneIn(6);
  c.count = random.OneIn(2) ? 1 : random.Between(2, 40);
  c.past = random.OneIn(8) ? random.Between(70, 300) : random.Between(0, 70);
  c.scale = 1.0f / std::sqrt(static_cast<float>(c.format.key.dim));
  c.softcap = random.OneIn(6) ? 5.0f : 0.0f;
  c.bias = random.OneIn(4) ? random.Between(1, 2) : 0;
  c.padding = random.OneIn(5);
  c.head_sink = random.OneIn(6);
  c.outlier_key = random.OneIn(6);
  c.exact_weights = random.OneIn(5);
  if (random.OneIn(8)) c.poison = random.Pick({Poison::kKey, Poison::kValue, Poison::kQuery});
  return c;
}

// Which T, head sizes and groups are met is not left to chance.
std::vector<Case> Grid() {
  std::vector<Case> cases;
  const auto add = [&](int64_t past, int64_t count, int dim, int kv_num_heads, int group, int style) {
    Case c;
    c.seed = 1000000 + cases.size();
    c.format.kv_num_heads = kv_num_heads;
    c.group = group;
    c.format.key.dim = c.format.value.dim = dim;
    if (style == 1) {  // the rewriter's default
      c.format.key.full = c.format.value.full = c.format.center_keys = true;
      c.format.key.group_size = c.format.value.group_size = 32;
      c.format.n_recent = c.format.block = 64;
      c.format.n_sink = 4;
    }
    if (style == 2) c.format.key.bits = c.format.value.bits = 8;
    c.past = past;
    c.count = count;
    c.scale = 1.0f / std::sqrt(static_cast<float>(dim));
    cases.push_back(c);
  };
  for (int total = 1; total <= 70; ++total)
    for (const int style : {0, 1, 2}) add(total - 1, 1, 64, 1, 2, style);
  for (const int style : {0, 1, 2}) {
    // kv heads and query heads of each
    for (const auto& [kv_num_heads, group] : {std::pair{1, 1}, {2, 4}, {2, 8}, {8, 2}, {2, 3}, {1, 5}, {2, 6}})
      add(100, 1, 128, kv_num_heads, group, style);
    for (const int dim : {16, 64, 80, 96, 128}) add(999, 1, dim, 2, 4, style), add(150, 30, dim, 1, 3, style);
    add(0, 200, 64, 2, 2, style);
  }
  return cases;
}

// Int32 scores, exactly. Rows of integers whose group extremes are 7, -8 or 127 have the scale 1, so that codes are the
// rows and a score is the integer q . k. A bias of -q . k, worked out here, turns every score into 0 and the output
// into the mean of the values: a score that is wrong by one, in one key of T, moves weight by a factor of e. Extreme
// codes make the sums of some keys large, which shows instructions that saturate.
void CheckScores(const KernelTable& table, int bits, bool full, int group_size, int dim, int64_t total, int kind) {
  Case c;
  c.seed = static_cast<uint64_t>(dim * 1000 + kind);
  c.format.kv_num_heads = 1;
  c.format.key.dim = dim;
  c.format.key.bits = bits;
  c.format.key.full = full;
  c.format.key.group_size = group_size;
  c.format.key.rotate = false;
  c.format.value.dim = 8;
  c.format.value.bits = 16;
  c.group = 3;
  c.past = total - 2;
  c.count = 2;
  c.causal = false;
  c.bias = 1;
  Problem problem(c);
  Random random(c.seed);
  const int high = bits == 8 ? 127 : 7, low = bits == 4 && full ? -8 : -high;
  const auto fill = [&](Tensor& tensor, int least, int most, int width, int extreme) {
    for (int64_t row = 0; row < tensor.heads * tensor.tokens; ++row)
      for (int i = 0; i < dim; ++i) {
        const int same = row % 3 == 2 ? least : most;  // whole rows: sums as large as they get, but not in all rows
        const int any = kind == 0 ? random.Between(least, most) : kind == 1 ? same : random.OneIn(2) ? least : most;
        tensor.at(0, row)[i] = static_cast<float>(i % width == 0 ? extreme : any);
      }
  };
  fill(problem.key, low, high, group_size == 0 ? dim : group_size, full && bits == 4 ? low : high);
  fill(problem.query, -127, 127, dim, 127);
  for (int head = 0; head < c.group; ++head)
    for (int64_t token = 0; token < c.count; ++token)
      for (int64_t j = 0; j < total; ++j) {
        int64_t dot = 0;
        for (int i = 0; i < dim; ++i)
          dot += static_cast<int64_t>(problem.query.at(head, token)[i]) * static_cast<int64_t>(problem.key.at(0, j)[i]);
        problem.bias[(head * c.count + token) * total + j] = static_cast<float>(-dot);
      }
  const std::vector<float> found = Attend(table, problem, Cache(table, problem));
  // The mean of n halves: exact but for n additions of numbers below 8 in either factor, and exp(0) is 1 within 8 u.
  const double tolerance = 8 * (2 * static_cast<double>(total) + 16) * kUnit;
  for (int i = 0; i < 8; ++i) {
    double mean = 0.0;
    for (int64_t j = 0; j < total; ++j)
      mean += HalfToFloat(FloatToHalf(problem.value.at(0, j)[i])) / static_cast<double>(total);
    for (int row = 0; row < c.group * c.count; ++row)
      if (!(std::fabs(found[row * 8 + i] - mean) <= tolerance)) {
        Report(table.name, "int32 scores", c.Describe() + ", kind " + std::to_string(kind));
        return;
      }
  }
}

// Weighted sums of values as large as they get, for instructions that saturate: every code is the largest (or the
// least), so that every output is that number, and either plane of the weights takes its largest byte: the first token
// has the weight 1, 127 * 256 steps; the others as well, or 64 * 256 + `low` steps, and `low` is what their lower plane
// holds.
void CheckValues(const KernelTable& table, int bits, int dim, bool largest, int low) {
  Case c;
  c.seed = static_cast<uint64_t>(dim);
  c.format.kv_num_heads = 1;
  c.format.key.dim = 8;
  c.format.key.rotate = c.format.value.rotate = false;
  c.format.value.dim = dim;
  c.format.value.bits = bits;
  c.group = 5;
  c.past = 300;
  c.causal = false;
  c.bias = 2;
  Problem problem(c);
  const float value = static_cast<float>((largest ? 1 : -1) * (bits == 8 ? 127 : 7));
  std::fill(problem.value.data.begin(), problem.value.data.end(), value);
  std::fill(problem.query.data.begin(), problem.query.data.end(), 0.0f);
  for (int64_t j = 0; j < c.total(); ++j)
    problem.bias[j] = low == 0 || j % kSpan == 0 ? 0.0f : static_cast<float>(std::log((64 * 256 + low) / 32512.0));
  // Weights, at least half of the largest, are off by 1/65024 of it.
  const double tolerance = std::fabs(value) * (2.0 / 65024 + 8 * static_cast<double>(c.total()) * kUnit);
  for (const float found : Attend(table, problem, Cache(table, problem)))
    if (!(std::fabs(found - value) <= tolerance)) {
      Report(table.name, "weighted values", Describe(c.format.value) + ", low plane " + std::to_string(low));
      return;
    }
}

void CheckAllValues(const KernelTable& table) {
  for (const int bits : {4, 8})
    for (const int dim : {8, 16, 24, 32, 64, 80, 96, 128})
      for (const bool largest : {false, true})
        for (const int low : {0, 127, -128}) CheckValues(table, bits, dim, largest, low);
}

void CheckAllScores(const KernelTable& table) {
  for (const int dim : {8, 12, 16, 32, 36, 64, 80, 96, 128, 256})
    for (const int group_size : {0, 32, 64})
      for (const int kind : {0, 1, 2})
        for (const int64_t total : {7, 70}) {
          CheckScores(table, 4, false, group_size, dim, total, kind);
          CheckScores(table, 4, true, group_size, dim, total, kind);
          CheckScores(table, 8, false, group_size, dim, total, kind);
        }
}

void Check(const KernelTable& table, int cases) {
  const int failures = g_failures;
  CheckRotation(table);
  CheckQuantizer(table);
  CheckStore(table);
  CheckAllScores(table);
  CheckAllValues(table);
  double worst = 0.0;
  int count = 0;
  const auto attend = [&](const Case& c) {
    worst = std::max(worst, CheckAttention(table, c));
    ++count;
  };
  const std::vector<Case> grid = Grid();
  const size_t step = cases == 0 ? grid.size() : std::max<size_t>(1, grid.size() / cases);
  for (size_t i = 0; i < grid.size(); i += step) attend(grid[i]);
  for (int seed = 0; seed < cases; ++seed) attend(AnyCase(static_cast<uint64_t>(seed)));
  std::printf("%s %s: %d attention problems, largest error %.3f of the tolerance\n",
              g_failures == failures ? "ok" : "FAILED", table.name, count, worst);
}

int Main(int argc, char** argv) {
  int cases = 1000;
  std::vector<std::string> names;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--cases") == 0) cases = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--kernel") == 0) names.push_back(argv[i + 1]);
  }
  std::printf("in use: %s\n", Kernels().name);
  for (const KernelChoice& choice : KernelChoices()) {
    if (!choice.reason.empty()) std::printf("not run %s: %s\n", choice.name.c_str(), choice.reason.c_str());
    if (names.empty() && choice.reason.empty() && choice.name != "reference") Check(*FindKernel(choice.name), cases);
  }
  for (const std::string& name : names) {
    const KernelTable* table = FindKernel(name);
    if (table == nullptr)
      Report(name, "expected a kernel that runs here", "found none");
    else
      Check(*table, cases);
  }
  if (g_failures > 0) std::printf("%d failures\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvfuse::vectors

int main(int argc, char** argv) {
  try {
    return kvfuse::vectors::Main(argc, argv);
  } catch (const kvfuse::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
