// One step of a device's layer cache: what is uploaded, which kernels run over how many threadgroups.
#include <algorithm>
#include <cstring>

#include "device/layer_cache.h"
#include "kvfuse/error.h"

namespace kvfuse {
namespace {

using namespace kvfuse_abi;

// Threadgroups that fill a GPU: 132 multiprocessors with four of 128 threads each; more do no harm.
constexpr int64_t kFullDevice = 528;
constexpr int64_t kMaxScratch = int64_t{1} << 28;  // bytes; a longer prompt attends in several passes
constexpr int kMaxInt = 0x3fffffff;

int Clamped(int64_t value) { return static_cast<int>(std::min<int64_t>(value, kMaxInt)); }

// Places of arrays in one buffer, each on a multiple of 16 bytes.
class Places {
 public:
  int64_t Add(int64_t bytes) {
    const int64_t at = size_;
    size_ += CeilDiv(bytes, 16) * 16;
    return at;
  }
  int64_t size() const { return size_; }

 private:
  int64_t size_ = 16;  // a buffer is never empty
};

Dispatch::Argument In(const std::shared_ptr<DeviceBuffer>& buffer, int64_t offset = 0) {
  Dispatch::Argument argument;
  argument.buffer = buffer.get();
  argument.offset = offset;
  return argument;
}

template <typename Args>
Dispatch::Argument Value(const Args& args) {
  Dispatch::Argument argument;
  argument.bytes = &args;
  argument.byte_count = sizeof args;
  return argument;
}

// How the query rows and the tokens of a step are divided.
struct Division {
  int queries = 1;     // rows of a simdgroup
  int row_tiles = 1;   // of one kv head
  int simdgroups = 1;  // of a threadgroup
  int wide = 0, slices = 1;
  int low_splits = 0, exact_splits = 0;

  int splits() const { return low_splits + exact_splits; }
};

int PowerOfTwoFrom(int64_t count, int most) {
  int power = 1;
  while (power < most && power < count) power *= 2;
  return power;
}

// The tokens that some query of [first, last] sees, in tiles: low-bit and exact ones.
struct Tiles {
  int64_t low = 0, exact = 0;
};

Tiles CountTiles(const CacheFormat& format, const LayerSpan& span, int64_t first, int64_t last, bool causal) {
  const auto from = [&](int64_t p) { return format.window_left < 0 ? 0 : std::max<int64_t>(0, p - format.window_left); };
  const auto exact = [&](int64_t p) { return std::max(span.exact_begin, format.ExactFrom(p)); };
  const int64_t end = causal ? last + 1 : span.chunk.total, begin = from(first);
  Tiles tiles;
  const int64_t low = std::max(begin, format.n_sink), low_end = std::min(end, exact(last));
  if (low < low_end) tiles.low = CeilDiv(low_end, kPageTokens) - low / kPageTokens;
  if (begin < format.n_sink) tiles.exact = CeilDiv(std::min(format.n_sink, end), kExactPageTokens);
  const int64_t window = std::max({exact(first), begin, format.n_sink});
  if (window < end) tiles.exact += CeilDiv(end, kExactPageTokens) - window / kExactPageTokens;
  return tiles;
}

int Splits(int64_t tiles, int simdgroups, int64_t others, int wanted, int most) {
  if (tiles == 0) return 0;
  const int64_t useful = CeilDiv(tiles, wanted > 0 ? 1 : simdgroups);
  return static_cast<int>(std::clamp<int64_t>(wanted > 0 ? wanted : CeilDiv(kFullDevice, others), 1,
                                              std::min<int64_t>(useful, most)));
}

Division Divide(const CacheFormat& format, const DeviceLayout& layout, const Tiles& tiles, int num_heads,
                int64_t tokens, int wanted_splits) {
  Division d;
  const int64_t rows = tokens * (num_heads / format.kv_num_heads);
  d.queries = PowerOfTwoFrom(rows, kMaxQueries);
  d.row_tiles = static_cast<int>(CeilDiv(rows, d.queries));
  d.wide = layout.value.chunks > kSimd ? 1 : 0;
  d.slices = static_cast<int>(CeilDiv(layout.value.chunks, d.wide ? 2 * kSimd : kSimd));
  const int groups = format.value.scaled() && format.value.group_size != 0 ? 128 / format.value.group_size : 1;
  const int floats = d.queries * std::max(groups * kTile, d.wide ? 256 : 128);
  d.simdgroups = std::min<int>({kMaxSimdgroups, kWeightFloats / floats,
                                PowerOfTwoFrom(std::max<int64_t>({1, tiles.low, tiles.exact}), kMaxSimdgroups)});
  const int64_t others = int64_t{d.row_tiles} * format.kv_num_heads * d.slices;
  d.low_splits = Splits(tiles.low, d.simdgroups, others, wanted_splits, kMaxSplits / 2);
  d.exact_splits = Splits(tiles.exact, d.simdgroups, others, wanted_splits, kMaxSplits / 2);
  return d;
}

// Rows [heads][tokens][dim] into [heads][tokens][pitch], or with tokens first.
void Pack(const Rows& rows, int64_t heads, int64_t tokens, const Side& side, bool tokens_first, float* out) {
  for (int64_t i = 0; i < heads * tokens; ++i, out += side.pitch) {
    const int64_t head = tokens_first ? i % heads : i / tokens, token = tokens_first ? i / heads : i % tokens;
    std::memcpy(out, rows.at(head, token), side.dim * sizeof(float));
    std::fill(out + side.dim, out + side.pitch, 0.0f);
  }
}

}  // namespace

// The host's copy of a step's staging buffer, and where its parts lie.
struct DeviceLayerCache::Launch {
  Places staged, scratched;
  int64_t key = 0, value = 0, query = 0, padding = 0, bias = 0, head_sink = 0;  // bytes in staging
  int64_t codes = 0, scales = 0, sums = 0, stats = 0, partials = 0, output = 0;  // bytes in scratch
  DeviceWorkspace workspace;
  DeviceContext& context;

