/* The GPUs of the stub driver and the stub NVML: the same ones for both. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_GPUS 64
#define STUB_NAME "NVIDIA H100 80GB HBM3"
#define STUB_MEMORY (80ull << 30)

static inline int stub_gpus(void) {
    const char *told = getenv("STUB_GPUS");
    int number = told ? atoi(told) : 1;
    return number < 0 ? 0 : number > MOST_GPUS ? MOST_GPUS : number;
}

static inline void stub_uuid_bytes(int gpu, unsigned char bytes[16]) {
    memset(bytes, 0x5b, 16);
    bytes[0] = (unsigned char)gpu; /* first, so that an abbreviated UUID is a UUID too */
}

static inline void stub_uuid(int gpu, char text[48]) {
    unsigned char bytes[16];
    stub_uuid_bytes(gpu, bytes);
    strcpy(text, "GPU-");
    for (int i = 0; i < 16; i++)
        sprintf(text + strlen(text), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
}

/* The GPU whose UUID begins so; -1 if there is none, or more than one. */
static inline int stub_gpu_by_uuid(const char *begins, size_t length) {
    int found = -1;
    for (int gpu = 0; gpu < stub_gpus(); gpu++) {
        char uuid[48];
        stub_uuid(gpu, uuid);
        if (strncmp(uuid, begins, length)) continue;
        if (found >= 0) return -1;
        found = gpu;
    }
    return found;
}
