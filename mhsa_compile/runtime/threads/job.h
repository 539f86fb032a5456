/* A parallel loop as tasks that threads claim.

   TVM's code calls a lambda with (task, how many tasks there are): task t computes the t-th share of the iterations. So
   a loop may be cut into more tasks than there are threads, and a thread that comes late finds little left to do. The
   caller claims from the front, whoever helps from the back: each walks through memory in one direction. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
  void *sync_handle; /* for barriers, which our code has none of */
  int32_t num_task;
} Env; /* TVM's TVMParallelGroupEnv */

typedef int (*Lambda)(int task, Env *env, void *closure);

enum {
  kMostTasks = 4095,
};

/* Tasks for each thread, by how long the loop took the last time. More of them even out late threads, and shares that
   do not divide well, better; each costs some 30 ns, and a tiny loop takes 5 us. */
static int tasks_per_thread(int64_t nanoseconds) { return nanoseconds < 30000 ? 4 : nanoseconds < 300000 ? 8 : 16; }

typedef struct {
  /* generation: 24 bits | seats: 12 | back: 14 | front: 14. Tasks front <= t < back are free. A thread takes a seat with
     its first task. What stands below is written before the word opens a loop, and read after a claim from it, which
     keeps the loop from ending; so it needs no order of its own. */
  _Alignas(128) _Atomic uint64_t claims;
  Lambda lambda;
  void *closure;
  int32_t tasks;
  _Atomic(void *) error;           /* the first task's that failed: an object of TVM's, ours to hand on */
  _Alignas(64) _Atomic int32_t done; /* tasks that have run; a futex */
  _Atomic int32_t awaited;         /* whether the caller sleeps until all are */
} Job;

#define FRONT(word) ((int32_t)((word) & 0x3fff))
#define BACK(word) ((int32_t)((word) >> 14 & 0x3fff))
#define SEATS(word) ((int32_t)((word) >> 28 & 0xfff))
#define GENERATION(word) ((uint32_t)((word) >> 40))

#include "raised_errors.h"

/* The task or tasks that this thread is in the middle of: a loop inside of one runs where it is. */
static _Thread_local int inside_of_tasks;

static bool can_be_joined(Job *job) {
  const uint64_t word = atomic_load_explicit(&job->claims, memory_order_seq_cst);
  return FRONT(word) < BACK(word) && SEATS(word) > 0;
}

/* The caller's next task, or -1. */
static int claim_front(Job *job) {
  uint64_t word = atomic_load_explicit(&job->claims, memory_order_relaxed);
  do {
    if (FRONT(word) >= BACK(word)) return -1;
  } while (!atomic_compare_exchange_weak_explicit(&job->claims, &word, word + 1, memory_order_acq_rel,
                                                  memory_order_relaxed));
  return FRONT(word);
}

/* A helper's first task, which takes a seat and tells the generation, or -1. */
static int claim_seat(Job *job, uint32_t *generation) {
  uint64_t word = atomic_load_explicit(&job->claims, memory_order_relaxed), next;
  do {
    if (FRONT(word) >= BACK(word) || SEATS(word) == 0) return -1;
    next = word - ((uint64_t)1 << 28) - ((uint64_t)1 << 14);
  } while (!atomic_compare_exchange_weak_explicit(&job->claims, &word, next, memory_order_acq_rel,
                                                  memory_order_relaxed));
  *generation = GENERATION(word);
  return BACK(word) - 1;
}

/* A helper's next task of the same loop, or -1. */
static int claim_back(Job *job, uint32_t generation) {
  uint64_t word = atomic_load_explicit(&job->claims, memory_order_relaxed);
  do {
    if (FRONT(word) >= BACK(word) || GENERATION(word) != generation) return -1;
  } while (!atomic_compare_exchange_weak_explicit(&job->claims, &word, word - ((uint64_t)1 << 14), memory_order_acq_rel,
                                                  memory_order_relaxed));
  return BACK(word) - 1;
}

static void open_job(Job *job, Lambda lambda, void *closure, int tasks, int seats) {
  job->lambda = lambda, job->closure = closure, job->tasks = tasks;
  atomic_store_explicit(&job->error, NULL, memory_order_relaxed);
  atomic_store_explicit(&job->done, 0, memory_order_relaxed);
  atomic_store_explicit(&job->awaited, 0, memory_order_relaxed);
  const uint64_t generation = GENERATION(atomic_load_explicit(&job->claims, memory_order_relaxed)) + 1;
  atomic_store_explicit(&job->claims, generation << 40 | (uint64_t)seats << 28 | (uint64_t)tasks << 14,
                        memory_order_seq_cst);
}

static void run_task(Job *job, int task) {
  Env env = {NULL, job->tasks};
  if (job->lambda(task, &env, job->closure) == 0) return;
  void *error = NULL, *none = NULL; /* TVM keeps it for the thread that failed: the caller's is another one */
  move_from_raised(&error);
  if (error == NULL) error = job; /* failed, without words */
  if (!atomic_compare_exchange_strong(&job->error, &none, error) && error != job) let_go_of(error);
}

/* What a launch returns, with the error raised in this thread. */
static int outcome(Job *job) {
  void *error = atomic_load_explicit(&job->error, memory_order_acquire);
  if (error == NULL) return 0;
  if (error != job) {
    set_raised(error);
    let_go_of(error);
  }
  return -1;
}