  explicit Launch(DeviceContext& owner) : context(owner) {}
  Launch(const Launch&) = delete;
  ~Launch() {
    if (workspace.staging != nullptr) context.ReturnWorkspace(std::move(workspace));
  }

  void Stage(const std::vector<uint8_t>& bytes) {
    workspace = context.TakeWorkspace(staged.size(), scratched.size());
    context.device().Upload(*workspace.staging, 0, bytes.data(), static_cast<int64_t>(bytes.size()));
  }
  // `buffer`, or where nothing of it is read some other one.
  const std::shared_ptr<DeviceBuffer>& Or(const std::shared_ptr<DeviceBuffer>& buffer) const {
    return buffer != nullptr ? buffer : workspace.staging;
  }
};

Cache DeviceLayerCache::CacheArgs() const {
  const LayerSpan::Chunk& chunk = span_.chunk;
  Cache cache{};
  cache.key = layout_.key;
  cache.value = layout_.value;
  cache.kv_heads = format_.kv_num_heads;
  cache.past = static_cast<int>(chunk.past);
  cache.total = static_cast<int>(chunk.total);
  cache.exact_begin = static_cast<int>(span_.exact_begin);
  cache.head_bytes = layout_.head_bytes;
  cache.exact_floats = layout_.exact_floats;
  cache.low_table = table_.offset(0);
  cache.exact_table = table_.offset(1);
  cache.mean_table = table_.offset(2);
  cache.block = Clamped(format_.block);
  cache.n_recent = Clamped(format_.n_recent);
  cache.n_sink = Clamped(format_.n_sink);
  cache.window_left = Clamped(format_.window_left);
  cache.exact_window = format_.has_exact_window();
  cache.centered = format_.centered();
  cache.sink_rows = static_cast<int>(sink_capacity_);
  return cache;
}

std::vector<Phase> DeviceLayerCache::Step(const StepArgs& args) {
  return {{1, [this, args](size_t) { Run(args); }}};
}

void DeviceLayerCache::Run(const StepArgs& step) {
  const LayerSpan::Chunk& chunk = span_.chunk;
  const int64_t tokens = step.sequence_length, heads = step.num_heads, rows = tokens * heads;
  if (tokens == 0) return;
  const int64_t added = chunk.total - chunk.past;

  // What of the masks the kernels read: padding only when something is padded, a broadcast bias as it is.
  const bool padded = step.padding != nullptr && std::memchr(step.padding, 0, chunk.total) != nullptr;
  const int64_t bias_heads = step.bias_head_stride == 0 ? 1 : heads;
  const int64_t bias_tokens = step.bias_query_stride == 0 ? 1 : tokens;
  const int64_t bias_keys = step.bias_key_stride == 0 ? 1 : chunk.total;

  const Tiles tiles = CountTiles(format_, span_, chunk.past, chunk.total - 1, step.causal);
  Division division =
      Divide(format_, layout_, tiles, step.num_heads, tokens, context_.options().splits);
  const int64_t row_bytes = int64_t{division.splits()} * (layout_.value.pitch + 2) * 4;
  const int64_t pass = std::clamp<int64_t>(kMaxScratch / (row_bytes * heads), 1, tokens);  // tokens at a time
  if (pass < tokens) division = Divide(format_, layout_, tiles, step.num_heads, pass, context_.options().splits);

  Launch launch(context_);
  launch.key = launch.staged.Add(format_.kv_num_heads * added * layout_.key.pitch * 4);
  launch.value = launch.staged.Add(format_.kv_num_heads * added * layout_.value.pitch * 4);
  launch.query = launch.staged.Add(rows * layout_.key.pitch * 4);
  launch.head_sink = launch.staged.Add(step.head_sink == nullptr ? 0 : heads * 4);
  launch.bias = launch.staged.Add(step.bias == nullptr ? 0 : bias_heads * bias_tokens * bias_keys * 4);
  launch.padding = launch.staged.Add(padded ? chunk.total : 0);
  launch.codes = launch.scratched.Add(rows * layout_.query_chunks * 16);
  launch.scales = launch.scratched.Add(rows * 4);
  launch.sums = launch.scratched.Add(rows * layout_.key.groups * 4);
  launch.stats = launch.scratched.Add(division.splits() * pass * heads * 8);
  launch.partials = launch.scratched.Add(division.splits() * pass * heads * layout_.value.pitch * 4);
  launch.output = launch.scratched.Add(rows * layout_.value.dim * 4);

  std::vector<uint8_t> staging(launch.staged.size());
  const auto floats = [&staging](int64_t at) { return reinterpret_cast<float*>(staging.data() + at); };
  Pack(chunk_key_, format_.kv_num_heads, added, layout_.key, false, floats(launch.key));
  Pack(chunk_value_, format_.kv_num_heads, added, layout_.value, false, floats(launch.value));
  Pack(step.query, heads, tokens, layout_.key, true, floats(launch.query));
  if (step.head_sink != nullptr) std::copy(step.head_sink, step.head_sink + heads, floats(launch.head_sink));
  if (padded) std::memcpy(staging.data() + launch.padding, step.padding, chunk.total);
  if (step.bias != nullptr) {
    float* out = floats(launch.bias);
    for (int64_t h = 0; h < bias_heads; ++h)
      for (int64_t t = 0; t < bias_tokens; ++t) {
        const float* from = step.bias + h * step.bias_head_stride + t * step.bias_query_stride;
        for (int64_t j = 0; j < bias_keys; ++j) *out++ = from[j * step.bias_key_stride];
      }
  }
  launch.Stage(staging);
  const std::shared_ptr<DeviceBuffer>&up = launch.workspace.staging, &scratch = launch.workspace.scratch;

  AppendArgs append{};
  append.cache = CacheArgs();
  append.query_tasks = format_.key.scaled() ? static_cast<int>(rows) : 0;
  if (chunk.encode_from < chunk.encode_to)
    append.encode_tasks =
        static_cast<int>(2 * format_.kv_num_heads * (CeilDiv(chunk.encode_to, 8) - chunk.encode_from / 8));
  append.store_tasks = static_cast<int>(2 * format_.kv_num_heads * (chunk.total - chunk.store_from));
  append.sink_to = static_cast<int>(sinks_held(chunk.total));
  append.sink_tasks =
      static_cast<int>(2 * format_.kv_num_heads * std::max<int64_t>(0, append.sink_to - chunk.past));
  append.query_chunks = layout_.query_chunks;
  append.encode_from = static_cast<int>(chunk.encode_from);
  append.encode_to = static_cast<int>(chunk.encode_to);
  append.store_from = static_cast<int>(chunk.store_from);

  AttendArgs attend{};
  attend.cache = append.cache;
  attend.heads = step.num_heads;
  attend.low_splits = division.low_splits;
  attend.exact_splits = division.exact_splits;
  attend.query_chunks = layout_.query_chunks;
  attend.slices = division.slices;
  attend.causal = step.causal;
  attend.padded = padded;
  attend.biased = step.bias != nullptr;
  attend.bias_head = bias_heads == 1 ? 0 : static_cast<int>(bias_tokens * bias_keys);
  attend.bias_query = bias_tokens == 1 ? 0 : static_cast<int>(bias_keys);
  attend.bias_key = bias_keys == 1 ? 0 : 1;
  attend.scale = step.scale;
  attend.softcap = step.softcap;

  MergeArgs merge{};
  merge.dim = layout_.value.dim;
  merge.pitch = layout_.value.pitch;
  merge.heads = step.num_heads;
  merge.low_splits = division.low_splits;
  merge.exact_splits = division.exact_splits;
  merge.rotate = layout_.value.rotate;
  merge.sink = step.head_sink != nullptr;

  Device& device = context_.device();
  std::vector<float> output(rows * layout_.value.dim);
  {
    // A pool that another fork makes grow must not go between these launches and their buffers.
    std::lock_guard<std::mutex> lock(memory_->mutex);
    const std::shared_ptr<DeviceBuffer>&low = launch.Or(memory_->low.buffer()),
                                       &exact = launch.Or(memory_->exact.buffer()),
                                       &means = launch.Or(memory_->means.buffer()), &sinks = launch.Or(sinks_);
    Dispatch dispatch;
    dispatch.kernel = "append";
    dispatch.arguments = {Value(append),           In(low),
                          In(exact),               In(means),
                          In(sinks),               table_.argument(),
                          In(up, launch.key),      In(up, launch.value),
                          In(up, launch.query),    In(scratch, launch.codes),
                          In(scratch, launch.scales), In(scratch, launch.sums)};
    const int64_t tasks =
        int64_t{append.query_tasks} + append.encode_tasks + append.store_tasks + append.sink_tasks;
    dispatch.groups[0] = static_cast<uint32_t>(tasks);
    dispatch.threads = kSimd;
    if (tasks > 0) device.Launch(dispatch);

    for (int64_t first = 0; first < tokens; first += pass) {
      const int64_t count = std::min(pass, tokens - first);
      attend.first_token = static_cast<int>(first);
      attend.tokens = static_cast<int>(count);
      if (division.splits() > 0) {
        dispatch = {};
        dispatch.kernel = "attend";
        dispatch.constants = {{kConstantVariant, context_.options().simd},
                              {kConstantQueries, division.queries},
                              {kConstantWide, division.wide}};
        dispatch.arguments = {Value(attend),
                              In(low),
                              In(exact),
                              In(means),
                              In(sinks),
                              table_.argument(),
                              In(up, launch.key),
                              In(up, launch.value),
                              In(up, launch.query),
                              In(scratch, launch.codes),
                              In(scratch, launch.scales),
                              In(scratch, launch.sums),
                              In(up, launch.padding),
                              In(up, launch.bias),
                              In(scratch, launch.partials),
                              In(scratch, launch.stats)};
        dispatch.groups[0] = static_cast<uint32_t>(division.splits());
        dispatch.groups[1] =
            static_cast<uint32_t>(CeilDiv(count * (heads / format_.kv_num_heads), division.queries));
        dispatch.groups[2] = static_cast<uint32_t>(format_.kv_num_heads * division.slices);
        dispatch.threads = static_cast<uint32_t>(kSimd * division.simdgroups);
        device.Launch(dispatch);
      }
      merge.rows = static_cast<int>(count * heads);
      dispatch = {};
      dispatch.kernel = "merge";
      dispatch.arguments = {Value(merge), In(scratch, launch.partials), In(scratch, launch.stats),
                            In(up, launch.head_sink), In(scratch, launch.output + first * heads * merge.dim * 4)};
      dispatch.groups[0] = static_cast<uint32_t>(merge.rows);
      // Threads beyond the channels share the splits, eight or more each.
      const int64_t width = CeilDiv(merge.dim, kSimd) * kSimd;
      dispatch.threads = static_cast<uint32_t>(
          width > kMergeThreads
              ? kMergeThreads / 2
              : width * std::clamp<int64_t>(CeilDiv(division.splits(), 8), 1, kMergeThreads / width));
      device.Launch(dispatch);
    }
  }
  device.Download(output.data(), *scratch, launch.output, static_cast<int64_t>(output.size()) * 4);
  for (int64_t row = 0; row < rows; ++row)
    std::copy(output.begin() + row * merge.dim, output.begin() + (row + 1) * merge.dim,
              step.output + row % heads * step.output_head_stride + row / heads * step.output_token_stride);
}

std::vector<int32_t> DeviceLayerCache::IntegerScores(const Rows& query, int num_heads, int64_t tokens) {
  if (!format_.key.scaled() || format_.window_left >= 0)
    Fail("[integer scores] expected keys of 4 or 8 bits without a sliding window; found ", format_.Describe());
  const int64_t rows = tokens * num_heads, encoded = span_.encoded_end, groups = layout_.key.groups;
  std::vector<int32_t> scores(rows * encoded * groups);
  if (scores.empty()) return scores;
  Launch launch(context_);
  launch.query = launch.staged.Add(rows * layout_.key.pitch * 4);
  launch.codes = launch.scratched.Add(rows * layout_.query_chunks * 16);
  launch.scales = launch.scratched.Add(rows * 4);
  launch.sums = launch.scratched.Add(rows * groups * 4);
  launch.output = launch.scratched.Add(static_cast<int64_t>(scores.size()) * 4);
  std::vector<uint8_t> staging(launch.staged.size());
  Pack(query, num_heads, tokens, layout_.key, true, reinterpret_cast<float*>(staging.data() + launch.query));
  launch.Stage(staging);
  const std::shared_ptr<DeviceBuffer>&up = launch.workspace.staging, &scratch = launch.workspace.scratch;

  AppendArgs append{};
  append.cache = CacheArgs();
  append.cache.past = append.cache.total = static_cast<int>(encoded);
  append.query_tasks = static_cast<int>(rows);
  append.query_chunks = layout_.query_chunks;
  AttendArgs attend{};
  attend.cache = append.cache;
  attend.heads = num_heads;
  attend.tokens = static_cast<int>(tokens);
  attend.query_chunks = layout_.query_chunks;
  std::lock_guard<std::mutex> lock(memory_->mutex);
  table_.Sync(context_.device(), low_, exact_, means_);
  attend.cache.low_table = table_.offset(0);
  Dispatch dispatch;
  dispatch.kernel = "append";
  dispatch.arguments = {Value(append), In(up), In(up), In(up), In(up), table_.argument(), In(up), In(up),
                        In(up, launch.query), In(scratch, launch.codes), In(scratch, launch.scales),
                        In(scratch, launch.sums)};
  dispatch.groups[0] = static_cast<uint32_t>(rows);
  context_.device().Launch(dispatch);
  dispatch = {};
  dispatch.kernel = "scores";
  dispatch.constants = {{kConstantVariant, context_.options().simd}};
  dispatch.arguments = {Value(attend), In(memory_->low.buffer()), table_.argument(), In(scratch, launch.codes),
                        In(scratch, launch.sums), In(scratch, launch.output)};
  dispatch.groups[0] = static_cast<uint32_t>(CeilDiv(encoded, kPageTokens));
  dispatch.groups[1] = static_cast<uint32_t>(CeilDiv(tokens * (num_heads / format_.kv_num_heads), 2));
  dispatch.groups[2] = static_cast<uint32_t>(format_.kv_num_heads);
  context_.device().Launch(dispatch);
  context_.device().Download(scores.data(), *scratch, launch.output, static_cast<int64_t>(scores.size()) * 4);
  return scores;
}

}  // namespace kvfuse
