// Threads on the library without Python and onnxruntime, for ThreadSanitizer and LeakSanitizer: conversations of their
// own, forks of one prompt that goes on meanwhile, and all that may be asked of a sequence that is running.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../../custom_ops/fuzz/run.h"
#include "kvfuse/error.h"
#include "kvfuse/kvfuse.h"

namespace {

constexpr int kThreads = 4, kRounds = 60;
const std::string kFingerprint = "stress";

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "[stress] broken promise: %s\n", what);
  std::abort();
}

std::vector<fuzz::Layer> Model() {
  kvfuse::CacheFormat format;
  format.kv_num_heads = 2;
  format.key.dim = format.value.dim = 16;
  format.key.full = format.value.full = true;
  format.n_recent = 5;
  format.block = 4;
  format.n_sink = 3;
  format.center_keys = true;
  kvfuse::CacheFormat windowed = format;
  windowed.window_left = 20;
  windowed.center_keys = false;
  return {{"first", format}, {"second", windowed}};
}

// One conversation with forks, rollbacks and freezes; gives its last state and all its outputs.
std::string Converse(const std::vector<fuzz::Layer>& model, int seed) {
  kvfuse::SequenceTable& table = kvfuse::SequenceTable::Global();
  auto sequence = table.Create();
  std::string all;
  for (int round = 0; round < kRounds; ++round) {
    const auto value = 0.01f * static_cast<float>(seed * kRounds + round + 1);
    const auto output = fuzz::Run(*sequence, kFingerprint, model, -1, 1 + round % 3, value, round % 4 == 0);
    all.append(reinterpret_cast<const char*>(output.data()), output.size() * sizeof(float));
    if (round % 10 == 5) sequence->Truncate(sequence->Length() - 2);
    if (round % 10 == 7) {
      const auto fork = table.Fork(sequence->id());
      fuzz::Run(*sequence, kFingerprint, model, -1, 3, 9.0f);  // what the fork does not see
      table.Destroy(sequence->id());
      sequence = fork;
    }
    if (round % 20 == 9) {
      const auto thawed = table.Unfreeze(sequence->Freeze());
      table.Destroy(sequence->id());
      sequence = thawed;
    }
  }
  all += sequence->Freeze();
  table.Destroy(sequence->id());
  return all;
}

void OwnConversations(const std::vector<fuzz::Layer>& model) {
  std::vector<std::string> expected, found(kThreads);
  for (int i = 0; i < kThreads; ++i) expected.push_back(Converse(model, i));
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { found[i] = Converse(model, i); });
  for (std::thread& thread : threads) thread.join();
  Require(found == expected, "conversations in threads are what they are alone");
}

// Refusals are part of the game here ("in use", a handle that is gone); anything else is not.
template <typename Body>
void MayBeRefused(Body body) {
  try {
    body();
  } catch (const kvfuse::Error&) {
  }
}

void OneSequenceForAll(const std::vector<fuzz::Layer>& model) {
  kvfuse::SequenceTable& table = kvfuse::SequenceTable::Global();
  const int64_t prompt = table.Create()->id();
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round)
        MayBeRefused([&] {
          const auto fork = table.Fork(prompt);
          MayBeRefused([&] { fuzz::Run(*fork, kFingerprint, model, -1, 2, 0.1f); });
          table.Unfreeze(fork->Freeze());
          if (i == 0) fuzz::Run(*table.Find(prompt), kFingerprint, model, round % 8 == 0 ? 0 : -1, 5, 0.2f, true);
          if (i == 1) table.Find(prompt)->Truncate(table.Find(prompt)->Length() / 2);
          if (i == 2) fuzz::Run(*table.Find(prompt), kFingerprint, model, -1, 1, 0.3f);
          table.Destroy(fork->id());
        });
      --running;
    });
  threads.emplace_back([&] {
    while (running > 0) {
      const auto sequence = table.Find(prompt);
      sequence->Bytes();
      sequence->ExactBegin();
      sequence->SetLimits(1000 + sequence->Length(), -1);
      Require(kvfuse_process_nbytes() >= 0 && kvfuse_live_sequences() > 0, "counts are counts");
    }
  });
  for (std::thread& thread : threads) thread.join();
  Require(fuzz::Run(*table.Find(prompt), kFingerprint, model, 0, 3, 1.0f) ==
              fuzz::Run(*table.Create(), kFingerprint, model, 0, 3, 1.0f),
          "after all that, a sequence starts again like a new one");
}

}  // namespace

int main() {
  const std::vector<fuzz::Layer> model = Model();
  OwnConversations(model);
  Require(kvfuse_live_sequences() == 0 && kvfuse_process_nbytes() == 0, "nothing is left behind");
  OneSequenceForAll(model);
  for (int64_t handle = 1; kvfuse_live_sequences() > 0; ++handle)
    kvfuse_status_release(kvfuse_sequence_destroy(handle));
  Require(kvfuse_process_nbytes() == 0, "destroyed sequences free all pages");
  std::puts("stress: all promises held");
}
