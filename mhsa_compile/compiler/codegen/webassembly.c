/* What compiled code calls in WebAssembly, where there is no runtime of TVM's: memory, parallel loops and errors. The
   program that calls it is JavaScript (runtime/standalone/javascript/attention.js). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT(name) __attribute__((export_name(#name)))

enum { kAlignment = 64 };

typedef struct {
  void *sync_handle; /* for barriers, which our code has none of */
  int32_t num_task;
} Env; /* TVM's TVMParallelGroupEnv */

typedef int (*Lambda)(int task, Env *env, void *closure);

static char words[1024]; /* of the last error */

/* An address, or 0 where there is no memory left. */
EXPORT(mhsa_allocate) void *mhsa_allocate(size_t bytes) {
  return aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
}

EXPORT(mhsa_free) void mhsa_free(void *memory) { free(memory); }

EXPORT(mhsa_error) const char *mhsa_error(void) { return words; }

void *TVMBackendAllocWorkspace(int device, int number, uint64_t bytes, int code, int bits) {
  return mhsa_allocate((size_t)bytes);
}

int TVMBackendFreeWorkspace(int device, int number, void *memory) {
  free(memory);
  return 0;
}

/* The whole loop as one task: there is one thread. */
int TVMBackendParallelLaunch(Lambda lambda, void *closure, int wanted) {
  Env env = {NULL, 1};
  return lambda(0, &env, closure);
}

static void append(const char *text) {
  const size_t length = strlen(words), room = sizeof(words) - 1 - length, more = strlen(text);
  memcpy(words + length, text, more < room ? more : room);
  words[length + (more < room ? more : room)] = 0;
}

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  words[0] = 0;
  append(kind), append(": ");
  for (int32_t i = 0; i < count; ++i)
    if (parts[i]) append(parts[i]);
}

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &message, 1);
}

/* Code says what it has when it starts; JavaScript calls it by the names that the file exports. */
int TVMFFIEnvModRegisterSystemLibSymbol(const char *name, void *symbol) { return 0; }
