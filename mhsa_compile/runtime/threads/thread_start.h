/* How a thread of the pool begins, on every system: a body and its place, on the heap until the thread has read them. */
#pragma once

typedef struct {
  void (*body)(intptr_t);
  intptr_t place;
} Start;

static Start *new_start(void (*body)(intptr_t), intptr_t place) {
  Start *const start = malloc(sizeof *start);
  if (start != NULL) *start = (Start){body, place};
  return start;
}

static void run_start(Start *allocated) {
  const Start start = *allocated;
  free(allocated);
  start.body(start.place);
}
