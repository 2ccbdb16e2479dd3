// One step of a device's layer cache: what is uploaded, which kernels run over how many threadgroups.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "device/layer_cache.h"
#include "kvfuse/error.h"

namespace kvfuse {
namespace {

using namespace kvfuse_abi;

// Threadgroups that fill the largest GPU at hand at once: 132 multiprocessors, each with as many of 128 threads as the
// registers of so many query rows let in. Smaller GPUs take them in turns.
int64_t FullDevice(int queries) { return 132 * (queries <= 4 ? 4 : 2); }

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

// The tokens that some query of [first, last] sees: low-bit ones in pieces of 32, exact ones in tiles of 16.
struct Tiles {
  int64_t low = 0, exact = 0;
};

Tiles CountTiles(const CacheFormat& format, const LayerSpan& span, int64_t first, int64_t last, bool causal) {
  const auto from = [&](int64_t p) {
    return format.window_left < 0 ? 0 : std::max<int64_t>(0, p - format.window_left);
  };
  const auto exact = [&](int64_t p) { return std::max(span.exact_begin, format.ExactFrom(p)); };
  const int64_t end = causal ? last + 1 : span.chunk.total, begin = from(first);
  Tiles tiles;
  const int64_t low = std::max(begin, format.n_sink), low_end = std::min(end, exact(last));
  if (low < low_end) tiles.low = CeilDiv(low_end, kSimd) - low / kSimd;
  if (begin < format.n_sink) tiles.exact = CeilDiv(std::min(format.n_sink, end), kExactPageTokens);
  const int64_t window = std::max({exact(first), begin, format.n_sink});
  if (window < end) tiles.exact += CeilDiv(end, kExactPageTokens) - window / kExactPageTokens;
  return tiles;
}

int Splits(int64_t tiles, int simdgroups, int64_t room, int wanted) {
  if (tiles == 0) return 0;
  const int64_t useful = std::min<int64_t>(CeilDiv(tiles, wanted > 0 ? 1 : simdgroups), kMaxSplits / 2);
  return static_cast<int>(std::clamp<int64_t>(wanted > 0 ? wanted : room, 1, useful));
}

Division Divide(const CacheFormat& format, const DeviceLayout& layout, const Tiles& tiles, int num_heads,
                int64_t tokens, int wanted_splits) {
  Division d;
  const int64_t rows = tokens * (num_heads / format.kv_num_heads);
  d.queries = PowerOfTwoFrom(rows, kMaxQueries);
  d.row_tiles = static_cast<int>(CeilDiv(rows, d.queries));
  d.wide = layout.value.chunks > kSimd ? 1 : 0;
  d.slices = static_cast<int>(CeilDiv(layout.value.chunks, d.wide ? 2 * kSimd : kSimd));
  const int floats = d.queries * (d.wide ? 256 : 128);  // of threadgroup memory for a simdgroup
  d.simdgroups = std::min<int>({kMaxSimdgroups, kWeightFloats / floats,
                                PowerOfTwoFrom(std::max<int64_t>({1, tiles.low, tiles.exact}), kMaxSimdgroups)});
  const int64_t others = int64_t{d.row_tiles} * format.kv_num_heads * d.slices;
  // The exact tokens' share first: few groups, each with more bytes than a low-bit one.
  const int64_t full = FullDevice(d.queries);
  d.exact_splits = Splits(tiles.exact, d.simdgroups, full / others, wanted_splits);
  d.low_splits = Splits(tiles.low, d.simdgroups, full / others - d.exact_splits, wanted_splits);
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

// One step on its way: its arguments, and where its arrays lie in the two buffers of its workspace.
struct DeviceLayerCache::Launch {
  DeviceContext& context;
  DeviceWorkspace workspace;
  Places staged, scratched;
  int64_t key = 0, value = 0, query = 0, padding = 0, bias = 0, head_sink = 0;   // bytes in staging
  int64_t codes = 0, scales = 0, sums = 0, stats = 0, partials = 0, output = 0;  // bytes in scratch
  int64_t tokens = 0, heads = 0, pass = 0;  // query tokens, their heads, and how many tokens attend at a time
  bool direct = false;                      // the output comes as the caller wants it
  Division division;
  AppendArgs append{};
  AttendArgs attend{};
  MergeArgs merge{};

  explicit Launch(DeviceContext& owner) : context(owner) {}
  Launch(const Launch&) = delete;
  ~Launch() {
    if (workspace.staging != nullptr) context.ReturnWorkspace(std::move(workspace));
  }

  void TakeWorkspace() { workspace = context.TakeWorkspace(staged.size(), scratched.size()); }
  float* host(int64_t offset) { return reinterpret_cast<float*>(workspace.host.data() + offset); }
  void Upload() { context.device().Upload(*workspace.staging, 0, workspace.host.data(), staged.size()); }
  // `buffer`, or where nothing of it is read some other one.
  Dispatch::Argument Or(const std::shared_ptr<DeviceBuffer>& buffer) const {
    return In(buffer != nullptr ? buffer : workspace.staging);
  }
  Dispatch::Argument Up(int64_t offset) const { return In(workspace.staging, offset); }
  Dispatch::Argument Scratch(int64_t offset) const { return In(workspace.scratch, offset); }
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

// Divides the work, and uploads rows and masks.
void DeviceLayerCache::Plan(const StepArgs& step, Launch& launch) {
  const LayerSpan::Chunk& chunk = span_.chunk;
  const int64_t tokens = step.sequence_length, heads = step.num_heads, rows = tokens * heads;
  const int64_t added = chunk.total - chunk.past;
  launch.tokens = tokens;
  launch.heads = heads;

  const Tiles tiles = CountTiles(format_, span_, chunk.past, chunk.total - 1, step.causal);
  const int splits = context_.options().splits;
  Division division = Divide(format_, layout_, tiles, step.num_heads, tokens, splits);
  const int64_t row_bytes = int64_t{division.splits()} * (layout_.value.pitch + 2) * 4;
  const int64_t pass = std::clamp<int64_t>(kMaxScratch / std::max<int64_t>(1, row_bytes * heads), 1, tokens);
  if (pass < tokens) division = Divide(format_, layout_, tiles, step.num_heads, pass, splits);
  launch.division = division;
  launch.pass = pass;

  // What of the masks the kernels read: padding only when something is padded, a broadcast bias as it is.
  const bool padded = step.padding != nullptr && std::memchr(step.padding, 0, chunk.total) != nullptr;
  const int64_t bias_heads = step.bias_head_stride == 0 ? 1 : heads;
  const int64_t bias_tokens = step.bias_query_stride == 0 ? 1 : tokens;
  const int64_t bias_keys = step.bias_key_stride == 0 ? 1 : chunk.total;

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

  launch.TakeWorkspace();
  Pack(chunk_key_, format_.kv_num_heads, added, layout_.key, false, launch.host(launch.key));
  Pack(chunk_value_, format_.kv_num_heads, added, layout_.value, false, launch.host(launch.value));
  Pack(step.query, heads, tokens, layout_.key, true, launch.host(launch.query));
  if (step.head_sink != nullptr) std::copy(step.head_sink, step.head_sink + heads, launch.host(launch.head_sink));
  if (padded) std::memcpy(launch.host(launch.padding), step.padding, chunk.total);
  if (step.bias != nullptr) {
    float* out = launch.host(launch.bias);
    for (int64_t h = 0; h < bias_heads; ++h)
      for (int64_t t = 0; t < bias_tokens; ++t) {
        const float* from = step.bias + h * step.bias_head_stride + t * step.bias_query_stride;
        for (int64_t j = 0; j < bias_keys; ++j) *out++ = from[j * step.bias_key_stride];
      }
  }
  launch.Upload();

  AppendArgs& append = launch.append;
  append.cache = CacheArgs();
  append.query_tasks = format_.key.scaled() ? static_cast<int>(rows) : 0;
  if (chunk.encode_from < chunk.encode_to)
    append.encode_tasks =
        static_cast<int>(2 * format_.kv_num_heads * (CeilDiv(chunk.encode_to, 8) - chunk.encode_from / 8));
  append.store_tasks = static_cast<int>(2 * format_.kv_num_heads * (chunk.total - chunk.store_from));
  append.sink_to = static_cast<int>(sinks_held(chunk.total));
  append.sink_tasks = static_cast<int>(2 * format_.kv_num_heads * std::max<int64_t>(0, append.sink_to - chunk.past));
  append.query_chunks = layout_.query_chunks;
  append.encode_from = static_cast<int>(chunk.encode_from);
  append.encode_to = static_cast<int>(chunk.encode_to);
  append.store_from = static_cast<int>(chunk.store_from);

  AttendArgs& attend = launch.attend;
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

  MergeArgs& merge = launch.merge;
  merge.dim = layout_.value.dim;
  merge.pitch = layout_.value.pitch;
  merge.heads = step.num_heads;
  merge.low_splits = division.low_splits;
  merge.exact_splits = division.exact_splits;
  merge.rotate = layout_.value.rotate;
  merge.sink = step.head_sink != nullptr;
  // The caller's order of heads and tokens when that has no gaps.
  const int64_t dim = format_.value.dim;
  launch.direct = step.output_head_stride == tokens * dim && step.output_token_stride == dim;
  merge.output_head = static_cast<int>(launch.direct ? tokens * dim : dim);
  merge.output_token = static_cast<int>(launch.direct ? dim : heads * dim);
  if (!launch.direct) launch.direct = step.output_head_stride == dim && step.output_token_stride == heads * dim;
}

// Queues the kernels. Call it with the memory's mutex held: a pool that another fork makes grow must not go between
// these launches and their buffers.
void DeviceLayerCache::Queue(Launch& launch) {
  Device& device = context_.device();
  const Division& division = launch.division;
  const Dispatch::Argument low = launch.Or(memory_->low.buffer()), exact = launch.Or(memory_->exact.buffer()),
                           means = launch.Or(memory_->means.buffer()), sinks = launch.Or(sinks_),
                           table = table_.argument(), key = launch.Up(launch.key), value = launch.Up(launch.value),
                           query = launch.Up(launch.query), codes = launch.Scratch(launch.codes),
                           scales = launch.Scratch(launch.scales), sums = launch.Scratch(launch.sums),
                           partials = launch.Scratch(launch.partials), stats = launch.Scratch(launch.stats);

  const AppendArgs& a = launch.append;
  const int64_t tasks = int64_t{a.query_tasks} + a.encode_tasks + a.store_tasks + a.sink_tasks;
  Dispatch append;
  append.kernel = "append";
  append.arguments = {Value(a), low, exact, means, sinks, table, key, value, query, codes, scales, sums};
  append.groups[0] = static_cast<uint32_t>(tasks);
  append.threads = kSimd;
  if (tasks > 0) device.Launch(append);

  for (int64_t first = 0; first < launch.tokens; first += launch.pass) {
    const int64_t count = std::min(launch.pass, launch.tokens - first);
    launch.attend.first_token = static_cast<int>(first);
    launch.attend.tokens = static_cast<int>(count);
    Dispatch attend;
    attend.kernel = "attend";
    attend.constants = {{kConstantVariant, context_.options().simd},
                        {kConstantQueries, division.queries},
                        {kConstantWide, division.wide}};
    attend.arguments = {Value(launch.attend), low, exact, means, sinks, table, key, value, query, codes, scales, sums};
    attend.arguments.insert(attend.arguments.end(),
                            {launch.Up(launch.padding), launch.Up(launch.bias), partials, stats});
    attend.groups[0] = static_cast<uint32_t>(division.splits());
    attend.groups[1] = static_cast<uint32_t>(CeilDiv(count * (launch.heads / format_.kv_num_heads), division.queries));
    attend.groups[2] = static_cast<uint32_t>(format_.kv_num_heads * division.slices);
    attend.threads = static_cast<uint32_t>(kSimd * division.simdgroups);
    if (division.splits() > 0) device.Launch(attend);

    launch.merge.rows = static_cast<int>(count * launch.heads);
    const int64_t dim = launch.merge.dim, width = CeilDiv(CeilDiv(dim, 4), kSimd) * kSimd;
    Dispatch merge;
    merge.kernel = "merge";
    merge.arguments = {Value(launch.merge), partials, stats, launch.Up(launch.head_sink),
                       launch.Scratch(launch.output + first * launch.merge.output_token * 4)};
    merge.groups[0] = static_cast<uint32_t>(launch.merge.rows);
    // Threads beyond the quads of channels share the splits, four or more each.
    merge.threads =
        static_cast<uint32_t>(width * std::clamp<int64_t>(CeilDiv(division.splits(), 4), 1, kMergeThreads / width));
    device.Launch(merge);
  }
}

void DeviceLayerCache::Run(const StepArgs& step) {
  if (step.sequence_length == 0) return;
  Launch launch(context_);
  Plan(step, launch);
  {
    std::lock_guard<std::mutex> lock(memory_->mutex);
    Queue(launch);
  }
  const int64_t rows = launch.tokens * launch.heads, dim = format_.value.dim;
  if (launch.direct) {
    context_.device().Download(step.output, *launch.workspace.scratch, launch.output, rows * dim * 4);
    return;
  }
  std::vector<float> output(rows * dim);
  context_.device().Download(output.data(), *launch.workspace.scratch, launch.output, rows * dim * 4);
  for (int64_t row = 0; row < rows; ++row)
    std::copy(
        output.begin() + row * dim, output.begin() + (row + 1) * dim,
        step.output + row % launch.heads * step.output_head_stride + row / launch.heads * step.output_token_stride);
}

double DeviceLayerCache::TimeStep(const StepArgs& step, int repeats) {
  Launch launch(context_);
  Plan(step, launch);
  std::lock_guard<std::mutex> lock(memory_->mutex);
  Queue(launch);  // loads the kernels
  context_.device().Wait();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) Queue(launch);
  context_.device().Wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / repeats;
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
  launch.TakeWorkspace();
  Pack(query, num_heads, tokens, layout_.key, true, launch.host(launch.query));
  launch.Upload();

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
  const Dispatch::Argument none = launch.Up(0), table = table_.argument(), codes = launch.Scratch(launch.codes),
                           sums = launch.Scratch(launch.sums);
  dispatch.arguments = {Value(append), none, none, none, none, table, none, none};
  dispatch.arguments.insert(dispatch.arguments.end(),
                            {launch.Up(launch.query), codes, launch.Scratch(launch.scales), sums});
  dispatch.groups[0] = static_cast<uint32_t>(rows);
  context_.device().Launch(dispatch);
  dispatch = {};
  dispatch.kernel = "scores";
  dispatch.constants = {{kConstantVariant, context_.options().simd}};
  dispatch.arguments = {Value(attend), In(memory_->low.buffer()), table, codes, sums, launch.Scratch(launch.output)};
  dispatch.groups[0] = static_cast<uint32_t>(CeilDiv(encoded, kSimd));
  dispatch.groups[1] = static_cast<uint32_t>(CeilDiv(tokens * (num_heads / format_.kv_num_heads), 2));
  dispatch.groups[2] = static_cast<uint32_t>(format_.kv_num_heads);
  context_.device().Launch(dispatch);
  context_.device().Download(scores.data(), *launch.workspace.scratch, launch.output,
                             static_cast<int64_t>(scores.size()) * 4);
  return scores;
}

}  // namespace kvfuse
