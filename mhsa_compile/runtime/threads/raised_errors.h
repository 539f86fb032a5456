/* TVM's functions for the error that a thread has raised. They are libtvm_ffi's, which is there wherever TVM's code runs;
   a test of this file alone has none.

   A library for Windows names the library that each of its symbols is of. Which one that is depends on who loads the code:
   TVM's packages have tvm_ffi.dll, a bundle has all of TVM's runtime in one. So there they are searched for. */
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

static void *tvm_function(const char *name) {
  const char *const libraries[] = {"tvm_ffi.dll", "tvm_runtime.dll", NULL /* the program itself */};
  for (int i = 0; i < 3; ++i) {
    const HMODULE library = GetModuleHandleA(libraries[i]);
    void *const function = library ? (void *)(uintptr_t)GetProcAddress(library, name) : NULL;
    if (function) return function;
  }
  return NULL;
}

static void move_from_raised(void **error) {
  void (*const move)(void **) = (void (*)(void **))tvm_function("TVMFFIErrorMoveFromRaised");
  if (move) move(error);
}

static void set_raised(void *error) { ((void (*)(void *))tvm_function("TVMFFIErrorSetRaised"))(error); }

static void let_go_of(void *object) { ((int (*)(void *))tvm_function("TVMFFIObjectDecRef"))(object); }

static void raise_words(const char *kind, const char *words) {
  ((void (*)(const char *, const char *))tvm_function("TVMFFIErrorSetRaisedFromCStr"))(kind, words);
}

/* What TVM's code calls by its name, where all else goes through pointers that its loader sets. */
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  ((void (*)(const char *, const char **, int32_t))tvm_function("TVMFFIErrorSetRaisedFromCStrParts"))(kind, parts, count);
}
#else
#if defined(__APPLE__)
#define MHSA_ABSENT_AT_TIMES __attribute__((weak_import))
#else
#define MHSA_ABSENT_AT_TIMES __attribute__((weak))
#endif
MHSA_ABSENT_AT_TIMES void TVMFFIErrorMoveFromRaised(void **error);
MHSA_ABSENT_AT_TIMES void TVMFFIErrorSetRaised(void *error);
MHSA_ABSENT_AT_TIMES void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *words);
MHSA_ABSENT_AT_TIMES int TVMFFIObjectDecRef(void *object);

static void move_from_raised(void **error) {
  if (TVMFFIErrorMoveFromRaised) TVMFFIErrorMoveFromRaised(error);
}

static void set_raised(void *error) { TVMFFIErrorSetRaised(error); }

static void let_go_of(void *object) { TVMFFIObjectDecRef(object); }

static void raise_words(const char *kind, const char *words) { TVMFFIErrorSetRaisedFromCStr(kind, words); }
#endif
