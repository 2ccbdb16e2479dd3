/* Several conversations with one rewritten decoder, through onnxruntime's C API and kvfuse's.
 *
 *   conversations MODEL.onnx LIBKVFUSE_OPS [DEVICE]
 *
 * With a device ("metal", "cuda" or "emulated") the caches live there, through kvfuse's execution provider.
 * Two conversations by handle, a fork that goes another way, a freeze and an unfreeze, and a rollback; each is checked
 * against what must come out. Exit code 0: all of it did.
 */
#include <kvfuse/kvfuse.h>
#include <onnxruntime_c_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 64 };

static const OrtApi* ort;

/* The model, and the room for what one run feeds and gives. */
typedef struct {
  OrtSession* session;
  OrtMemoryInfo* memory;
  size_t vocabulary;
  float* logits; /* [vocabulary], of the last token that was run */
} Decoder;

static void fail(const char* message) {
  fprintf(stderr, "%s\n", message);
  exit(1);
}

static void check_ort(OrtStatus* status) {
  if (status != NULL) fail(ort->GetErrorMessage(status));
}

static void check(KvfuseStatus* status) {
  if (status != NULL) fail(kvfuse_status_message(status));
}

static void expect(int condition, const char* what) {
  if (!condition) fail(what);
  printf("ok: %s\n", what);
}

static OrtValue* int64_tensor(const Decoder* decoder, int64_t* data, int64_t rows, int64_t columns) {
  const int64_t shape[2] = {rows, columns};
  const size_t rank = columns < 0 ? 1 : 2; /* columns < 0: one dimension */
  const size_t count = (size_t)(rank == 1 ? rows : rows * columns);
  OrtValue* value = NULL;
  check_ort(ort->CreateTensorWithDataAsOrtValue(decoder->memory, data, count * sizeof *data, shape, rank,
                                                ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, &value));
  return value;
}

/* Runs `count` tokens of conversation `handle` after `past` tokens, and gives the likeliest next token. What the
 * conversation holds beyond `past` is forgotten first. */
static int64_t run(Decoder* decoder, int64_t handle, const int64_t* tokens, int64_t count, int64_t past) {
  static const char* const inputs[] = {"input_ids", "attention_mask", "position_ids", "kv_sequence", "kv_past_length"};
  static const char* const outputs[] = {"logits"};
  int64_t ids[MAX_TOKENS], mask[MAX_TOKENS], positions[MAX_TOKENS];
  if (past + count > MAX_TOKENS) fail("expected at most 64 tokens");
  memcpy(ids, tokens, (size_t)count * sizeof *ids);
  for (int64_t i = 0; i < past + count; ++i) mask[i] = 1;
  for (int64_t i = 0; i < count; ++i) positions[i] = past + i;
  OrtValue* values[] = {
      int64_tensor(decoder, ids, 1, count),       int64_tensor(decoder, mask, 1, past + count),
      int64_tensor(decoder, positions, 1, count), int64_tensor(decoder, &handle, 1, -1),
      int64_tensor(decoder, &past, 1, -1),
  };
  OrtValue* result = NULL;
  check_ort(ort->Run(decoder->session, NULL, inputs, (const OrtValue* const*)values, 5, outputs, 1, &result));
  float* logits = NULL; /* [1, count, vocabulary] */
  check_ort(ort->GetTensorMutableData(result, (void**)&logits));
  memcpy(decoder->logits, logits + (size_t)(count - 1) * decoder->vocabulary, decoder->vocabulary * sizeof *logits);
  for (size_t i = 0; i < 5; ++i) ort->ReleaseValue(values[i]);
  ort->ReleaseValue(result);
  int64_t best = 0;
  for (size_t i = 1; i < decoder->vocabulary; ++i)
    if (decoder->logits[i] > decoder->logits[best]) best = (int64_t)i;
  return best;
}

/* Adds `count` greedy tokens to a conversation whose next token is `next`; gives the token after them. */
static int64_t go_on(Decoder* decoder, int64_t handle, int64_t next, int count) {
  for (int i = 0; i < count; ++i) {
    int64_t length = 0;
    check(kvfuse_sequence_length(handle, &length));
    printf(" %lld", (long long)next);
    next = run(decoder, handle, &next, 1, length);
  }
  printf("\n");
  return next;
}

static int64_t length_of(int64_t handle) {
  int64_t length = 0;
  check(kvfuse_sequence_length(handle, &length));
  return length;
}

/* Adds kvfuse's execution provider, which brings the ops as well. */
static void add_device(OrtSessionOptions* options, OrtEnv* env, const char* library, const char* device) {
  const OrtEpDevice* const* found = NULL;
  const OrtEpDevice* ours = NULL;
  const char *const keys[] = {"device"}, *const values[] = {device};
  size_t count = 0;
  check_ort(ort->RegisterExecutionProviderLibrary(env, "kvfuse", library));
  check_ort(ort->GetEpDevices(env, &found, &count));
  for (size_t i = 0; i < count; ++i)
    if (strcmp(ort->EpDevice_EpName(found[i]), "KvfuseExecutionProvider") == 0) ours = found[i];
  if (ours == NULL) fail("expected a device of KvfuseExecutionProvider");
  check_ort(ort->SessionOptionsAppendExecutionProvider_V2(options, env, &ours, 1, keys, values, 1));
}

