/* The pool's system is Linux: its own futex and affinity, so that no thread sleeps or moves by way of the C library. */
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>

#include "posix_threads.h"

#ifndef SYS_futex /* 32-bit machines whose headers know 64-bit times only */
#define SYS_futex SYS_futex_time64
#endif

/* `mhsa_pool_1` is unique in the process, whatever number of libraries bring it and however they are loaded: so says the
   type of its symbol to the dynamic linker, which then never unloads the first of them either. Another layout or
   protocol of what lies in it needs another name. */
#define MHSA_POOL_MEMORY(Type)                     \
  __asm__(                                         \
      ".pushsection .bss.mhsa_pool_1,\"aw\",%nobits\n" \
      ".globl mhsa_pool_1\n"                       \
      ".type mhsa_pool_1, %gnu_unique_object\n"    \
      ".size mhsa_pool_1, 32768\n"                 \
      ".balign 128\n"                              \
      "mhsa_pool_1: .zero 32768\n"                 \
      ".popsection\n");                            \
  extern Type mhsa_pool_1;

static void sleep_unless(_Atomic int32_t *word, int32_t changed_from) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, changed_from, NULL, NULL, 0);
}

static void wake(_Atomic int32_t *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0); }

static int32_t thread_number(void) { return (int32_t)syscall(SYS_gettid); }

static int cpus_of_this_thread(void) {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
}

static int this_cpu(void) {
  const int cpu = sched_getcpu();
  return cpu < CPU_SETSIZE ? cpu : -1;
}

static void keep_threads_off(int cpu, const int32_t *threads, int count) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
  CPU_CLR(cpu, &allowed);
  for (int i = 0; i < count && CPU_COUNT(&allowed) > 0; ++i)
    if (threads[i]) sched_setaffinity(threads[i], sizeof allowed, &allowed);
}

static bool start_thread(void (*body)(intptr_t), intptr_t place) { return start_detached(body, place, 0); }

static void after_fork(void (*child)(void)) { pthread_atfork(NULL, NULL, child); }
