// Nanoseconds per query head and key of every kernel that runs here, without onnxruntime, in one interleaved run:
//   kernel_speed [tokens [queries [rounds]]]     4096 cached tokens, 1 query (decode) and 9 rounds by default
// One thread, 8 kv heads of 128 channels with 2 query heads each; per token: 4 bits, one scale; preset: groups of 32,
// centred keys, a window of 64 exact tokens. Each line is the median of the rounds, with the least and the most.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "../tests/native/kernel_case.h"

namespace kvfuse::vectors {
namespace {

Case What(bool preset, int64_t tokens, int64_t queries) {
  Case c;
  c.format.kv_num_heads = 8;
  c.format.key.dim = c.format.value.dim = 128;
  c.group = 2;
  c.past = tokens - queries;
  c.count = queries;
  c.scale = 0.088f;
  if (preset) {
    c.format.key.full = c.format.value.full = c.format.center_keys = true;
    c.format.key.group_size = c.format.value.group_size = 32;
    c.format.n_recent = c.format.block = 64;
    c.format.n_sink = 4;
  }
  return c;
}

double Seconds(const KernelTable& table, const Problem& problem, const Cache& cache) {
  std::vector<float> output;
  AttendArgs args;
  args.step = problem.Step(output);
  args.cache = cache.view();
  const auto begin = std::chrono::steady_clock::now();
  for (args.kv_head = 0; args.kv_head < problem.what.format.kv_num_heads; ++args.kv_head)
    for (args.query_begin = 0; args.query_begin < problem.what.count; args.query_begin = args.query_end) {
      args.query_end = std::min<int64_t>(problem.what.count, args.query_begin + 64);
      table.attend(args);
    }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void Measure(const char* name, const Case& what, int rounds) {
  const Problem problem(what);
  std::vector<std::unique_ptr<Cache>> caches;
  std::vector<const KernelTable*> tables;
  for (const KernelChoice& choice : KernelChoices()) {
    if (!choice.reason.empty()) continue;
    tables.push_back(FindKernel(choice.name));
    caches.push_back(std::make_unique<Cache>(*tables.back(), problem));
  }
  std::map<std::string, std::vector<double>> times;
  double keys = 0;
  for (int64_t token = 0; token < what.count; ++token) keys += static_cast<double>(what.past + token + 1);
  for (int round = -1; round < rounds; ++round)
    for (size_t i = 0; i < tables.size(); ++i) {
      const double seconds = Seconds(*tables[i], problem, *caches[i]);
      if (round >= 0) times[tables[i]->name].push_back(seconds * 1e9 / (keys * what.num_heads()));
    }
  for (const KernelTable* table : tables) {
    std::vector<double>& all = times[table->name];
    std::sort(all.begin(), all.end());
    std::printf("%-10s %-12s %8.2f ns  (%.2f to %.2f)\n", name, table->name, all[all.size() / 2], all.front(),
                all.back());
  }
}

}  // namespace
}  // namespace kvfuse::vectors

int main(int argc, char** argv) {
  using namespace kvfuse::vectors;
  const int64_t tokens = argc > 1 ? std::atoll(argv[1]) : 4096, queries = argc > 2 ? std::atoll(argv[2]) : 1;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 9;
  std::printf("%lld tokens, %lld queries, %d rounds; time per query head and key\n", static_cast<long long>(tokens),
              static_cast<long long>(queries), rounds);
  Measure("per token", What(false, tokens, queries), rounds);
  Measure("preset", What(true, tokens, queries), rounds);
}
