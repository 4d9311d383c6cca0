/* A CUDA driver that drives nothing: it notes each cuInit, and which GPUs the environment shows at that moment. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int in_use;

int cuInit(unsigned flags) {
    const char *path = getenv("STUB_CUDA_LOG"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s\n", visible ? visible : "all");
        fclose(log);
    }
    in_use = 1;
    return 0;
}

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }

int cuDeviceGetCount(int *count) {
    *count = 1;
    return in_use ? 0 : 3; /* CUDA_ERROR_NOT_INITIALIZED */
}

static int not_supported(void) { return 801; }

/* By this the CUDA runtime, and so torch, finds the rest. */
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
    *found = !strcmp(name, "cuInit")               ? (void *)cuInit
             : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
             : !strcmp(name, "cuDeviceGetCount")   ? (void *)cuDeviceGetCount
             : !strcmp(name, "cuGetProcAddress")   ? (void *)cuGetProcAddress_v2
                                                   : (void *)not_supported;
    if (status) *status = 0;
    return 0;
}

int cuGetProcAddress(const char *name, void **found, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}

int cuGetExportTable(const void **table, const void *id) { return 801; }
