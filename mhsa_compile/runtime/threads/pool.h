/* Our own pool: one for the process, shared by all callers and all artifacts.

   A caller puts its loop where workers look, works itself, and waits for tasks that somebody has begun, not for
   somebody to come. Workers look for work for a while, then sleep on a futex; who publishes a loop wakes as many as can
   help. They are made when they are first wanted, and never end.

   Every publication and every going to sleep is sequentially consistent: a worker says that it sleeps, then looks once
   more; a caller publishes, then counts the sleepers. One of the two sees the other. */
#pragma once

#include "job.h"
#include "system.h"

enum {
  kJobs = 64,                 /* loops at once; who finds no place runs alone */
  kSearchNanoseconds = 200000, /* from the end of a loop to a worker's sleep, at most: bridges what is serial in a call */
  kShortestSearch = 20000,
  kFirstPause = 10000,        /* between two loops, of which nothing is known yet */
  kPolitelyAfter = 20000,     /* from then on a worker that searches lets others have the CPU */
  kLongAway = 500000,         /* nanoseconds: whoever got the CPU keeps it to the end of a time slice */
  kKeeps = 1000,              /* searches in which a worker keeps its CPU, once letting go of it has cost a loop */
  kShortestWait = 5000,       /* at the end of a loop its caller waits awake, for nanoseconds between these, */
  kLongestWait = 1000000,
  kYieldsAtEnd = 40,          /* then lets others have the CPU so often, then sleeps */
  kKnown = 256,
  kNumbered = 8,
};

typedef struct {
  Job jobs[kJobs];
  _Alignas(128) _Atomic uint64_t open; /* where workers look: a bit for each job that is published */
  _Atomic uint64_t taken;              /* a bit for each job that a caller has */
  _Alignas(128) _Atomic int32_t rings; /* a futex: grows when sleepers are called */
  _Atomic int32_t asleep, searching, workers, callers, cpus;
  _Atomic bool has_fork_handler, is_forked;
  _Atomic int32_t known[kKnown]; /* numbers in the kernel of threads that work for us or call us; the last ones */
  _Atomic uint32_t known_count;
  _Atomic int32_t numbers[kNumbered]; /* in the kernel, of the first workers */
  _Atomic int32_t kept_off;           /* the CPU that they are kept off, and 1 */
  _Atomic int64_t expected;           /* until when a call that has begun may come to its first loop */
} Pool;

MHSA_POOL_MEMORY(Pool)
_Static_assert(sizeof(Pool) <= 32768, "as large as it is said to be in system_linux.h");
static Pool *const pool = &mhsa_pool_1;

static int64_t within(int64_t least, int64_t value, int64_t most) {
  return value < least ? least : value < most ? value : most;
}

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ volatile("yield");
#else
  __asm__ volatile("" ::: "memory");
#endif
}

static void make_known(void) {
  const uint32_t place = atomic_fetch_add(&pool->known_count, 1) % kKnown;
  atomic_store_explicit(&pool->known[place], thread_number(), memory_order_relaxed);
}

static inline bool is_known(int32_t thread) {
  for (int i = 0; i < kKnown; ++i)
    if (atomic_load_explicit(&pool->known[i], memory_order_relaxed) == thread) return true;
  return false;
}

/* Some kernels of virtual machines put a thread that wakes up on the CPU of whoever wakes it, though another one is idle:
   there it waits until the caller has done everything alone. So sleepers are kept off the caller's CPU before they are
   called. Of a few workers: they are wanted where there are few CPUs. */
static void keep_workers_off_this_cpu(void) {
  const int cpu = this_cpu();
  if (cpu < 0 || atomic_exchange_explicit(&pool->kept_off, cpu + 1, memory_order_relaxed) == cpu + 1) return;
  if (atomic_load(&pool->workers) > kNumbered) return;
  int32_t workers[kNumbered];
  for (int i = 0; i < kNumbered; ++i) workers[i] = atomic_load_explicit(&pool->numbers[i], memory_order_relaxed);
  keep_threads_off(cpu, workers, kNumbered);
}

/* As many as are missing where so many are wanted. */
static void wake_workers(int wanted) {
  const int missing = wanted - atomic_load(&pool->searching);
  if (missing <= 0 || atomic_load(&pool->asleep) == 0) return;
  keep_workers_off_this_cpu();
  atomic_fetch_add(&pool->rings, 1);
  wake(&pool->rings, missing);
}

