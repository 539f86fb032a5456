/* The OpenMP runtime that PyTorch runs on, found where it is loaded.

   Its workers spin for milliseconds after each of PyTorch's operators: then they have the CPUs, and a loop runs best on
   them. Once they sleep, waking them costs up to 8 ms (libgomp, whose caller spins on the CPU that the woken worker
   waits for), and a loop runs best on our pool. So we ask the kernel whether they run at this moment: for the time that
   the first worker of this thread's team has had a CPU, twice. It grows, or it does not. */
#pragma once

#if defined(__linux__)
#include <dirent.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "pool.h"

enum {
  kLoops = 256, /* whose times are known, at least the last 8 of any that are: whole models have dozens */
  kLooks = 64,                  /* calls, at most, from one look for the team of a thread to the next */
  kLooksAfterRests = 8,         /* the same, of calls before which the thread did something else */
  kTeamSpinsNanoseconds = 200000, /* for longer than this after a loop (libgomp for 7.6 ms, others for 200) */
  kSameMomentNanoseconds = 10000,
  kThreadsLookedAt = 256,
};

typedef struct {
  void (*parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
  int (*team)(void), (*member)(void), (*most)(void); /* omp_get_num_threads, _thread_num, _max_threads */
  char path[512];
} OpenMP;

typedef struct {
  Lambda lambda;
  int64_t nanoseconds; /* that it took the last time; 0: not known */
} Loop;

/* What a thread that calls knows. Whoever loads the code writes the first three as one word before each call, and reads
   the fourth. */
typedef struct {
  int32_t limit;   /* threads of a call; 0: nobody has said */
  int16_t choice;  /* kAuto, kOwn, kOpenMP */
  int16_t bounded; /* whether what PyTorch was told bounds `limit`, too, since it is a default */
  int32_t ran_on;  /* kOwn or kOpenMP: the last loop */
  bool is_registered;
  bool is_slow;     /* whether nobody of the team came to the last loop there */
  int32_t team;     /* a member of this thread's team: its number in the kernel; 0: not known */
  int32_t patience; /* calls until the next look for a team */
  int32_t patience_grown;
  int64_t began, ended; /* in nanoseconds: the first and the last loop of those with short pauses between them */
  Loop loops[kLoops]; /* each near the place that its lambda's hash says */
} Caller;

enum { kAuto = 0, kOwn = 1, kOpenMP = 2 };

static OpenMP openmp; /* of this library; every one finds the same */
static _Atomic(bool) openmp_is_found;

#if defined(__linux__)
static _Atomic(unsigned long long) libraries_seen; /* loads since the process began, at the last search */
static pthread_mutex_t openmp_search = PTHREAD_MUTEX_INITIALIZER;

typedef struct {
  unsigned long long loads;
  char torch[512], other[512];
} Loaded;

static int note_library(struct dl_phdr_info *info, size_t size, void *data) {
  Loaded *loaded = data;
  loaded->loads = info->dlpi_adds;
  const char *name = strrchr(info->dlpi_name, '/');
  if (name == NULL || strlen(info->dlpi_name) >= sizeof loaded->torch) return 0;
  if (strncmp(name, "/libtorch_cpu.so", 16) == 0) strcpy(loaded->torch, info->dlpi_name);
  const bool is_openmp = strncmp(name, "/libgomp", 8) == 0 || strncmp(name, "/libomp", 7) == 0 || strncmp(name, "/libiomp5", 9) == 0;
  if (is_openmp && !loaded->other[0]) strcpy(loaded->other, info->dlpi_name);
  return 0;
}

static int count_loads(struct dl_phdr_info *info, size_t size, void *data) {
  *(unsigned long long *)data = info->dlpi_adds;
  return 1;
}

static bool take_openmp(const char *path) {
  void *library = path[0] ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL; /* kept: it must not go while we use it */
  if (library == NULL) return false;
  OpenMP library_calls = {
      .parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))dlsym(library, "GOMP_parallel"),
      .team = (int (*)(void))dlsym(library, "omp_get_num_threads"),
      .member = (int (*)(void))dlsym(library, "omp_get_thread_num"),
      .most = (int (*)(void))dlsym(library, "omp_get_max_threads"),
  };
  Dl_info place;
  if (!library_calls.parallel || !library_calls.team || !library_calls.member || !library_calls.most) return false;
  if (dladdr((void *)library_calls.parallel, &place) && strlen(place.dli_fname) < sizeof library_calls.path)
    strcpy(library_calls.path, place.dli_fname);
  openmp = library_calls;
  atomic_store_explicit(&openmp_is_found, true, memory_order_release);
  return true;
}

