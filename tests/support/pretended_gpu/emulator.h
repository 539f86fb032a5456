// CUDA C++ on the CPU: what generated kernels take for granted, for a C++ compiler of the host's.
//
// Blocks run one after another. The threads of one are fibers that take turns at barriers, so a value that another thread
// has not written yet is missing here, too. Instructions written out as assembly have no meaning here.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#undef __device__
#undef __global__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#define __device__
#define __global__
#define __host__
#define __shared__ static  // blocks take turns
#define __launch_bounds__(...)

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

template <class A, class B>
static inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }
template <class A, class B>
static inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class To, class From>
static inline To bits_as(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline double __longlong_as_double(long long x) { return bits_as<double>(x); }
static inline float __int_as_float(int x) { return bits_as<float>(x); }

namespace emulated {

enum { STACK = 64 * 1024 };
static ucontext_t scheduler;

struct Fiber {
    ucontext_t context;
    Index index;
    bool finished;
};
static Fiber* running;
static void (*body)(void**);
static void** arguments;

static void enter() {
    body(arguments);
    running->finished = true;
    swapcontext(&running->context, &scheduler);
}

// Of one block: each turn takes every thread from one barrier to the next.
static void run_fibers() {
    static Fiber fibers[1024];
    static char* stacks = static_cast<char*>(std::malloc(1024l * STACK));
    unsigned count = blockDim.x * blockDim.y * blockDim.z;
    for (unsigned i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
        fiber.finished = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + (long)i * STACK;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    for (unsigned left = count; left;) {
        left = 0;
        for (unsigned i = 0; i < count; i++) {
            if (fibers[i].finished) continue;
            running = &fibers[i];
            threadIdx = running->index;
            swapcontext(&scheduler, &running->context);
            left += !fibers[i].finished;
        }
    }
}

static void run(void (*kernel)(void**), void** given, const unsigned* grid, const unsigned* block) {
    body = kernel, arguments = given;
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++) run_fibers();
}

}  // namespace emulated

static inline void __syncthreads() {
    emulated::Fiber* self = emulated::running;
    swapcontext(&self->context, &emulated::scheduler);
    emulated::running = self;
    threadIdx = self->index;
}
