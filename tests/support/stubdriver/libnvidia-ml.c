/* NVML for tests: the GPUs of the stub driver, idle and in good health. What is not here, callers find missing,
 * as in an NVML that is older than they are.
 *
 * STUB_GPU_CORES: the cores near each GPU, "0,1 0,1 2,3 2,3"; without it NVML does not know them.
 */
#include "gpus.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;

typedef struct {
    unsigned gpu, memory;
} Utilization;

/* Handles are the GPUs' numbers from 1. */
static int gpu_of(void *handle) {
    size_t number = (size_t)handle;
    return number >= 1 && number <= (size_t)stub_gpus() ? (int)number - 1 : -1;
}

static int say(const char *text, char *where, unsigned length) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(where, text);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInit(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int error) {
    return error == SUCCESS ? "Success" : error == NOT_SUPPORTED ? "Not Supported" : "Error of the stub NVML";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) { return say("580.00", version, length); }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)stub_gpus();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)((size_t)index + 1);
    return gpu_of(*handle) < 0 ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int gpu = strlen(uuid) == 40 ? stub_gpu_by_uuid(uuid, 40) : -1;
    *handle = (void *)((size_t)gpu + 1);
    return gpu < 0 ? NOT_FOUND : SUCCESS;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    *index = (unsigned)gpu_of(handle);
    return gpu_of(handle) < 0 ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    char uuid[48];
    if (gpu_of(handle) < 0) return INVALID_ARGUMENT;
    stub_uuid(gpu_of(handle), uuid);
    return say(uuid, text, length);
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    return gpu_of(handle) < 0 ? INVALID_ARGUMENT : say(STUB_NAME, name, length);
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    *memory = (Memory){STUB_MEMORY, STUB_MEMORY, 0};
    return gpu_of(handle) < 0 ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
    *memory = (MemoryV2){memory->version, STUB_MEMORY, 0, STUB_MEMORY, 0};
    return gpu_of(handle) < 0 ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, Utilization *rates) {
    *rates = (Utilization){0, 0};
    return gpu_of(handle) < 0 ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetComputeMode(void *handle, int *mode) {
    *mode = 0; /* default: as many processes as like */
    return gpu_of(handle) < 0 ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *after_reset) { return NOT_SUPPORTED; }

int nvmlDeviceGetCpuAffinity(void *handle, unsigned words, unsigned long *cores) {
    const char *told = getenv("STUB_GPU_CORES");
    int gpu = gpu_of(handle);
    if (gpu < 0) return INVALID_ARGUMENT;
    if (!told) return NOT_SUPPORTED;
    const unsigned bits = 8 * sizeof *cores;
    memset(cores, 0, words * sizeof *cores);
    for (; gpu && told; gpu--) told = (told = strchr(told, ' ')) ? told + 1 : NULL;
    while (told && *told && *told != ' ') {
        char *end;
        unsigned long core = strtoul(told, &end, 10);
        if (end == told) return INVALID_ARGUMENT;
        if (core < (unsigned long)words * bits) cores[core / bits] |= 1ul << core % bits;
        told = *end == ',' ? end + 1 : end;
    }
    return SUCCESS;
}