static void open_decoder(Decoder* decoder, OrtEnv* env, const char* model, const char* library, const char* device) {
  OrtSessionOptions* options = NULL;
  check_ort(ort->CreateSessionOptions(&options));
  check_ort(ort->SetSessionLogSeverityLevel(options, 3)); /* kv_sequence can be overridden, and should be */
  if (device == NULL)
    check_ort(ort->RegisterCustomOpsLibrary_V2(options, library));
  else
    add_device(options, env, library, device);
  check_ort(ort->CreateSession(env, model, options, &decoder->session));
  ort->ReleaseSessionOptions(options);
  check_ort(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &decoder->memory));

  OrtTypeInfo* type = NULL;
  const OrtTensorTypeAndShapeInfo* tensor = NULL;
  int64_t shape[3] = {0, 0, 0};
  check_ort(ort->SessionGetOutputTypeInfo(decoder->session, 0, &type));
  check_ort(ort->CastTypeInfoToTensorInfo(type, &tensor));
  check_ort(ort->GetDimensions(tensor, shape, 3));
  ort->ReleaseTypeInfo(type);
  if (shape[2] < 1) fail("expected logits of a fixed vocabulary");
  decoder->vocabulary = (size_t)shape[2];
  decoder->logits = malloc(decoder->vocabulary * sizeof *decoder->logits);
  if (decoder->logits == NULL) fail("expected memory for the logits");
}

static void converse(Decoder* decoder) {
  const int64_t prompt[] = {7, 3, 44, 12, 9}, other_prompt[] = {60, 21, 5};
  const size_t logits_size = decoder->vocabulary * sizeof *decoder->logits;
  float* kept = malloc(logits_size);
  if (kept == NULL) fail("expected memory for the logits");

  /* Two conversations beside each other. */
  int64_t first = 0, second = 0, forked = 0, thawed = 0;
  check(kvfuse_sequence_create(&first));
  check(kvfuse_sequence_create(&second));
  int64_t next = run(decoder, first, prompt, 5, 0);
  int64_t other = run(decoder, second, other_prompt, 3, 0);
  printf("first: ");
  next = go_on(decoder, first, next, 4);
  printf("second:");
  other = go_on(decoder, second, other, 2);
  expect(length_of(first) == 9 && length_of(second) == 5, "two conversations have their own lengths");

  /* A fork has the same tokens, and goes its own way from there. */
  check(kvfuse_sequence_fork(first, &forked));
  run(decoder, first, &next, 1, 9);
  memcpy(kept, decoder->logits, logits_size);
  run(decoder, forked, other_prompt, 3, 9);
  expect(memcmp(kept, decoder->logits, logits_size) != 0, "a fork goes another way");
  expect(length_of(first) == 10 && length_of(forked) == 12, "neither side sees the other's tokens");

  /* Rollback: feeding a shorter kv_past_length, or by call. */
  run(decoder, forked, &next, 1, 9);
  expect(memcmp(kept, decoder->logits, logits_size) == 0, "rolled back, the fork says what the original said");
  check(kvfuse_sequence_truncate(forked, 9));
  run(decoder, forked, &next, 1, 9);
  expect(memcmp(kept, decoder->logits, logits_size) == 0, "truncated, it says so again");

  /* Frozen bytes can go to a file, to another process or to another machine. */
  KvfuseBuffer* frozen = NULL;
  check(kvfuse_sequence_freeze(second, &frozen));
  printf("frozen: %zu bytes for %lld tokens\n", kvfuse_buffer_size(frozen), (long long)length_of(second));
  run(decoder, second, &other, 1, 5);
  memcpy(kept, decoder->logits, logits_size);
  check(kvfuse_sequence_destroy(second));
  check(kvfuse_sequence_unfreeze(kvfuse_buffer_data(frozen), kvfuse_buffer_size(frozen), &thawed));
  run(decoder, thawed, &other, 1, 5);
  expect(memcmp(kept, decoder->logits, logits_size) == 0, "unfrozen, a conversation goes on where it stood");

  /* Bytes are not trusted, and an error is a sentence. */
  KvfuseStatus* refused = kvfuse_sequence_unfreeze(kvfuse_buffer_data(frozen), kvfuse_buffer_size(frozen) - 1, &second);
  expect(kvfuse_status_code(refused) == KVFUSE_INVALID, "a truncated state is refused");
  printf("    %s\n", kvfuse_status_message(refused));
  kvfuse_status_release(refused);
  kvfuse_buffer_release(frozen);

  check(kvfuse_sequence_destroy(first));
  check(kvfuse_sequence_destroy(forked));
  check(kvfuse_sequence_destroy(thawed));
  expect(kvfuse_live_sequences() == 0 && kvfuse_process_nbytes() == 0, "no sequence and no byte of cache is left");
  free(kept);
}

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) fail("usage: conversations MODEL.onnx LIBKVFUSE_OPS [DEVICE]");
  ort = OrtGetApiBase()->GetApi(24); /* 1.24, the oldest onnxruntime that kvfuse takes */
  if (ort == NULL) fail("expected onnxruntime 1.24 or newer");
  printf("kvfuse %s, C API %u, onnxruntime %s\n", kvfuse_version(), (unsigned)kvfuse_api_version(),
         OrtGetApiBase()->GetVersionString());
  OrtEnv* env = NULL;
  Decoder decoder = {NULL, NULL, 0, NULL};
  check_ort(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "conversations", &env));
  open_decoder(&decoder, env, argv[1], argv[2], argc == 4 ? argv[3] : NULL);
  converse(&decoder);
  free(decoder.logits);
  ort->ReleaseMemoryInfo(decoder.memory);
  ort->ReleaseSession(decoder.session);
  ort->ReleaseEnv(env);
  return 0;
}