/* PyTorch's, or, if `any`, whichever there is. Looks only where something was loaded since the last time. */
static bool find_openmp(bool any) {
  if (atomic_load_explicit(&openmp_is_found, memory_order_acquire)) return true;
  unsigned long long loads = 0;
  dl_iterate_phdr(count_loads, &loads);
  if (!any && loads == atomic_load_explicit(&libraries_seen, memory_order_relaxed)) return false;
  pthread_mutex_lock(&openmp_search);
  Loaded loaded = {0};
  dl_iterate_phdr(note_library, &loaded);
  atomic_store_explicit(&libraries_seen, loaded.loads, memory_order_relaxed);
  const bool is_there = atomic_load(&openmp_is_found) || take_openmp(loaded.torch) || (any && take_openmp(loaded.other));
  pthread_mutex_unlock(&openmp_search);
  return is_there;
}

/* For how long a thread of this process has had a CPU, to this very moment; -1 if there is none of that number. */
static int64_t running_time(int32_t thread) {
  struct timespec time;
  const clockid_t clock = (clockid_t)(~(uint32_t)thread << 3 | 6); /* CPUCLOCK_SCHED of one thread */
  return clock_gettime(clock, &time) == 0 ? (int64_t)time.tv_sec * 1000000000 + time.tv_nsec : -1;
}

/* Whether a thread that is neither ours nor known to call us runs at this moment: perhaps a member of a team. */
static bool somebody_else_runs(void) {
  DIR *tasks = opendir("/proc/self/task");
  if (tasks == NULL) return false;
  const int32_t own = thread_number();
  int32_t threads[kThreadsLookedAt];
  int64_t before[kThreadsLookedAt];
  int count = 0;
  for (struct dirent *entry; count < kThreadsLookedAt && (entry = readdir(tasks)) != NULL;) {
    const int32_t thread = (int32_t)atoi(entry->d_name);
    if (thread == 0 || thread == own || is_known(thread)) continue;
    threads[count] = thread;
    before[count++] = running_time(thread);
  }
  closedir(tasks);
  for (int i = 0; i < count; ++i)
    if (before[i] >= 0 && running_time(threads[i]) > before[i]) return true;
  return false;
}

#else /* the pools of other systems are ours alone: nobody has tried to tell when such a team is awake */
static bool find_openmp(bool any) { return false; }

static int64_t running_time(int32_t thread) { return -1; }

static bool somebody_else_runs(void) { return false; }
#endif

static bool runs_now(int32_t thread) {
  const int64_t before = running_time(thread);
  return before >= 0 && running_time(thread) > before;
}

static void tell_member(void *data) {
  if (openmp.member() == 1) *(int32_t *)data = thread_number();
}

/* Finds the team of this thread, if it seems to have one: a loop on OpenMP where there is none would make one, which
   spins, and whose being there makes the teams of other threads spin less. So not before somebody runs. */
static void look_for_team(Caller *caller, int most) {
  if (caller->patience > most) caller->patience = most;
  if (caller->patience-- > 0) return;
  caller->patience_grown = caller->patience_grown ? 2 * caller->patience_grown : 1;
  if (caller->patience_grown > kLooks) caller->patience_grown = kLooks;
  caller->patience = caller->patience_grown;
  if (openmp.most() < 2 || !somebody_else_runs()) return;
  openmp.parallel(tell_member, &caller->team, 0, 0);
}

/* Whether this thread's team runs, now. */
static bool team_is_awake(Caller *caller, int64_t now) {
  const int64_t since = now - caller->ended;
  const bool stays = caller->ran_on == kOpenMP && !caller->is_slow;
  if (since < (stays ? kTeamSpinsNanoseconds : kSameMomentNanoseconds)) return stays;
  if (caller->team == 0 && now >= atomic_load(&pool->expected)) look_for_team(caller, kLooks);
  if (caller->team == 0) return false;
  if (running_time(caller->team) < 0) caller->team = 0; /* it has ended */
  return caller->team != 0 && runs_now(caller->team);
}

typedef struct {
  Job job;
  int limit;
} Team;

static void run_member(void *data) {
  Team *team = data;
  const int member = openmp.member();
  if (member >= team->limit) return; /* a team of another size would be made anew: the surplus idles, as in PyTorch */
  ++inside_of_tasks;
  uint32_t generation;
  if (member == 0)
    for (int task; (task = claim_front(&team->job)) >= 0;) run_task(&team->job, task);
  else
    for (int task = claim_seat(&team->job, &generation); task >= 0; task = claim_back(&team->job, generation))
      run_task(&team->job, task);
  --inside_of_tasks;
}

/* On this thread's team, or a part of it. */
static int run_on_openmp(Caller *caller, Lambda lambda, void *closure, int limit, int per_thread) {
  const int most = openmp.most(), threads = limit < most ? limit : most;
  if (threads < 2) return run_serially(lambda, closure);
  Team team = {.limit = threads};
  const int wanted = threads * per_thread;
  open_job(&team.job, lambda, closure, wanted < kMostTasks ? wanted : kMostTasks, threads - 1);
  openmp.parallel(run_member, &team, 0, 0);
  const uint64_t word = atomic_load_explicit(&team.job.claims, memory_order_relaxed);
  caller->is_slow = SEATS(word) == threads - 1; /* nobody came in time: they slept, or a CPU is busy */
  return outcome(&team.job);
}
