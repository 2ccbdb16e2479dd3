// What both halves of attend share: which tokens a query row sees, running softmax, lanes of value channels. A part of
// kernels.metal.
#pragma once

// N query rows of one kv head, and what each sees: positions [begin, end), from exact_from on (and sinks) as floats.
template <int N>
struct QueryRows {
  int row[N];  // token * heads + head
  int begin[N];
  int end[N];  // 0 for a row that is not there
  int exact_from[N];
};

template <int N>
inline void find_rows(constant AttendArgs& args, int kv_head, int tile, thread QueryRows<N>& rows) {
  constant Cache& cache = args.cache;
  const int share = args.heads / cache.kv_heads;
  EACH_ROW(q) {
    const int index = tile * N + q, token = args.first_token + min(index / share, args.tokens - 1);
    const int position = cache.past + token;
    rows.row[q] = token * args.heads + kv_head * share + index % share;
    rows.begin[q] = cache.window_left < 0 ? 0 : max(0, position - cache.window_left);
    rows.end[q] = index / share >= args.tokens ? 0 : args.causal != 0 ? position + 1 : cache.total;
    const int limit = position - cache.n_recent + 1;
    const int window = cache.exact_window == 0 ? kNever : limit <= 0 ? 0 : limit / cache.block * cache.block;
    rows.exact_from[q] = max(cache.exact_begin, window);
  }
}

// The running softmax of N rows: the maximum is the same in all lanes, the sum is this lane's share.
template <int N>
struct Softmax {
  float maximum[N];
  float sum[N];
};

// Weighted values: this lane's quads of channels, and the second ones when it has two.
template <int N>
struct Sums {
  float4 first[N];
  float4 second[N];
};

template <int N>
inline void start(thread Softmax<N>& softmax, thread Sums<N>& sums) {
  EACH_ROW(q) {
    softmax.maximum[q] = kNoScore;
    softmax.sum[q] = 0.0f;
    sums.first[q] = float4(0.0f);
    sums.second[q] = float4(0.0f);
  }
}

// Takes every lane's score into account: where one is a new maximum, what was summed so far shrinks.
template <int N>
inline void raise(thread Softmax<N>& softmax, thread Sums<N>& sums, int q, float score) {
  if (!simd_any(score > softmax.maximum[q])) return;
  const float maximum = largest_of_all(largest(softmax.maximum[q], score));
  const float shrink = exp(softmax.maximum[q] - maximum);
  softmax.maximum[q] = maximum;
  softmax.sum[q] *= shrink;
  sums.first[q] = sums.first[q] * shrink;
  if (kWide != 0) sums.second[q] = sums.second[q] * shrink;
}

// Which value channels a lane sums: lanes [0, width) have one quad each, and 32 / width parts share the tokens.
struct ValueLanes {
  int width, part, parts;
  int quad, quads;  // of the first quad; the second is 32 further
};

inline ValueLanes value_lanes(constant Side& side, int slice, int lane) {
  ValueLanes lanes;
  const int first = slice * (kWide != 0 ? 2 * kSimd : kSimd);
  lanes.width = 1;
  while (lanes.width < kSimd && lanes.width < side.chunks - first) lanes.width *= 2;
  lanes.part = lane / lanes.width;
  lanes.parts = kSimd / lanes.width;
  lanes.quad = first + lane % lanes.width;
  lanes.quads = side.chunks;
  return lanes;
}

// scale * q.k -> soft cap -> bias: in this order.
inline float finish_score(constant AttendArgs& args, device const float* bias, int row, int j, float score) {
  if (args.softcap > 0.0f) score = args.softcap * tanh(score / args.softcap);
  if (args.biased != 0) {
    const long token = row / args.heads, head = row % args.heads;
    score += bias[head * args.bias_head + token * args.bias_query + long(j) * args.bias_key];
  }
  return score;
}
