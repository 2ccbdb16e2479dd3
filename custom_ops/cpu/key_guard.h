// Whether stored keys are good enough for their queries, looked at once for the first low-bit tokens of a sequence.
//
// The measure is what the damage follows: the relative error that the stored keys alone make in the attention's
// output, |output - exact| / |exact|, for a few queries of the present chunk over sinks, the tokens that have just
// turned low-bit, and the newest ones. On SmolLM2-135M its rank correlation with the error of a whole layer is 0.87;
// the relative error of the keys themselves has 0.3, that of the scores 0.1 (docs/quality-auto.md).
//
// It changes no byte and no output, so it needs no place in the specification of either.
#pragma once

#include <cstdint>
#include <vector>

namespace kvfuse {

constexpr int64_t kGuardTokens = 256;  // tokens from this position on are not looked at
constexpr int64_t kGuardAtOnce = 128;  // low-bit tokens of one step that are, at most
constexpr int64_t kGuardAtLeast = 16;  // fewer say nothing
constexpr int64_t kGuardNewest = 32;   // of the tokens before a query
constexpr int64_t kGuardQueries = 4;   // of a chunk

// One token as a query sees it.
struct GuardedToken {
  const float* key;     // as it came
  const float* stored;  // as its codes say, or the same floats where it is exact
  const float* value;
  float bias;  // added to the score; -infinity hides the token
};

struct GuardSums {
  double error = 0.0, norm = 0.0;  // squares, summed over queries
};

// What the stored keys change in one query's output: |output - exact|^2 and |exact|^2.
GuardSums OutputError(const float* query, const std::vector<GuardedToken>& tokens, int key_dim, int value_dim,
                      float scale, float softcap);

// The state of one layer of one sequence.
class KeyGuard {
 public:
  struct Span {
    int64_t from = 0, to = 0;  // positions of the low-bit tokens to look at
    bool empty() const { return from >= to; }
  };

  // The part of the tokens [from, to), which have just turned low-bit, that is to be looked at now.
  Span Claim(int64_t from, int64_t to, int64_t sinks, int heads);
  // From any thread, one head each.
  void Add(int head, const GuardSums& sums);
  // NaN before anything was measured.
  double error() const;
  void Reset() { *this = KeyGuard(); }

 private:
  int64_t seen_ = 0;
  std::vector<GuardSums> heads_;
};

}  // namespace kvfuse
