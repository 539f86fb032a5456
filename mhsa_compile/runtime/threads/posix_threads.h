/* What Linux and all other systems with POSIX threads have alike: a clock, and a thread's beginning. */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "thread_start.h"

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void yield_cpu(void) { sched_yield(); }

static void *run_thread(void *start) {
  run_start(start);
  return NULL;
}

/* A detached thread; `stack` bytes, 0: as many as the system gives. */
static bool start_detached(void (*body)(intptr_t), intptr_t place, size_t stack) {
  Start *const start = new_start(body, place);
  if (start == NULL) return false;
  pthread_attr_t of_worker;
  pthread_attr_init(&of_worker);
  if (stack) pthread_attr_setstacksize(&of_worker, stack);
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
