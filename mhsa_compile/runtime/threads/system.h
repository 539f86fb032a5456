/* What the pool asks of the system, the same functions of each:

     nanoseconds           a clock that never goes back
     sleep_unless, wake    a futex: sleeps while a word has a value, until somebody wakes those who sleep on it; both may
                           wake a sleeper too many
     thread_number         of the calling thread, never 0
     cpus_of_this_thread   that it may run on
     this_cpu              the number of the one it runs on; -1 where nobody tells, or nobody could be kept off it
     keep_threads_off      lets threads, by their numbers, run on every CPU but one
     yield_cpu             lets others have the CPU, if any wants it
     start_thread          runs body(place) on a new thread, which never ends, in a library that then never goes
     after_fork            has a function called in the child
     MHSA_POOL_MEMORY      defines `mhsa_pool_1`, of a type: one for the process where its dynamic linker can say so, else one for
                           each library */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(_WIN32)
#include "system_windows.h"
#elif defined(__linux__) && !defined(MHSA_PORTABLE_POOL)
#include "system_linux.h"
#else
#include "system_posix.h"
#endif
