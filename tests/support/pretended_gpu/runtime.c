// CUDA's runtime (libcudart.so.13) over the driver beside it: as much of it as TVM's runtime asks for.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void pretended_note(const char* format, ...);
int pretended_attribute(int* value, int which);

enum { OK = 0, DEVICES = 2 };
static _Thread_local int current;
static _Atomic uintptr_t streams = 1000;

int cudaGetDeviceCount(int* count) { return *count = DEVICES, OK; }

int cudaGetDevice(int* device) { return *device = current, OK; }

int cudaSetDevice(int device) { return device < 0 || device >= DEVICES ? 101 : (current = device, OK); }

int cudaDeviceGetAttribute(int* value, int which, int device) { return pretended_attribute(value, which); }

int cudaGetDeviceProperties(void* properties, int device) { return OK; }

int cudaGetLastError(void) { return OK; }

int cudaPeekAtLastError(void) { return OK; }

const char* cudaGetErrorName(int code) { return code ? "cudaErrorMadeUp" : "cudaSuccess"; }

const char* cudaGetErrorString(int code) { return "as the test wants it"; }

int cudaMalloc(void** memory, size_t size) {
    pretended_note("allocate %zu on cuda:%d\n", size, current);
    if (!size) return *memory = NULL, OK;  // as CUDA does
    return (*memory = aligned_alloc(256, (size + 255) / 256 * 256)) ? OK : 2;
}

int cudaFree(void* memory) { return free(memory), OK; }

int cudaMallocHost(void** memory, size_t size) { return (*memory = malloc(size)) ? OK : 2; }

int cudaFreeHost(void* memory) { return free(memory), OK; }

int cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = (size_t)1 << 37, OK; }

int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
    pretended_note("copy %zu\n", size);
    return memcpy(to, from, size), OK;
}

int cudaMemcpyPeerAsync(void* to, int there, const void* from, int here, size_t size, void* stream) {
    pretended_note("copy %zu\n", size);
    return memcpy(to, from, size), OK;
}

int cudaStreamCreate(void** stream) { return *stream = (void*)(streams += 10), OK; }

int cudaStreamCreateWithFlags(void** stream, unsigned flags) { return cudaStreamCreate(stream); }

int cudaStreamDestroy(void* stream) { return OK; }

int cudaStreamSynchronize(void* stream) {
    pretended_note("wait %llu\n", (unsigned long long)(uintptr_t)stream);
    return OK;
}

int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) { return OK; }

int cudaStreamBeginCapture(void* stream, int mode) { return OK; }

int cudaStreamEndCapture(void* stream, void** graph) { return OK; }

int cudaGraphInstantiate(void** made, void* graph, unsigned long long flags) { return OK; }

int cudaGraphLaunch(void* graph, void* stream) { return OK; }

int cudaGraphDestroy(void* graph) { return OK; }

int cudaGraphExecDestroy(void* graph) { return OK; }

int cudaEventCreate(void** event) { return *event = malloc(1), OK; }

int cudaEventDestroy(void* event) { return free(event), OK; }

int cudaEventRecord(void* event, void* stream) { return OK; }

int cudaEventSynchronize(void* event) { return OK; }

int cudaEventElapsedTime(float* milliseconds, void* begin, void* end) { return *milliseconds = 1, OK; }
