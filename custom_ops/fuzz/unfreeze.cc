// libFuzzer harness of kvfuse_sequence_unfreeze: hostile bytes are refused, or give a sequence that can be used
// and that freezes to a state which is stable from then on. See tools/fuzz_unfreeze.sh.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "json.h"
#include "kvfuse/error.h"
#include "kvfuse/kvfuse.h"
#include "kvfuse/sequence.h"
#include "mutate.h"
#include "run.h"

namespace {

using kvfuse::LayerCache;
using kvfuse::LayerSnapshot;

constexpr int64_t kMostChannels = 4096;  // of a layer that is run on: the bytes do not pay for its new token

// Says at the end how much of the input got past the checks; mutants that are all refused test little.
struct Tally {
  int64_t inputs = 0, accepted = 0;
  ~Tally() { std::fprintf(stderr, "[fuzz] %lld inputs, %lld accepted\n", (long long)inputs, (long long)accepted); }
} g_tally;

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "[fuzz] broken promise: %s\n", what);
  std::abort();
}

// Null when refused; the sentence is then there and nothing else is.
int64_t Unfreeze(const void* data, size_t size) {
  const size_t live = kvfuse_live_sequences();
  const int64_t used = kvfuse_process_nbytes();
  int64_t handle = 0;
  KvfuseStatus* status = kvfuse_sequence_unfreeze(data, size, &handle);
  if (status == nullptr) return handle;
  Require(kvfuse_status_code(status) == KVFUSE_INVALID, "a refusal is about the bytes");
  const std::string sentence = kvfuse_status_message(status);
  Require(sentence.rfind('[', 0) == 0 && sentence.find("; found") != std::string::npos, "a refusal is a sentence");
  Require(kvfuse::IsUtf8(sentence), "a refusal can be printed");
  kvfuse_status_release(status);
  Require(handle == 0 && kvfuse_live_sequences() == live, "a refused state leaves no sequence");
  Require(kvfuse_process_nbytes() == used, "a refused state leaves no pages");
  return 0;
}

std::string Freeze(int64_t handle) {
  KvfuseBuffer* buffer = nullptr;
  Require(kvfuse_sequence_freeze(handle, &buffer) == nullptr, "an accepted state freezes");
  std::string bytes(static_cast<const char*>(kvfuse_buffer_data(buffer)), kvfuse_buffer_size(buffer));
  kvfuse_buffer_release(buffer);
  return bytes;
}

int64_t Length(int64_t handle) {
  int64_t length = -1;
  Require(kvfuse_sequence_length(handle, &length) == nullptr, "an accepted state has a length");
  return length;
}

// Reads each row that is there, as export and a later query would.
void ReadRows(const LayerCache& cache) {
  const kvfuse::CacheFormat& format = cache.format();
  std::vector<float> row(std::max(format.key.dim, format.value.dim));
  for (const bool key : {true, false})
    for (int head = 0; head < std::min(format.kv_num_heads, 4); ++head)
      for (int64_t j = std::max<int64_t>(0, cache.length() - 300); j < cache.length(); ++j)
        cache.ReadRow(key, head, j, row.data());
}

// A run of the bound model, unless its rows are so large that the input's bytes do not pay for them.
void RunIfSmall(int64_t handle, int64_t count) {
  const auto sequence = kvfuse::SequenceTable::Global().Find(handle);
  const kvfuse::SafetensorsReader in(fuzz::View(fuzz::Current()));
  std::vector<fuzz::Layer> layers;
  for (int64_t i = 0; i < in.Number("layers"); ++i) {
    layers.push_back({in.Metadata(std::to_string(i) + ".layer"), {}});
    kvfuse::CacheFormat& format = layers.back().format;
    sequence->ReadLayer(layers.back().name, [&](const LayerCache& cache) { format = cache.format(); });
    const int64_t channels = int64_t{format.kv_num_heads} * (format.key.dim + format.value.dim);
    if (channels > kMostChannels || format.block > 4096 || format.n_sink > 4096) return;
  }
  const int64_t past = Length(handle);
  fuzz::Run(*sequence, in.Metadata("fingerprint"), layers, -1, count, 0.5f);
  if (!layers.empty()) Require(Length(handle) == past + count, "a run on an accepted state appends its tokens");
}

void Use(int64_t handle) {
  const int64_t length = Length(handle);
  const std::string frozen = Freeze(handle);
  const int64_t again = Unfreeze(frozen.data(), frozen.size());
  Require(again != 0, "what freeze writes is accepted");
  Require(Freeze(again) == frozen, "a state is stable under freeze and unfreeze");
  int64_t fork = 0;
  Require(kvfuse_sequence_fork(handle, &fork) == nullptr, "an accepted state forks");

  const kvfuse::SafetensorsReader in(fuzz::View(fuzz::Current()));
  for (int64_t i = 0; i < in.Number("layers"); ++i)
    kvfuse::SequenceTable::Global().Find(handle)->ReadLayer(in.Metadata(std::to_string(i) + ".layer"), ReadRows);
  if (length < (int64_t{1} << 39)) {
    RunIfSmall(handle, 1);
    RunIfSmall(handle, 70);
  }
  Require(Freeze(fork) == frozen, "a fork does not see what comes after it");
  // Rollbacks may be refused (a sliding window has freed the tokens), and all end in something that freezes.
  for (const int64_t to : {length - 1, length - 20, length / 2, int64_t{1}, int64_t{0}}) {
    if (to < 0) continue;
    KvfuseStatus* status = kvfuse_sequence_truncate(again, to);
    if (status == nullptr) {
      Require(Length(again) == to, "a truncated sequence has the length asked for");
      const std::string shorter = Freeze(again);
      const int64_t other = Unfreeze(shorter.data(), shorter.size());
      Require(other != 0, "a truncated state freezes to what is accepted");
      kvfuse_status_release(kvfuse_sequence_destroy(other));
    }
    kvfuse_status_release(status);
  }
  for (const int64_t done : {again, fork}) Require(kvfuse_sequence_destroy(done) == nullptr, "handles are destroyed");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ++g_tally.inputs;
  const int64_t handle = Unfreeze(data, size);
  if (handle == 0) return 0;
  ++g_tally.accepted;
  fuzz::Current().assign(reinterpret_cast<const char*>(data), size);
  Use(handle);
  Require(kvfuse_sequence_destroy(handle) == nullptr, "the sequence is destroyed");
  Require(kvfuse_live_sequences() == 0 && kvfuse_process_nbytes() == 0, "nothing is left behind");
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned int seed) {
  const std::string mutated = fuzz::Mutate({reinterpret_cast<const char*>(data), size}, most, seed);
  std::memcpy(data, mutated.data(), mutated.size());
  return mutated.size();
}
