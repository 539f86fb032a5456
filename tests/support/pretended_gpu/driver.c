// NVIDIA's driver (libcuda.so.1) without a GPU: two made-up H200s whose memory is the host's, and whose kernels do nothing,
// or are computed by libraries for the CPU that a test brings (emulator.py).
//
// It refuses what CUDA refuses: code that is none, kernels that the code does not have, grids without blocks, blocks that
// are too large, shared memory that nobody asked for. What happens is noted, a line each, for tests to read.
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_IMAGE = 200, NOT_FOUND = 500 };
enum { DEVICES = 2, UNASKED_SHARED = 48 * 1024, MOST_SHARED = 227 * 1024 };

typedef struct {
    const unsigned char* image;
} Module;

typedef struct {
    char name[256];
    unsigned shared;
} Function;

typedef struct {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned attribute_count;
} LaunchConfig;

// What tests ask and say.

static char notes[1 << 20];
static size_t noted;
static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;  // calls come from several threads at once
static char failing[256];
static int failing_code;
static void* libraries[256];
static int library_count;

void pretended_note(const char* format, ...) {
    va_list words;
    va_start(words, format);
    pthread_mutex_lock(&noting);
    if (noted + 512 < sizeof notes) {
        vsnprintf(notes + noted, 512, format, words);
        noted += strlen(notes + noted);
    }
    pthread_mutex_unlock(&noting);
    va_end(words);
}

const char* pretended_notes(void) { return notes; }

void pretended_clear(void) { notes[noted = 0] = 0; }

// From now on launches of this kernel, "*" being any, end so; 0 is none.
void pretended_fail(const char* kernel, int code) {
    snprintf(failing, sizeof failing, "%s", kernel);
    failing_code = code;
}

// A library with a function emulate_NAME for each kernel. Whether it was found.
int pretended_kernels(const char* path) {
    void* opened = library_count < 256 ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (opened) libraries[library_count++] = opened;
    return opened != NULL;
}

int pretended_attribute(int* value, int which) {
    switch (which) {
        case 10: *value = 32; break;                  // lanes of a warp
        case 16: *value = 132; break;                 // multiprocessors
        case 75: *value = 9; break;                   // compute capability
        case 76: *value = 0; break;
        case 97: *value = MOST_SHARED; break;
        default: *value = 1024;
    }
    return OK;
}

// The driver's interface, as cuda.h of CUDA 13 has it.

int cuInit(unsigned flags) { return OK; }

int cuDriverGetVersion(int* version) { return *version = 13000, OK; }

int cuDeviceGetCount(int* count) { return *count = DEVICES, OK; }

int cuDeviceGet(int* device, int index) {
    if (index < 0 || index >= DEVICES) return INVALID_DEVICE;
    return *device = index, OK;
}

int cuDeviceGetName(char* name, int size, int device) { return snprintf(name, size, "made-up H200"), OK; }

int cuDeviceGetAttribute(int* value, int which, int device) { return pretended_attribute(value, which); }

int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = &notes[device], OK; }

int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }

int cuCtxPushCurrent_v2(void* context) { return OK; }

int cuCtxPopCurrent_v2(void** context) { return OK; }

int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = *total = (size_t)1 << 37, OK; }

// Streams of tests: addresses whose last digit is their GPU's number.
int cuStreamGetDevice(void* stream, int* device) { return *device = (uintptr_t)stream % 10, OK; }

int cuGetErrorName(int code, const char** name) {
    *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
          : code == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" : "CUDA_ERROR_OTHER";
    return OK;
}

int cuGetErrorString(int code, const char** words) { return *words = "as the test wants it", OK; }

int cuModuleLoadData(void** module, const void* image) {
    if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
    Module* made = malloc(sizeof *made);
    made->image = image;
    pretended_note("module\n");
    return *module = made, OK;
}

int cuModuleUnload(void* module) { return OK; }

// Whether the machine code has a function of this name: in the symbol table of a 64-bit ELF file.
static int has_function(const unsigned char* elf, const char* name) {
    uint64_t table = *(const uint64_t*)(elf + 40);
    uint16_t size = *(const uint16_t*)(elf + 58), count = *(const uint16_t*)(elf + 60);
    for (int i = 0; i < count; i++) {
        const unsigned char* section = elf + table + (uint64_t)i * size;
        if (*(const uint32_t*)(section + 4) != 2) continue;  // SHT_SYMTAB
        const unsigned char* strings = elf + table + (uint64_t)*(const uint32_t*)(section + 40) * size;
        const char* names = (const char*)elf + *(const uint64_t*)(strings + 24);
        const unsigned char *first = elf + *(const uint64_t*)(section + 24), *end = first + *(const uint64_t*)(section + 32);
        for (const unsigned char* symbol = first; symbol < end; symbol += 24)
            if ((symbol[4] & 15) == 2 && !strcmp(names + *(const uint32_t*)symbol, name)) return 1;  // STT_FUNC
    }
    return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    if (!has_function(((Module*)module)->image, name)) return NOT_FOUND;
    Function* made = calloc(1, sizeof *made);
    snprintf(made->name, sizeof made->name, "%s", name);
    made->shared = UNASKED_SHARED;
    return *function = made, OK;
}

int cuFuncSetAttribute(void* function, int which, int value) {
    if (which == 8) {  // the largest dynamic shared memory
        if (value > MOST_SHARED) return INVALID_VALUE;
        ((Function*)function)->shared = value;
    }
    return OK;
}

int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
    const Function* kernel = function;
    const unsigned *grid = config->grid, *block = config->block;
    if (failing_code && (!strcmp(failing, "*") || !strcmp(failing, kernel->name))) return failing_code;
    if (!grid[0] || !grid[1] || !grid[2] || block[0] * block[1] * block[2] > 1024) return INVALID_VALUE;
    if (config->shared > kernel->shared) return INVALID_VALUE;
    pretended_note("launch %s grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%llu\n", kernel->name, grid[0], grid[1],
                   grid[2], block[0], block[1], block[2], config->shared, (unsigned long long)(uintptr_t)config->stream);
    char name[300];
    snprintf(name, sizeof name, "emulate_%s", kernel->name);
    for (int i = library_count; i--;) {  // the last that was brought, since names come again
        void (*emulate)(void**, const unsigned*, const unsigned*) = dlsym(libraries[i], name);
        if (emulate) return emulate(arguments, grid, block), OK;
    }
    return OK;
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) {
    if ((uintptr_t)map % 64 || !address || (uintptr_t)address % 16 || rank < 1 || rank > 5) return INVALID_VALUE;
    for (unsigned i = 0; i + 1 < rank; i++)
        if (strides[i] % 16 || strides[i] >> 40) return INVALID_VALUE;
    for (unsigned i = 0; i < rank; i++)
        if (!sizes[i] || sizes[i] > 1ULL << 32 || !box[i] || box[i] > 256) return INVALID_VALUE;
    pretended_note("tensor map of %u: type %d sizes", rank, type);
    for (unsigned i = 0; i < rank; i++) pretended_note(" %llu", (unsigned long long)sizes[i]);
    pretended_note(" strides");
    for (unsigned i = 0; i + 1 < rank; i++) pretended_note(" %llu", (unsigned long long)strides[i]);
    pretended_note(" box");
    for (unsigned i = 0; i < rank; i++) pretended_note(" %u", box[i]);
    pretended_note(" swizzle %d fill %d\n", swizzle, fill);
    return OK;
}
