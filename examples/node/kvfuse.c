/* What onnxruntime-node lacks for kvfuse: registering a custom-op library, and sequences.
 *
 * onnxruntime-node makes its session options itself and offers no way to register a library with them (1.30:
 * js/node/src/session_options_helper.cc reads a fixed list of options and calls no RegisterCustomOps function). It does
 * make them through the table of functions of the onnxruntime library beside it. `register` puts one function into that
 * table, in place of CreateSessionOptions: it calls the original, then RegisterCustomOpsLibrary_V2. Every session that
 * is made in this process from then on can run rewritten models; nothing else changes.
 *
 * Run on Linux; not tried on macOS. The rest is kvfuse's C API, one function each.
 */
#include <dlfcn.h>
#include <kvfuse/kvfuse.h>
#include <node_api.h>
#include <onnxruntime_c_api.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_PATH = 4096 };

static const OrtApi* ort;
static char library[MAX_PATH]; /* of kvfuse's ops */
static OrtStatusPtr(ORT_API_CALL* create_session_options)(OrtSessionOptions**) = NULL;

static napi_value fail(napi_env env, const char* message) {
  napi_throw_error(env, NULL, message);
  return NULL;
}

static napi_value check(napi_env env, KvfuseStatus* status, napi_value result) {
  if (status == NULL) return result;
  napi_throw_error(env, NULL, kvfuse_status_message(status));
  kvfuse_status_release(status);
  return NULL;
}

static napi_value bigint(napi_env env, int64_t value) {
  napi_value result = NULL;
  napi_create_bigint_int64(env, value, &result);
  return result;
}

static int64_t handle_of(napi_env env, napi_callback_info info) {
  napi_value argument = NULL;
  size_t count = 1;
  int64_t handle = -1; /* no handle: refused by name, as any other unknown one */
  bool lossless = false;
  napi_get_cb_info(env, info, &count, &argument, NULL, NULL);
  if (count == 1) napi_get_value_bigint_int64(env, argument, &handle, &lossless);
  return handle;
}

static OrtStatusPtr ORT_API_CALL create_registered_options(OrtSessionOptions** options) {
  OrtStatusPtr status = create_session_options(options);
  return status != NULL ? status : ort->RegisterCustomOpsLibrary_V2(*options, library);
}

/* The table lies in memory that is read-only once the library is loaded. */
static int replace_in_table(void** entry, void* function) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  void* const begin = (void*)((uintptr_t)entry & ~(page - 1));
  const size_t size = (uintptr_t)entry + sizeof *entry - (uintptr_t)begin;
  if (mprotect(begin, size, PROT_READ | PROT_WRITE) != 0) return -1;
  memcpy(entry, &function, sizeof function);
  return mprotect(begin, size, PROT_READ);
}

/* register(path of onnxruntime-node's onnxruntime library, path of kvfuse's library) */
static napi_value register_ops(napi_env env, napi_callback_info info) {
  napi_value arguments[2];
  size_t count = 2, length = 0;
  char runtime[MAX_PATH];
  napi_get_cb_info(env, info, &count, arguments, NULL, NULL);
  if (count != 2 || napi_get_value_string_utf8(env, arguments[0], runtime, MAX_PATH, &length) != napi_ok ||
      napi_get_value_string_utf8(env, arguments[1], library, MAX_PATH, &length) != napi_ok)
    return fail(env, "[register] expected the paths of onnxruntime and of kvfuse's library; found something else");
  if (create_session_options != NULL) return NULL; /* done already */

  void* const loaded = dlopen(runtime, RTLD_NOW | RTLD_LOCAL); /* the copy that onnxruntime-node uses */
  if (loaded == NULL) return fail(env, dlerror());
  const OrtApiBase*(ORT_API_CALL * base)(void) = NULL;
  void* const symbol = dlsym(loaded, "OrtGetApiBase");
  memcpy(&base, &symbol, sizeof base);
  if (base != NULL) ort = base()->GetApi(24); /* 1.24, the oldest onnxruntime that kvfuse takes */
  if (ort == NULL) return fail(env, "[register] expected onnxruntime 1.24 or newer; found an older one");
  create_session_options = ort->CreateSessionOptions;
  void* replacement = NULL;
  OrtStatusPtr(ORT_API_CALL* const function)(OrtSessionOptions**) = create_registered_options;
  memcpy(&replacement, &function, sizeof replacement);
  if (replace_in_table((void**)&ort->CreateSessionOptions, replacement) != 0)
    return fail(env, "[register] expected leave to change onnxruntime's table of functions; found none");
  return NULL;
}

static napi_value create(napi_env env, napi_callback_info info) {
  (void)info;
  int64_t handle = 0;
  KvfuseStatus* status = kvfuse_sequence_create(&handle);
  return check(env, status, bigint(env, handle));
}

static napi_value fork_sequence(napi_env env, napi_callback_info info) {
  int64_t forked = 0;
  KvfuseStatus* status = kvfuse_sequence_fork(handle_of(env, info), &forked);
  return check(env, status, bigint(env, forked));
}

static napi_value destroy(napi_env env, napi_callback_info info) {
  return check(env, kvfuse_sequence_destroy(handle_of(env, info)), NULL);
}

static napi_value length(napi_env env, napi_callback_info info) {
  int64_t tokens = 0;
  napi_value result = NULL;
  KvfuseStatus* status = kvfuse_sequence_length(handle_of(env, info), &tokens);
  napi_create_int64(env, tokens, &result);
  return check(env, status, result);
}

static napi_value freeze(napi_env env, napi_callback_info info) {
  KvfuseBuffer* buffer = NULL;
  napi_value result = NULL;
  KvfuseStatus* status = kvfuse_sequence_freeze(handle_of(env, info), &buffer);
  if (status == NULL)
    napi_create_buffer_copy(env, kvfuse_buffer_size(buffer), kvfuse_buffer_data(buffer), NULL, &result);
  kvfuse_buffer_release(buffer);
  return check(env, status, result);
}

static napi_value unfreeze(napi_env env, napi_callback_info info) {
  napi_value argument = NULL;
  size_t count = 1, size = 0;
  void* data = NULL;
  int64_t handle = 0;
  napi_get_cb_info(env, info, &count, &argument, NULL, NULL);
  if (count != 1 || napi_get_buffer_info(env, argument, &data, &size) != napi_ok)
    return fail(env, "[unfreeze] expected a Buffer; found something else");
  KvfuseStatus* status = kvfuse_sequence_unfreeze(data, size, &handle);
  return check(env, status, bigint(env, handle));
}

NAPI_MODULE_INIT() {
  static const struct {
    const char* name;
    napi_callback function;
  } functions[] = {{"register", register_ops}, {"create", create}, {"fork", fork_sequence}, {"destroy", destroy},
                   {"length", length},         {"freeze", freeze}, {"unfreeze", unfreeze}};
  for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i) {
    napi_value function = NULL;
    napi_create_function(env, functions[i].name, NAPI_AUTO_LENGTH, functions[i].function, NULL, &function);
    napi_set_named_property(env, exports, functions[i].name, function);
  }
  return exports;
}
