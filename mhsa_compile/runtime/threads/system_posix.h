/* The pool's system is macOS, or another with POSIX threads: what no standard says of CPUs is left out. Its threads sleep
   on one condition variable, whatever word they sleep on, and look at their word again. */
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define MHSA_POOL_MEMORY(Type) static Type mhsa_pool_1;

enum { kWorkerStack = 8 << 20 }; /* bytes, as Linux gives; macOS gives threads half a MiB */

static pthread_mutex_t sleepers = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER;

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void sleep_unless(_Atomic int32_t *word, int32_t changed_from) {
  pthread_mutex_lock(&sleepers);
  while (atomic_load(word) == changed_from) pthread_cond_wait(&called, &sleepers);
  pthread_mutex_unlock(&sleepers);
}

/* The word has changed by now: who looks at it under the lock sees that, who did before sleeps and hears this. */
static void wake(_Atomic int32_t *word, int count) {
  pthread_mutex_lock(&sleepers);
  pthread_cond_broadcast(&called);
  pthread_mutex_unlock(&sleepers);
}

static int32_t thread_number(void) {
  static _Atomic int32_t last;
  static _Thread_local int32_t own;
  if (own == 0) own = atomic_fetch_add(&last, 1) + 1;
  return own;
}

static int cpus_of_this_thread(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }

static int this_cpu(void) { return -1; }

static void keep_threads_off(int cpu, const int32_t *threads, int count) {}

static void yield_cpu(void) { sched_yield(); }

typedef struct {
  void (*body)(intptr_t);
  intptr_t place;
} Start;

static void *run_thread(void *data) {
  const Start start = *(Start *)data;
  free(data);
  start.body(start.place);
  return NULL;
}

static void keep_this_library(void) {
  Dl_info place;
  if (dladdr((void *)(uintptr_t)run_thread, &place)) dlopen(place.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

static bool start_thread(void (*body)(intptr_t), intptr_t place) {
  Start *const start = malloc(sizeof *start);
  if (start == NULL) return false;
  *start = (Start){body, place};
  keep_this_library();
  pthread_attr_t of_worker;
  pthread_attr_init(&of_worker);
  pthread_attr_setstacksize(&of_worker, kWorkerStack);
  pthread_attr_setdetachstate(&of_worker, PTHREAD_CREATE_DETACHED);
  sigset_t all, before; /* signals are for the program's own threads */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const bool failed = pthread_create(&thread, &of_worker, run_thread, start) != 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&of_worker);
  if (failed) free(start);
  return !failed;
}

static void reset_sleepers(void) {
  pthread_mutex_init(&sleepers, NULL);
  pthread_cond_init(&called, NULL);
}

/* Of the parent's sleepers the child has none, and one of them may have had the lock. */
static void after_fork(void (*child)(void)) {
  pthread_atfork(NULL, NULL, reset_sleepers);
  pthread_atfork(NULL, NULL, child);
}
