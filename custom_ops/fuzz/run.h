// One run of a model of several layers, without onnxruntime: what ort/begin_op.cc and ort/sdpa_op.cc do, in short.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kvfuse/sequence.h"

namespace fuzz {

struct Layer {
  std::string name;
  kvfuse::CacheFormat format;
};

// Attends over at most this many tokens: a hostile state may claim a trillion that a window has freed.
constexpr int64_t kMostAttended = 4096;

// Runs body(piece) for each piece, in as many threads when `threads` says so.
template <typename Body>
void ForPieces(size_t pieces, bool threads, Body body) {
  std::vector<std::thread> helpers;
  for (size_t piece = 0; piece < pieces; ++piece) {
    if (threads)
      helpers.emplace_back(body, piece);
    else
      body(piece);
  }
  for (std::thread& helper : helpers) helper.join();
}

// Appends `count` tokens after `past` ones (-1: at the end), whose channels are multiples of `value`, and attends with
// one query head per kv head. Throws kvfuse::Error when a layer refuses. Gives the last layer's output.
inline std::vector<float> Run(kvfuse::Sequence& sequence, const std::string& fingerprint,
                              const std::vector<Layer>& layers, int64_t past, int64_t count, float value,
                              bool threads = false) {
  std::vector<std::string> names;
  for (const Layer& layer : layers) names.push_back(layer.name);
  sequence.CheckBegin(fingerprint, names, past);
  const auto [start, run] = sequence.Begin(fingerprint, names, past);
  std::vector<float> output;
  for (const Layer& layer : layers) {
    const kvfuse::CacheFormat& format = layer.format;
    const int heads = format.kv_num_heads;
    sequence.CheckLayer(run, layer.name, format, start + count, count, kvfuse::CpuDevice());
    const auto cache = sequence.StartLayer(run, layer.name, format, kvfuse::CpuDevice());
    {
      std::lock_guard<std::mutex> lock(cache->mutex);
      sequence.CheckRun(run, layer.name);
      std::vector<float> rows(heads * count * std::max(format.key.dim, format.value.dim));
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = value * static_cast<float>(i * 7 % 11);
      const kvfuse::Rows key{rows.data(), count * format.key.dim, format.key.dim};
      cache->Prepare(start, count, key, {rows.data(), count * format.value.dim, format.value.dim});
      output.assign(heads * count * format.value.dim, 0.0f);
      kvfuse::StepArgs step;
      step.query = key;
      step.output = output.data();
      step.output_head_stride = count * format.value.dim;
      step.output_token_stride = format.value.dim;
      step.num_heads = heads;
      step.sequence_length = count;
      step.causal = true;
      std::vector<kvfuse::Phase> phases = cache->Step(step);
      if (start >= kMostAttended) phases.resize(1);  // it only writes the rows
      for (const kvfuse::Phase& phase : phases)
        ForPieces(phase.pieces, threads, [&](size_t piece) { phase.run(piece); });
      cache->Commit();
    }
    sequence.FinishLayer(run);
  }
  return output;
}

}  // namespace fuzz