/* As a helper of a job: all tasks that this thread gets. */
static void help(Job *job) {
  uint32_t generation;
  int task = claim_seat(job, &generation), ran = 0;
  if (task < 0) return;
  const int tasks = job->tasks;
  for (; task >= 0; task = claim_back(job, generation), ++ran) run_task(job, task);
  /* The caller may return, and the place be another loop's, as soon as this is added. A wake too many harms nobody. */
  if (atomic_fetch_add_explicit(&job->done, ran, memory_order_seq_cst) + ran == tasks &&
      atomic_load_explicit(&job->awaited, memory_order_seq_cst))
    wake(&job->done, 1);
}

/* A job that a helper can join, or NULL. */
static Job *joinable(void) {
  for (uint64_t bits = atomic_load_explicit(&pool->open, memory_order_seq_cst); bits; bits &= bits - 1)
    if (can_be_joined(&pool->jobs[__builtin_ctzll(bits)])) return &pool->jobs[__builtin_ctzll(bits)];
  return NULL;
}

/* Lets others have this CPU, if any wants it. Whether it came back late, and loops were begun meanwhile: somebody of low
   priority, which a call need not wait for, keeps a CPU for a whole time slice. (Whoever calls takes the first job if it
   is free.) */
static bool yielding_was_dear(void) {
  _Atomic uint64_t *const claims = &pool->jobs[0].claims;
  const uint32_t before = GENERATION(atomic_load_explicit(claims, memory_order_relaxed));
  const int64_t begin = nanoseconds();
  yield_cpu();
  return nanoseconds() - begin > kLongAway && GENERATION(atomic_load_explicit(claims, memory_order_relaxed)) != before;
}

/* How long a worker's searches have to be: four times the longest pause after which there was a loop, as far as pauses
   can be bridged, and those of some hundred searches ago count less and less. A program that calls between other
   libraries' loops, which want the CPUs at once, has nothing to bridge. */
static int64_t worthwhile(int64_t longest) { return within(kShortestSearch, 4 * longest, kSearchNanoseconds); }

/* The longest pause as it is remembered after one more. */
static int64_t longer(int64_t longest, int64_t pause) {
  const int64_t less = longest - longest / 256;
  return pause < kSearchNanoseconds && pause > less ? pause : less;
}

/* The next job to help with, searched for a while; NULL if there is none. `pause` is how long there was none. */
static Job *searched(int64_t longest, int64_t *pause) {
  static _Thread_local int keeps; /* searches in which this thread lets nobody have its CPU */
  Job *job = joinable();
  *pause = 0;
  if (job) return job;
  atomic_fetch_add(&pool->searching, 1);
  if (keeps > 0) --keeps;
  const int64_t begin = nanoseconds(), limit = worthwhile(longest);
  const int64_t expected = atomic_load(&pool->expected) - begin, most = expected > limit ? expected : limit;
  for (int64_t waited = 0; job == NULL && waited < most; *pause = waited = nanoseconds() - begin) {
    if (waited > kPolitelyAfter && keeps == 0 && yielding_was_dear()) keeps = kKeeps;
    for (int i = 0; i < 16 && (job = joinable()) == NULL; ++i) pause_cpu();
  }
  atomic_fetch_sub(&pool->searching, 1);
  return job;
}

static void worker(intptr_t place) {
  inside_of_tasks = 1;
  if (place < kNumbered) {
    atomic_store_explicit(&pool->numbers[place], thread_number(), memory_order_relaxed);
    atomic_store(&pool->kept_off, 0); /* it is kept off nothing yet */
  }
  make_known();
  for (int64_t longest = kFirstPause, pause;;) {
    for (Job *job; (job = searched(longest, &pause)) != NULL; help(job)) longest = longer(longest, pause);
    const int64_t begin = nanoseconds() - pause;
    const int32_t rings = atomic_load(&pool->rings);
    atomic_fetch_add(&pool->asleep, 1);
    if (joinable() == NULL) sleep_unless(&pool->rings, rings);
    atomic_fetch_sub(&pool->asleep, 1);
    longest = longer(longest, nanoseconds() - begin); /* it gave up too early, perhaps */
  }
}

/* After a fork there is no worker; what other threads were in the middle of is nobody's any more. */
static void start_anew(void) {
  for (int i = 0; i < kJobs; ++i) atomic_store(&pool->jobs[i].claims, 0);
  atomic_store(&pool->open, 0), atomic_store(&pool->taken, 0);
  atomic_store(&pool->asleep, 0), atomic_store(&pool->searching, 0);
  atomic_store(&pool->workers, 0), atomic_store(&pool->callers, 0);
  for (int i = 0; i < kNumbered; ++i) atomic_store(&pool->numbers[i], 0);
  atomic_store(&pool->is_forked, true);
}

