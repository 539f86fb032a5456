/* The pool's system is Windows, 8 or later. */
#pragma once

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include "thread_start.h"

#define MHSA_POOL_MEMORY(Type) static Type mhsa_pool_1;

enum { kWorkerStack = 8 << 20 }; /* bytes, as Linux gives; an executable's own default is 1 MiB */

static int64_t nanoseconds(void) {
  static _Atomic int64_t frequency;
  LARGE_INTEGER number;
  int64_t ticks_per_second = atomic_load_explicit(&frequency, memory_order_relaxed);
  if (ticks_per_second == 0) {
    QueryPerformanceFrequency(&number);
    atomic_store_explicit(&frequency, ticks_per_second = number.QuadPart, memory_order_relaxed);
  }
  QueryPerformanceCounter(&number);
  const int64_t seconds = number.QuadPart / ticks_per_second, rest = number.QuadPart % ticks_per_second;
  return seconds * 1000000000 + rest * 1000000000 / ticks_per_second;
}

static void sleep_unless(_Atomic int32_t *word, int32_t changed_from) {
  WaitOnAddress(word, &changed_from, sizeof changed_from, INFINITE);
}

static void wake(_Atomic int32_t *word, int count) {
  for (int i = 0; i < count; ++i) WakeByAddressSingle((void *)word);
}

static int32_t thread_number(void) { return (int32_t)GetCurrentThreadId(); }

static int cpus_of_this_thread(void) {
  DWORD_PTR own, all;
  if (GetProcessAffinityMask(GetCurrentProcess(), &own, &all) && own) return __builtin_popcountll(own);
  SYSTEM_INFO system;
  GetSystemInfo(&system);
  return (int)system.dwNumberOfProcessors;
}

static int this_cpu(void) { return -1; }

static void keep_threads_off(int cpu, const int32_t *threads, int count) {}

static void yield_cpu(void) { SwitchToThread(); }

static DWORD WINAPI run_thread(void *start) {
  run_start(start);
  return 0;
}

static bool start_thread(void (*body)(intptr_t), intptr_t place) {
  Start *const start = new_start(body, place);
  if (start == NULL) return false;
  HMODULE library;
  const DWORD pinned = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN;
  GetModuleHandleExA(pinned, (const char *)(uintptr_t)run_thread, &library);
  const HANDLE thread = CreateThread(NULL, kWorkerStack, run_thread, start, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
  if (thread == NULL) return free(start), false;
  CloseHandle(thread);
  return true;
}

static void after_fork(void (*child)(void)) {} /* there is none */
