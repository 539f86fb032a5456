// Stands between a program and TVM's runtime (LD_PRELOAD), so that helgrind or drd see what threads do to each other:
//
//     cc -O1 -g -shared -fPIC -o parallel_driver.so parallel_driver.c -lpthread
//     PARALLEL_THREADS=3 PARALLEL_REPORT=report.txt LD_PRELOAD=./parallel_driver.so valgrind --tool=helgrind PROGRAM
//
// Each task of a parallel loop gets a thread, which begins and ends with the loop: no two tasks are ordered by anything.
// TVM's own pool keeps its threads and passes work by atomics, of which these tools know nothing. Scratch is memory of
// its own each time, without TVM's pool and its locks, which would order what nothing else does.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {  // TVMParallelGroupEnv of tvm/runtime/c_backend_api.h
  void* sync_handle;
  int32_t num_task;
} Group;
typedef int (*Body)(int task, Group* group, void* closure);
typedef struct {
  Body body;
  void* closure;
  Group group;
  int task, status;
} Task;

enum { MOST_LOOPS = 4096 };
static Body loops[MOST_LOOPS];  // of a single thread: the one that launches
static long launches, loop_count;

static void fail(const char* what) {
  fprintf(stderr, "parallel_driver: %s\n", what);
  abort();
}

static int threads(void) {
  const char* text = getenv("PARALLEL_THREADS");
  const int count = text ? atoi(text) : 0;
  if (count < 2) fail("PARALLEL_THREADS is not a number from 2 on");
  return count;
}

static void note(Body body) {
  ++launches;
  for (long i = 0; i < loop_count; ++i)
    if (loops[i] == body) return;
  if (loop_count == MOST_LOOPS) fail("too many loops");
  loops[loop_count++] = body;
}

static void* run(void* given) {
  Task* task = given;
  task->status = task->body(task->task, &task->group, task->closure);
  return NULL;
}

int TVMBackendParallelLaunch(Body body, void* closure, int count) {
  if (count == 0) count = threads();
  note(body);
  Task* tasks = calloc(count, sizeof *tasks);
  pthread_t* handles = calloc(count, sizeof *handles);
  if (!tasks || !handles) fail("no memory");
  for (int i = 0; i < count; ++i) {
    tasks[i] = (Task){body, closure, {NULL, count}, i, 0};
    if (pthread_create(&handles[i], NULL, run, &tasks[i])) fail("no thread");
  }
  int status = 0;
  for (int i = 0; i < count; ++i) {
    if (pthread_join(handles[i], NULL)) fail("no end of a thread");
    if (tasks[i].status) status = -1;
  }
  free(tasks), free(handles);
  return status;
}

int TVMBackendParallelBarrier(int task, Group* group) {
  (void)task, (void)group;
  fail("a barrier inside of a parallel loop: tasks are no longer without order");
  return -1;
}

void* TVMBackendAllocWorkspace(int device_type, int device, uint64_t bytes, int code, int bits) {
  (void)device_type, (void)device, (void)code, (void)bits;
  void* memory = NULL;
  return posix_memalign(&memory, 64, bytes ? bytes : 1) ? NULL : memory;
}

int TVMBackendFreeWorkspace(int device_type, int device, void* memory) {
  (void)device_type, (void)device;
  free(memory);
  return 0;
}

__attribute__((destructor)) static void report(void) {
  const char* path = getenv("PARALLEL_REPORT");
  FILE* file = path && launches ? fopen(path, "w") : NULL;
  if (!file) return;
  fprintf(file, "%ld %ld\n", launches, loop_count);
  fclose(file);
}
