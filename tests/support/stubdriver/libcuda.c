/* A CUDA driver for tests. It drives nothing, but obeys three rules of the real one: CUDA_VISIBLE_DEVICES is
 * read once in the life of a process, at the first cuInit; before that, calls give CUDA_ERROR_NOT_INITIALIZED;
 * and so they do in a child of a process that has called it.
 *
 * STUB_GPUS: the number of GPUs. STUB_DRIVER_LOG: a file; a line each time the library is loaded or
 * initialised: pid, what ("loaded", "cuInit", "forked"), the GPUs that this process has from then on, the
 * variable, the program; with tabs between. STUB_BROKEN_GPUS: a file with the GPUs that cuInit finds missing.
 *
 * torch's CUDA runtime calls this cuInit, but gets no further: the tables that it asks for then are not public.
 */
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpus.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };

static pid_t owner;   /* who has called cuInit; 0: nobody yet */
static int answer;    /* of cuInit */
static int visible[MOST_GPUS], count;

static void note(const char *what) {
    const char *path = getenv("STUB_DRIVER_LOG"), *variable = getenv("CUDA_VISIBLE_DEVICES");
    if (!path) return;
    char line[8192], gpus[4 * MOST_GPUS] = "", program[4096] = "";
    for (int i = 0; i < count; i++) sprintf(gpus + strlen(gpus), i ? ",%d" : "%d", visible[i]);
    int command = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = command < 0 ? 0 : read(command, program, sizeof program - 1);
    if (command >= 0) close(command);
    for (ssize_t i = 0; i < length; i++)
        if (iscntrl((unsigned char)program[i])) program[i] = ' ';
    int size = snprintf(line, sizeof line, "%d\t%s\t%s\t%s\t%s\n", (int)getpid(), what, gpus,
                        variable ? variable : "(not set)", program);
    int log = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (log < 0) return;
    if (write(log, line, size < (int)sizeof line ? size : (int)sizeof line - 1) < 0) perror(path);
    close(log);
}

__attribute__((constructor)) static void loaded(void) { note("loaded"); }

static int broken(int gpu) {
    const char *path = getenv("STUB_BROKEN_GPUS");
    FILE *file = path ? fopen(path, "r") : NULL;
    int found = 0;
    for (int each; file && fscanf(file, "%d", &each) == 1;) found |= each == gpu;
    if (file) fclose(file);
    return found;
}

/* The GPU that a word of CUDA_VISIBLE_DEVICES names; -1: none, which ends the list. */
static int named(const char *word) {
    const char *order = getenv("CUDA_DEVICE_ORDER");
    if (!strncmp(word, "GPU-", 4)) return stub_gpu_by_uuid(word, strlen(word));
    char *end;
    long index = strtol(word, &end, 10);
    if (end == word || index < 0 || index >= stub_gpus()) return -1;
    /* By default CUDA counts the fastest first: here that is the last, so that it shows. */
    return order && !strcmp(order, "PCI_BUS_ID") ? (int)index : stub_gpus() - 1 - (int)index;
}

static void look(void) {
    const char *variable = getenv("CUDA_VISIBLE_DEVICES");
    count = 0;
    if (!variable) {
        for (int gpu = 0; gpu < stub_gpus(); gpu++)
            if (!broken(gpu)) visible[count++] = gpu;
        return;
    }
    char words[1024];
    snprintf(words, sizeof words, "%s", variable);
    for (char *rest = words, *word; (word = strsep(&rest, ",")) && count < MOST_GPUS;) {
        int gpu = named(word);
        if (gpu < 0 || broken(gpu)) return;
        visible[count++] = gpu;
    }
}

int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (!owner) {
        owner = getpid();
        look();
        answer = count ? SUCCESS : NO_DEVICE;
        note("cuInit");
    } else if (owner != getpid()) {
        note("forked");
        return NOT_INITIALIZED;
    }
    return answer;
}

static int state(void) { return owner == getpid() ? answer : NOT_INITIALIZED; }

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuDeviceGetCount(int *number) {
    if (state()) return state();
    *number = count;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    if (state()) return state();
    if (ordinal < 0 || ordinal >= count) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int length, int device) {
    if (cuDeviceGet(&device, device)) return INVALID_DEVICE;
    snprintf(name, length, "%s", STUB_NAME);
    return SUCCESS;
}

int cuDeviceGetUuid_v2(unsigned char uuid[16], int device) {
    if (cuDeviceGet(&device, device)) return INVALID_DEVICE;
    stub_uuid_bytes(visible[device], uuid);
    return SUCCESS;
}

int cuDeviceGetUuid(unsigned char uuid[16], int device) { return cuDeviceGetUuid_v2(uuid, device); }

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (cuDeviceGet(&device, device)) return INVALID_DEVICE;
    *bytes = STUB_MEMORY;
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (cuDeviceGet(&device, device)) return INVALID_DEVICE;
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1; /* compute capability 9.0 */
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == NO_DEVICE         ? "no CUDA-capable device is detected"
            : error == NOT_INITIALIZED ? "initialization error"
            : error == SUCCESS         ? "no error"
                                       : "operation not supported";
    return SUCCESS;
}

int cuGetExportTable(const void **table, const void *id) { return NOT_SUPPORTED; }

static int not_supported(void) { return NOT_SUPPORTED; }

/* By this the CUDA runtime, and so torch, finds the rest. */
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
    static const struct {
        const char *name;
        void *function;
    } known[] = {
        {"cuInit", cuInit},
        {"cuDriverGetVersion", cuDriverGetVersion},
        {"cuDeviceGetCount", cuDeviceGetCount},
        {"cuDeviceGet", cuDeviceGet},
        {"cuDeviceGetName", cuDeviceGetName},
        {"cuDeviceGetUuid", cuDeviceGetUuid_v2},
        {"cuDeviceTotalMem", cuDeviceTotalMem_v2},
        {"cuDeviceGetAttribute", cuDeviceGetAttribute},
        {"cuGetErrorString", cuGetErrorString},
        {"cuGetExportTable", cuGetExportTable},
        {"cuGetProcAddress", cuGetProcAddress_v2},
    };
    *found = not_supported;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) *found = known[i].function;
    if (status) *status = 0;
    return SUCCESS;
}

int cuGetProcAddress(const char *name, void **found, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
