/* The features of a CPU without which this library's code is not to run, as the words of /proc/cpuinfo. Here, too, since
   a manifest is a file beside it that anybody can edit. */
#include <stdint.h>

#include "exported.h"

typedef struct {
  int32_t type, padding;
  int64_t number;
} Any; /* TVM's TVMFFIAny, for a number */

/* mhsa_cpu_features() -> the address of the words. */
MHSA_EXPORTED int __tvm_ffi_mhsa_cpu_features(void *self, const Any *arguments, int32_t count, Any *result) {
  result->type = 1 /* kTVMFFIInt */, result->padding = 0, result->number = (int64_t)(intptr_t)MHSA_CPU_FEATURES;
  return 0;
}
