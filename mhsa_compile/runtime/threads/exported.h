/* MHSA_EXPORTED: of a function that whoever loads the library finds by its name. */
#pragma once

#if defined(_WIN32)
#define MHSA_EXPORTED __declspec(dllexport)
#else
#define MHSA_EXPORTED __attribute__((visibility("default")))
#endif
