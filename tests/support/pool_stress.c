/* Callers that launch parallel loops, at any pace, on the pool that artifacts carry: every task must have run exactly
   once, by the time that its launch returns, and its writes must be there. Built with or without ThreadSanitizer.

     pool_stress CALLERS LIMIT LAUNCHES PAUSES

   LAUNCHES of each caller; PAUSES 1: some of them after a sleep, so that workers sleep, too, and are woken. Prints how
   many launches there were, and how many of them were wrong; exits with 1 if any was. */
#include "threads.c"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport) /* for who searches for them in the program */
#else
#define EXPORTED
#endif

enum { kExtent = 1000, kFailing = 1 };

static _Thread_local void *raised;
static _Atomic int references;

EXPORTED void TVMFFIErrorMoveFromRaised(void **error) { *error = raised, raised = NULL; }
EXPORTED void TVMFFIErrorSetRaised(void *error) { raised = error, atomic_fetch_add(&references, 1); }
EXPORTED void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *words) {}
EXPORTED int TVMFFIObjectDecRef(void *object) { return atomic_fetch_sub(&references, 1), 0; }

typedef struct {
  int *times, extent, failing, nested, inner;
  _Atomic int inside, most;
} Closure;

static int count_inner(int task, Env *env, void *closure) {
  if (env->num_task != 1) abort(); /* a loop inside of a task runs where it is */
  ++*(int *)closure;
  return 0;
}

static int body(int task, Env *env, void *data) {
  Closure *closure = data;
  const int now = 1 + atomic_fetch_add(&closure->inside, 1);
  for (int most = closure->most; now > most && !atomic_compare_exchange_weak(&closure->most, &most, now);) {
  }
  const int share = (closure->extent + env->num_task - 1) / env->num_task;
  for (int i = task * share; i < (task + 1) * share && i < closure->extent; ++i) ++closure->times[i];
  if (closure->nested) {
    int inner = 0;
    __TVMBackendParallelLaunch(count_inner, &inner, 0);
    if (inner != 1) abort();
  }
  const int fails = closure->failing && task == env->num_task / 2;
  if (fails) raised = closure, atomic_fetch_add(&references, 1);
  atomic_fetch_sub(&closure->inside, 1);
  return fails ? -1 : 0;
}

static int limit, launches, pauses;
static _Atomic long wrong, done;

static void *call(void *number) {
  unsigned state = 1 + (unsigned)(intptr_t)number;
  Any word = {1, 0, {limit | (int64_t)kOwn << 32}}, result;
  __tvm_ffi_mhsa_threads(NULL, &word, 1, &result);
  int times[kExtent];
  for (int i = 0; i < launches; ++i) {
    state = state * 1664525 + 1013904223;
    if (pauses && state % 64 == 0) usleep(state / 64 % 800);
    memset(times, 0, sizeof times);
    Closure closure = {times, 1 + (int)(state / 7 % kExtent), (state >> 8) % 16 == 0, (state >> 12) % 4 == 0, 0};
    const int returned = __TVMBackendParallelLaunch(body, &closure, 0);
    bool right = returned == -closure.failing && closure.most <= limit && closure.inside == 0;
    if (closure.failing) {
      right = right && raised == &closure;
      if (raised) TVMFFIObjectDecRef(raised);
      raised = NULL;
    }
    for (int k = 0; k < kExtent; ++k) right = right && times[k] == (k < closure.extent);
    wrong += !right, ++done;
  }
  return NULL;
}

int main(int count, char **words) {
  if (count != 5) return 2;
  const int callers = atoi(words[1]);
  limit = atoi(words[2]), launches = atoi(words[3]), pauses = atoi(words[4]);
  pthread_t threads[callers];
  for (int i = 0; i < callers; ++i) pthread_create(&threads[i], NULL, call, (void *)(intptr_t)i);
  for (int i = 0; i < callers; ++i) pthread_join(threads[i], NULL);
  printf("%ld launches, %ld wrong, %d errors left, %d workers\n", done, wrong, references, pool->workers);
  return wrong || references;
}
