/* How compiled code runs its parallel loops. Linked into every module.so, so that an artifact needs no pool of anybody's:
   not TVM's, which belongs to the calling thread and waits for workers that have no CPU, and no native package of ours.

   TVM's code calls through `__TVMBackendParallelLaunch`, a pointer that its loader sets, to TVM's pool, where it finds
   the symbol. The definition here is linked in its place and is hidden from the loader. */
#define _GNU_SOURCE

#include "exported.h"
#include "openmp.h"
#include "pool.h"

enum {
  kWorthCalling = 100000, /* nanoseconds of loops one after another */
  kNear = 8,              /* places from that of its hash in which a loop may be kept */
};

static _Thread_local Caller caller;

/* At most 0 if nobody has said: what the environment tells TVM, else all CPUs. */
static int threads_of_call(Caller *caller) {
  if (caller->limit > 0) return caller->limit;
  const char *words = getenv("TVM_NUM_THREADS"); /* as in a server of TVM's RPC, which has no call of ours */
  const int number = words ? atoi(words) : 0;
  caller->limit = number > 0 ? number : cpus_of_this_thread();
  return caller->limit;
}

/* Where the loop's time is kept: a loop whose time is not known is cut too coarsely, so no two may share a place. */
static Loop *loop_of(Caller *caller, Lambda lambda) {
  const uint64_t hash = (uint64_t)(uintptr_t)lambda * 0x9e3779b97f4a7c15 >> 32;
  Loop *loop = NULL;
  for (unsigned i = 0; i < kNear; ++i) {
    loop = &caller->loops[(hash + i) % kLoops];
    if (loop->lambda == lambda) return loop;
    if (loop->lambda == NULL) break;
  }
  *loop = (Loop){lambda, 0};
  return loop;
}

static int launch(Lambda lambda, void *closure, int wanted) {
  Caller *const own = &caller;
  if (inside_of_tasks) return run_serially(lambda, closure);
  int limit = wanted > 0 ? wanted : threads_of_call(own);
  const bool may_be_openmp = (own->choice != kOwn || own->bounded) && find_openmp(own->choice == kOpenMP);
  if (own->bounded && may_be_openmp) {
    const int most = openmp.most(); /* torch.set_num_threads */
    limit = most < limit ? most : limit;
  }
  if (limit < 2) return run_serially(lambda, closure);
  if (!own->is_registered) {
    own->is_registered = true;
    make_known();
    if (atomic_load(&pool->cpus) == 0) prepare_pool();
  }
  const int64_t begin = nanoseconds();
  if (begin - own->ended > kSearchNanoseconds) own->began = begin;
  /* A fork has none of its parent's team, and would wait for it for ever. */
  const bool goes_there = may_be_openmp && own->choice != kOwn && !atomic_load_explicit(&pool->is_forked, memory_order_relaxed) &&
                          (own->choice == kOpenMP || team_is_awake(own, begin));
  Loop *const loop = loop_of(own, lambda);
  const int per_thread = tasks_per_thread(loop->nanoseconds);
  own->ran_on = goes_there ? kOpenMP : kOwn;
  const int result = goes_there ? run_on_openmp(own, lambda, closure, limit, per_thread)
                                : run_on_pool(lambda, closure, limit, per_thread);
  own->ended = nanoseconds();
  loop->nanoseconds = own->ended - begin;
  return result;
}

/* The most threads that may run a loop of this thread's: asked by kernels that go through it in strips, whose own word is
   a null pointer. */
static int32_t loop_threads(void) { return inside_of_tasks ? 1 : threads_of_call(&caller); }

#if defined(_WIN32)
__declspec(selectany)
#else
__attribute__((visibility("hidden")))
#endif
int32_t (*mhsa_loop_threads)(void) = loop_threads;

#if defined(__linux__)
__attribute__((visibility("hidden"))) int (*__TVMBackendParallelLaunch)(Lambda, void *, int) = launch;

static void take_loops(void) {}
#else
/* Elsewhere TVM's own definition is exported from every library, this one or not, and its loader sets what it finds. So
   that is set anew before a thread's first call. */
#if defined(_WIN32)
__declspec(selectany)
#endif
int (*__TVMBackendParallelLaunch)(Lambda, void *, int) = launch;

static void take_loops(void) { __TVMBackendParallelLaunch = launch; }
#endif

/* TVM's TVMFFIAny, for numbers. */
typedef struct {
  int32_t type, padding;
  union {
    int64_t number;
    double real;
  };
} Any;

/* Where a call is about to begin after a rest. A worker that sleeps on a CPU at rest takes 0.1 ms to come, and so does a
   caller's way from here to its first loop, whose code has left the caches meanwhile. Not where the last loops took no
   longer than that, nor where they will run on a team that is awake, which is looked for first: a worker that is called
   takes a CPU, and hides it. */
static void call_workers(Caller *own) {
  if (own->limit < 2 || own->choice == kOpenMP) return;
  if (own->choice == kAuto && atomic_load_explicit(&openmp_is_found, memory_order_acquire)) {
    if (own->team == 0) look_for_team(own, kLooksAfterRests);
    if (own->team != 0 && runs_now(own->team)) return;
  }
  if (atomic_load(&pool->asleep) == 0 || own->ended - own->began < kWorthCalling) return;
  atomic_store(&pool->expected, nanoseconds() + kSearchNanoseconds);
  wake_workers(helpers_of(1 + atomic_load(&pool->callers), own->limit));
}

/* mhsa_threads(word) -> the address of what it has set: the first 8 bytes of a Caller, for the calls of this thread from
   now on. Counts the CPUs that this thread may use. Before a call that comes after a rest it wakes the workers, too. */
MHSA_EXPORTED int __tvm_ffi_mhsa_threads(void *self, const Any *arguments, int32_t count, Any *result) {
  if (count != 1) return raise_words("TypeError", "mhsa_threads takes one number"), -1;
  caller.limit = (int32_t)arguments[0].number;
  caller.choice = (int16_t)(arguments[0].number >> 32);
  caller.bounded = (int16_t)(arguments[0].number >> 48);
  take_loops();
  prepare_pool();
  call_workers(&caller);
  result->type = 1 /* kTVMFFIInt */, result->padding = 0, result->number = (int64_t)(intptr_t)&caller;
  return 0;
}

/* mhsa_openmp() -> the address of the path of the OpenMP runtime that is loaded, 0 if there is none. */
MHSA_EXPORTED int __tvm_ffi_mhsa_openmp(void *self, const Any *arguments, int32_t count, Any *result) {
  result->type = 1, result->padding = 0;
  result->number = find_openmp(true) ? (int64_t)(intptr_t)openmp.path : 0;
  return 0;
}
