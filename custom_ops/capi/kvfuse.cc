// The C ABI over the table of sequences: no exception passes it.
#include "kvfuse/kvfuse.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <string>

#include "file.h"
#include "kvfuse/error.h"
#include "kvfuse/page.h"
#include "kvfuse/sequence.h"

struct KvfuseStatus {
  KvfuseCode code;
  std::string message;
};

struct KvfuseBuffer {
  std::string bytes;
};

namespace {

using kvfuse::SequenceTable;

// Made at load time: when memory has run out, none can be had to say so.
KvfuseStatus g_no_memory{KVFUSE_OUT_OF_MEMORY, "[kvfuse] expected enough memory; found none left"};

KvfuseStatus* MakeStatus(KvfuseCode code, const char* message) noexcept {
  try {
    return new KvfuseStatus{code, message};
  } catch (...) {
    return &g_no_memory;
  }
}

template <typename Body>
KvfuseStatus* Guard(Body body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const kvfuse::MemoryError& error) {
    return MakeStatus(KVFUSE_OUT_OF_MEMORY, error.what());
  } catch (const kvfuse::FileError& error) {
    return MakeStatus(KVFUSE_IO, error.what());
  } catch (const std::bad_alloc&) {
    return &g_no_memory;
  } catch (const std::exception& error) {
    return MakeStatus(KVFUSE_INVALID, error.what());
  } catch (...) {
    return MakeStatus(KVFUSE_INVALID, "[kvfuse] expected no foreign exception; found one");
  }
}

template <typename T>
void Required(const T* pointer, const char* name) {
  if (pointer == nullptr) kvfuse::Fail("[kvfuse] expected a non-null ", name, "; found NULL");
}

}  // namespace

uint32_t kvfuse_api_version(void) { return KVFUSE_API_VERSION; }
const char* kvfuse_version(void) { return KVFUSE_VERSION; }

KvfuseCode kvfuse_status_code(const KvfuseStatus* status) { return status == nullptr ? KVFUSE_OK : status->code; }
const char* kvfuse_status_message(const KvfuseStatus* status) {
  return status == nullptr ? "" : status->message.c_str();
}
void kvfuse_status_release(KvfuseStatus* status) {
  if (status != &g_no_memory) delete status;
}

KvfuseStatus* kvfuse_sequence_create(int64_t* handle) {
  return Guard([&] {
    Required(handle, "handle");
    *handle = SequenceTable::Global().Create()->id();
  });
}

KvfuseStatus* kvfuse_sequence_destroy(int64_t handle) {
  return Guard([&] { SequenceTable::Global().Destroy(handle); });
}

KvfuseStatus* kvfuse_sequence_fork(int64_t handle, int64_t* forked) {
  return Guard([&] {
    Required(forked, "forked");
    *forked = SequenceTable::Global().Fork(handle)->id();
  });
}

KvfuseStatus* kvfuse_sequences_reorder(const int64_t* handles, size_t handle_count, const int64_t* index, size_t count,
                                       int64_t* reordered) {
  return Guard([&] {
    if (handle_count > 0) Required(handles, "handles");
    if (count > 0) Required(index, "index"), Required(reordered, "reordered");
    const std::vector<int64_t> result = SequenceTable::Global().Reorder(
        std::vector<int64_t>(handles, handles + handle_count), std::vector<int64_t>(index, index + count));
    std::copy(result.begin(), result.end(), reordered);
  });
}

size_t kvfuse_live_sequences(void) { return SequenceTable::Global().size(); }

KvfuseStatus* kvfuse_sequence_length(int64_t handle, int64_t* tokens) {
  return Guard([&] {
    Required(tokens, "tokens");
    *tokens = SequenceTable::Global().Find(handle)->Length();
  });
}

KvfuseStatus* kvfuse_sequence_truncate(int64_t handle, int64_t tokens) {
  return Guard([&] { SequenceTable::Global().Find(handle)->Truncate(tokens); });
}

KvfuseStatus* kvfuse_sequence_exact_begin(int64_t handle, int64_t* position) {
  return Guard([&] {
    Required(position, "position");
    *position = SequenceTable::Global().Find(handle)->ExactBegin();
  });
}

KvfuseStatus* kvfuse_sequence_nbytes(int64_t handle, int64_t* bytes) {
  return Guard([&] {
    Required(bytes, "bytes");
    int64_t total = 0;
    for (const auto& [layer, size] : SequenceTable::Global().Find(handle)->Bytes()) total += size;
    *bytes = total;
  });
}

KvfuseStatus* kvfuse_sequence_layer_count(int64_t handle, size_t* layers) {
  return Guard([&] {
    Required(layers, "layers");
    *layers = SequenceTable::Global().Find(handle)->Bytes().size();
  });
}

KvfuseStatus* kvfuse_sequence_layer_nbytes(int64_t handle, size_t position, const char** layer, int64_t* bytes) {
  return Guard([&] {
    Required(bytes, "bytes");
    const auto sizes = SequenceTable::Global().Find(handle)->Bytes();
    if (position >= sizes.size())
      kvfuse::Fail("[kvfuse] expected a layer position below ", sizes.size(), "; found ", position);
    const auto found = std::next(sizes.begin(), static_cast<ptrdiff_t>(position));
    *bytes = found->second;
    if (layer == nullptr) return;
    static thread_local std::string name;
    name = found->first;
    *layer = name.c_str();
  });
}

KvfuseStatus* kvfuse_sequence_set_limits(int64_t handle, int64_t max_tokens, int64_t max_bytes) {
  return Guard([&] { SequenceTable::Global().Find(handle)->SetLimits(max_tokens, max_bytes); });
}

int64_t kvfuse_process_nbytes(void) { return kvfuse::Page::BytesInUse(); }

KvfuseStatus* kvfuse_set_process_limit(int64_t max_bytes) {
  return Guard([&] {
    if (max_bytes < -1) kvfuse::Fail("[kvfuse] expected a limit of -1 (none) or more bytes; found ", max_bytes);
    kvfuse::Page::SetLimit(max_bytes);
  });
}

KvfuseStatus* kvfuse_sequence_freeze(int64_t handle, KvfuseBuffer** buffer) {
  return Guard([&] {
    Required(buffer, "buffer");
    *buffer = new KvfuseBuffer{SequenceTable::Global().Find(handle)->Freeze()};
  });
}

const void* kvfuse_buffer_data(const KvfuseBuffer* buffer) {
  return buffer == nullptr ? nullptr : buffer->bytes.data();
}
size_t kvfuse_buffer_size(const KvfuseBuffer* buffer) { return buffer == nullptr ? 0 : buffer->bytes.size(); }
void kvfuse_buffer_release(KvfuseBuffer* buffer) { delete buffer; }

KvfuseStatus* kvfuse_sequence_unfreeze(const void* data, size_t size, int64_t* handle) {
  return Guard([&] {
    Required(data, "data");
    Required(handle, "handle");
    *handle = SequenceTable::Global().Unfreeze({static_cast<const char*>(data), size})->id();
  });
}

KvfuseStatus* kvfuse_sequence_save(int64_t handle, const char* path) {
  return Guard([&] {
    Required(path, "path");
    kvfuse::SaveSequence(*SequenceTable::Global().Find(handle), path);
  });
}

KvfuseStatus* kvfuse_sequence_load(const char* path, int64_t* handle) {
  return Guard([&] {
    Required(path, "path");
    Required(handle, "handle");
    *handle = kvfuse::LoadSequence(path)->id();
  });
}
