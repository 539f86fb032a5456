/* The pool's system is macOS, or another with POSIX threads: what no standard says of CPUs is left out. Its threads sleep
   on one condition variable, whatever word they sleep on, and look at their word again. */
#pragma once

#include <dlfcn.h>

#include "posix_threads.h"

#define MHSA_POOL_MEMORY(Type) static Type mhsa_pool_1;

enum { kWorkerStack = 8 << 20 }; /* bytes, as Linux gives; macOS gives threads half a MiB */

static pthread_mutex_t sleepers = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER;

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

static void keep_this_library(void) {
  Dl_info place;
  if (dladdr((void *)(uintptr_t)run_thread, &place)) dlopen(place.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

static bool start_thread(void (*body)(intptr_t), intptr_t place) {
  keep_this_library();
  return start_detached(body, place, kWorkerStack);
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
