/* What CUDA's cuda_occupancy.h says of how many blocks a multiprocessor holds: lines of "threads registers bytes" in,
   a number for each out. Arguments: compute capability (two numbers), registers, threads and KiB of shared memory of a
   multiprocessor, KiB of shared memory of a block. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda_occupancy.h"

int main(int count, char **words) {
    if (count != 7) return 2;
    struct cudaOccDeviceProp gpu = {0};
    gpu.computeMajor = atoi(words[1]);
    gpu.computeMinor = atoi(words[2]);
    gpu.maxThreadsPerBlock = 1024;
    gpu.regsPerBlock = gpu.regsPerMultiprocessor = atoi(words[3]);
    gpu.maxThreadsPerMultiprocessor = atoi(words[4]);
    gpu.warpSize = 32;
    gpu.sharedMemPerMultiprocessor = 1024 * atoi(words[5]);
    gpu.sharedMemPerBlock = 48 * 1024;
    gpu.sharedMemPerBlockOptin = 1024 * atoi(words[6]);
    gpu.reservedSharedMemPerBlock = 1024;
    gpu.numSms = 1;
    int threads, registers, bytes;
    while (scanf("%d %d %d", &threads, &registers, &bytes) == 3) {
        struct cudaOccDeviceState state = {0};
        state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
        struct cudaOccFuncAttributes kernel = {0};
        kernel.maxThreadsPerBlock = INT_MAX;
        kernel.numRegs = registers;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = bytes;
        kernel.numBlockBarriers = 1;
        struct cudaOccResult result = {0};
        cudaOccError error =
            cudaOccMaxActiveBlocksPerMultiprocessor(&result, &gpu, &kernel, &state, threads, (size_t)bytes);
        if (error) return fprintf(stderr, "error %d of %d %d %d\n", error, threads, registers, bytes), 3;
        printf("%d\n", result.activeBlocksPerMultiprocessor);
    }
    return 0;
}
