/* kvfuse: sequences of the op kvfuse::QuantizedKvSdpa, for C and every language that can call it.
 *
 * A sequence is the state of one conversation through all layers of one rewritten model. Its handle is the number
 * that goes into the model's input kv_sequence (int64, one per batch row; 0 is the session's own sequence). A
 * sequence belongs to the first model that runs it, until it is empty again.
 *
 * Load this library once, by the same path that onnxruntime is given; a copied file has its own table of
 * sequences. All functions may be called from any thread. None lets an exception out. A function that returns a
 * KvfuseStatus* returns NULL when all is well; otherwise nothing has changed, the status holds one sentence,
 * `[where] expected ...; found ...`, and is released by the caller.
 */
#ifndef KVFUSE_KVFUSE_H_
#define KVFUSE_KVFUSE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32) && !defined(KVFUSE_BUILDING_LIBRARY)
#define KVFUSE_API __declspec(dllimport)
#elif defined(_WIN32)
#define KVFUSE_API __declspec(dllexport)
#else
#define KVFUSE_API __attribute__((visibility("default")))
#endif

/* Raised when a function is added; functions are never changed or taken away within one library name. */
#define KVFUSE_API_VERSION 1

typedef struct KvfuseStatus KvfuseStatus;
typedef struct KvfuseBuffer KvfuseBuffer;

typedef enum KvfuseCode {
  KVFUSE_OK = 0,
  KVFUSE_INVALID = 1,       /* an argument, a handle or a file is not what it should be */
  KVFUSE_OUT_OF_MEMORY = 2, /* the machine's memory, or a limit that was set */
  KVFUSE_IO = 3             /* a file could not be read or written */
} KvfuseCode;

KVFUSE_API uint32_t kvfuse_api_version(void);
KVFUSE_API const char* kvfuse_version(void); /* of the library, e.g. "0.1.0" */

KVFUSE_API KvfuseCode kvfuse_status_code(const KvfuseStatus* status);     /* KVFUSE_OK for NULL */
KVFUSE_API const char* kvfuse_status_message(const KvfuseStatus* status); /* "" for NULL; lives as long as it */
KVFUSE_API void kvfuse_status_release(KvfuseStatus* status);              /* NULL is fine */

/* --- life ------------------------------------------------------------------------------------------------- */

KVFUSE_API KvfuseStatus* kvfuse_sequence_create(int64_t* handle);
/* Safe during a run: memory goes when the run lets go of it. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_destroy(int64_t handle);
/* A second sequence with the same tokens. Pages are shared until one side writes to them: time and memory are
 * O(pages), not O(tokens). During a run, the copy is of what the sequence held before it. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_fork(int64_t handle, int64_t* forked);
/* Beam search in one step: forked[i] has the tokens of handles[index[i]], i < count. The first use of a sequence
 * keeps its handle, later uses are forks, sequences without a use are destroyed. */
KVFUSE_API KvfuseStatus* kvfuse_sequences_reorder(const int64_t* handles, size_t handle_count, const int64_t* index,
                                                  size_t count, int64_t* reordered);
KVFUSE_API size_t kvfuse_live_sequences(void);

/* --- content ---------------------------------------------------------------------------------------------- */

KVFUSE_API KvfuseStatus* kvfuse_sequence_length(int64_t handle, int64_t* tokens);
/* Forgets every token from `tokens` on; 0 starts again. A run under way on the sequence is refused from now on.
 * The result equals a sequence that never saw the dropped tokens as long as `tokens` is not below exact_begin;
 * below, tokens of the exact window that are low-bit already stay low-bit. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_truncate(int64_t handle, int64_t tokens);
/* The first position whose exact f32 rows are still held by every layer. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_exact_begin(int64_t handle, int64_t* position);

/* --- memory ----------------------------------------------------------------------------------------------- */

/* Bytes of pages, over all layers; pages shared with a fork count in both. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_nbytes(int64_t handle, int64_t* bytes);
KVFUSE_API KvfuseStatus* kvfuse_sequence_layer_count(int64_t handle, size_t* layers);
/* Bytes and key of one layer, in the order of the keys; `layer` (may be NULL) lives until the next call with the
 * same thread. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_layer_nbytes(int64_t handle, size_t position, const char** layer,
                                                      int64_t* bytes);
/* Limits for one sequence; -1 for none. A run that would pass one is refused with a sentence. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_set_limits(int64_t handle, int64_t max_tokens, int64_t max_bytes);
/* Bytes of all pages of this process, shared ones once; and their limit, -1 for none. */
KVFUSE_API int64_t kvfuse_process_nbytes(void);
KVFUSE_API KvfuseStatus* kvfuse_set_process_limit(int64_t max_bytes);

/* --- saving ----------------------------------------------------------------------------------------------- */

/* The state in a safetensors container, independent of kernel and machine, with a checksum. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_freeze(int64_t handle, KvfuseBuffer** buffer);
KVFUSE_API const void* kvfuse_buffer_data(const KvfuseBuffer* buffer);
KVFUSE_API size_t kvfuse_buffer_size(const KvfuseBuffer* buffer);
KVFUSE_API void kvfuse_buffer_release(KvfuseBuffer* buffer); /* NULL is fine */
/* A new sequence with a frozen state. The bytes are not trusted: all of them are checked before anything is made.
 * Whether they fit a model is checked by the first run. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_unfreeze(const void* data, size_t size, int64_t* handle);
/* The same with a file (UTF-8 path); saving replaces it in one step or leaves it as it was. */
KVFUSE_API KvfuseStatus* kvfuse_sequence_save(int64_t handle, const char* path);
KVFUSE_API KvfuseStatus* kvfuse_sequence_load(const char* path, int64_t* handle);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVFUSE_KVFUSE_H_ */