/* Of a thread that calls; before a fork of it, so that the child knows what it is. */
static void prepare_pool(void) {
  atomic_store(&pool->cpus, cpus_of_this_thread());
  if (!atomic_exchange(&pool->has_fork_handler, true)) after_fork(start_anew);
}

static void make_workers(int wanted) {
  for (int32_t count = atomic_load(&pool->workers); count < wanted;) {
    if (!atomic_compare_exchange_strong(&pool->workers, &count, count + 1)) continue;
    if (!start_thread(worker, count)) { /* a limit of the system's: with fewer, then */
      atomic_fetch_sub(&pool->workers, 1);
      return;
    }
    ++count;
  }
}

static Job *take_job(void) {
  uint64_t taken = atomic_load_explicit(&pool->taken, memory_order_relaxed);
  while (~taken)
    if (atomic_compare_exchange_weak_explicit(&pool->taken, &taken, taken | (~taken & (taken + 1)), memory_order_acquire,
                                              memory_order_relaxed))
      return &pool->jobs[__builtin_ctzll(~taken)];
  return NULL;
}

static int run_serially(Lambda lambda, void *closure) {
  Env env = {NULL, 1};
  ++inside_of_tasks;
  const int result = lambda(0, &env, closure);
  --inside_of_tasks;
  return result;
}

static bool is_done(Job *job) { return atomic_load_explicit(&job->done, memory_order_acquire) == job->tasks; }

/* Until every task has run: those that are left are in the hands of workers, who have begun the last of them by now and
   take about `nanoseconds_of_task` for it. So long the caller stays awake, twice: who sleeps is woken late, by 0.2 ms in
   a virtual machine whose CPU was halted. */
static void await_helpers(Job *job, int64_t nanoseconds_of_task) {
  const int64_t wait = within(kShortestWait, 2 * nanoseconds_of_task, kLongestWait), begin = nanoseconds();
  while (!is_done(job) && nanoseconds() - begin < wait)
    for (int i = 0; i < 16 && !is_done(job); ++i) pause_cpu();
  for (int i = 0; i < kYieldsAtEnd && !is_done(job); ++i) yield_cpu(); /* a worker may have been put on this very CPU */
  while (!is_done(job)) {
    atomic_store_explicit(&job->awaited, 1, memory_order_seq_cst);
    const int32_t done = atomic_load_explicit(&job->done, memory_order_seq_cst);
    if (done < job->tasks) sleep_unless(&job->done, done);
  }
}

/* Workers for a loop on at most `limit` threads; fewer where others call, too, so that nobody waits for a CPU. */
static int helpers_of(int callers, int limit) {
  const int cpus = atomic_load_explicit(&pool->cpus, memory_order_relaxed);
  const int idle = (cpus > limit ? cpus : limit) - callers; /* more than there are CPUs only where so many are asked for */
  return limit - 1 < idle ? limit - 1 : idle;
}

/* On at most `limit` threads, this one among them. */
static int run_on_pool(Lambda lambda, void *closure, int limit, int per_thread) {
  const int helpers = helpers_of(1 + atomic_fetch_add(&pool->callers, 1), limit);
  Job *job = helpers > 0 ? take_job() : NULL;
  int result;
  if (job == NULL) {
    result = run_serially(lambda, closure);
  } else {
    const int wanted = (helpers + 1) * per_thread, tasks = wanted < kMostTasks ? wanted : kMostTasks;
    const uint64_t bit = (uint64_t)1 << (job - pool->jobs);
    if (atomic_load_explicit(&pool->workers, memory_order_relaxed) < helpers) make_workers(helpers);
    open_job(job, lambda, closure, tasks, helpers);
    atomic_fetch_or(&pool->open, bit);
    wake_workers(helpers);
    ++inside_of_tasks;
    int ran = 0;
    const int64_t begin = nanoseconds();
    for (int task; (task = claim_front(job)) >= 0; ++ran) run_task(job, task);
    --inside_of_tasks;
    const bool has_cpus = limit <= atomic_load_explicit(&pool->cpus, memory_order_relaxed);
    const int64_t of_task = ran && has_cpus ? (nanoseconds() - begin) / ran : 0;
    atomic_fetch_and(&pool->open, ~bit);
    atomic_fetch_add_explicit(&job->done, ran, memory_order_acq_rel);
    await_helpers(job, of_task);
    result = outcome(job);
    atomic_fetch_and_explicit(&pool->taken, ~bit, memory_order_release);
  }
  atomic_fetch_sub(&pool->callers, 1);
  return result;
}
