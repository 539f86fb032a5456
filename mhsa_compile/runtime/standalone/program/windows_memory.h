// Included before all else where a bundle is for Windows, whose C library has no posix_memalign and whose `free` takes
// nothing that is aligned: headers of TVM's allocate by the one and free by the other. So all of it is aligned memory
// here, of the same functions. An object is freed by the library that made it.
#pragma once

#if defined(_WIN32)
#include <errno.h>
#include <malloc.h>

#include <cstdlib>
#include <memory>
#include <string>

inline int posix_memalign(void** place, size_t alignment, size_t size) {
  *place = _aligned_malloc(size, alignment);
  return *place ? 0 : ENOMEM;
}

namespace std {
using ::_aligned_free;
using ::_aligned_malloc;
}  // namespace std

#define malloc(size) _aligned_malloc(size, 16)
#define free(memory) _aligned_free(memory)
#endif
