/* Preloaded into all processes of a run: calls on files below a folder fail or take long, and the clock jumps,
 * as a control block says that is mapped from the file named by CHAOS_SHIM (written by shim.py). */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, SYNC = 4, RENAME = 8, READ = 16, MAKE = 32, ROOM = 64, UNLINK = 128 };
enum { AGENT = 1, WORKER = 2 };

struct rule {
    uint32_t calls, who, chance; /* chance: of a million */
    int32_t error;               /* 0: none */
    uint32_t delay_us;
    uint32_t left;               /* how often it may strike still */
};

struct control {
    uint32_t on, struck;
    int64_t clock_ns;
    int64_t written, synced; /* the end of the journal, and of what of it is durable */
    struct rule rules[4];
    char below[512];
};

static struct control *control;
static __thread int inside;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CHAOS_SHIM");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (mapped != MAP_FAILED) control = mapped;
}

static int below(const char *path) {
    size_t length = strlen(control->below);
    return strncmp(path, control->below, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int path_below(int folder, const char *path) {
    char there[PATH_MAX], whole[2 * PATH_MAX], name[64];
    if (path[0] == '/') return below(path);
    if (folder == AT_FDCWD) strcpy(name, "/proc/self/cwd");
    else snprintf(name, sizeof name, "/proc/self/fd/%d", folder);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, there, sizeof there - 1);
    if (length < 0) return 0;
    there[length] = 0;
    snprintf(whole, sizeof whole, "%s/%s", there, path);
    return below(whole);
}

static int fd_below(int fd) {
    char there[PATH_MAX], name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, name, there, sizeof there - 1);
    if (length <= 0) return 0;
    there[length] = 0;
    return below(there);
}

static int is_journal(int fd) {
    static const char name[] = "/journal.jsonl";
    char there[PATH_MAX], link[64];
    if (getenv("HPCSCHED_JOB_ID")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, there, sizeof there - 1);
    if (length < (ssize_t)sizeof name) return 0;
    there[length] = 0;
    return below(there) && strcmp(there + length - (sizeof name - 1), name) == 0;
}

static uint32_t drawn(void) {
    static __thread uint64_t state;
    if (!state) {
        struct timespec now;
        syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
        state = now.tv_nsec * 2654435761u + now.tv_sec + getpid() + 1;
    }
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % 1000000;
}

/* Waits as long as the rules say, and returns the error to report; 0: the call is made. */
static int strikes(uint32_t call) {
    uint32_t who = getenv("HPCSCHED_JOB_ID") ? WORKER : AGENT;
    for (int i = 0; i < 4; i++) {
        struct rule *rule = &control->rules[i];
        if (!(rule->calls & call) || !(rule->who & who) || drawn() >= rule->chance) continue;
        uint32_t left = __atomic_load_n(&rule->left, __ATOMIC_RELAXED);
        if (!left || !__atomic_compare_exchange_n(&rule->left, &left, left - 1, 0, 0, 0)) continue;
        __atomic_add_fetch(&control->struck, 1, __ATOMIC_RELAXED);
        if (rule->delay_us) {
            struct timespec wait = {rule->delay_us / 1000000, rule->delay_us % 1000000 * 1000};
            syscall(SYS_nanosleep, &wait, NULL);
        }
        if (rule->error) return rule->error;
    }
    return 0;
}

#define LOOK_OR(nothing, call, where)                                                                        \
    if (control && control->on && !inside) {                                                                 \
        int before = errno, error = 0;                                                                       \
        inside = 1;                                                                                          \
        if (where) error = strikes(call);                                                                    \
        inside = 0;                                                                                          \
        errno = before;                                                                                      \
        if (error) { errno = error; return nothing; }                                                        \
    }
#define LOOK(call, where) LOOK_OR(-1, call, where)
#define NEXT(name) static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name)
#define KIND(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT) ? OPEN : READ)

#define OPENS(name)                                                                                          \
    int name(const char *path, int flags, ...) {                                                             \
        NEXT(name);                                                                                          \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest);               \
        LOOK(KIND(flags), path_below(AT_FDCWD, path))                                                        \
        return next(path, flags, mode);                                                                      \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                                                       \
    int name(int folder, const char *path, int flags, ...) {                                                 \
        NEXT(name);                                                                                          \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest);               \
        LOOK(KIND(flags), path_below(folder, path))                                                          \
        return next(folder, path, flags, mode);                                                              \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t write(int fd, const void *data, size_t size) {
    NEXT(write);
    LOOK(WRITE, fd_below(fd))
    ssize_t done = next(fd, data, size);
    if (control && done > 0 && is_journal(fd)) control->written = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    return done;
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    NEXT(pwrite64); LOOK(WRITE, fd_below(fd)) return next(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    NEXT(writev); LOOK(WRITE, fd_below(fd)) return next(fd, parts, count);
}
ssize_t read(int fd, void *data, size_t size) {
    NEXT(read); LOOK(READ, fd_below(fd)) return next(fd, data, size);
}
#define SYNCS(name)                                                                                          \
    int name(int fd) {                                                                                       \
        NEXT(name);                                                                                          \
        LOOK(SYNC, fd_below(fd))                                                                             \
        int code = next(fd);                                                                                 \
        if (control && !code && is_journal(fd)) control->synced = control->written;                          \
        return code;                                                                                         \
    }
SYNCS(fsync)
SYNCS(fdatasync)
int rename(const char *old, const char *new) {
    NEXT(rename); LOOK(RENAME, path_below(AT_FDCWD, new)) return next(old, new);
}
int renameat(int there, const char *old, int folder, const char *new) {
    NEXT(renameat); LOOK(RENAME, path_below(folder, new)) return next(there, old, folder, new);
}
int renameat2(int there, const char *old, int folder, const char *new, unsigned flags) {
    NEXT(renameat2); LOOK(RENAME, path_below(folder, new)) return next(there, old, folder, new, flags);
}
int link(const char *old, const char *new) {
    NEXT(link); LOOK(MAKE, path_below(AT_FDCWD, new)) return next(old, new);
}
int mkdir(const char *path, mode_t mode) {
    NEXT(mkdir); LOOK(MAKE, path_below(AT_FDCWD, path)) return next(path, mode);
}

int unlink(const char *path) {
    NEXT(unlink); LOOK(UNLINK, path_below(AT_FDCWD, path)) return next(path);
}
int unlinkat(int folder, const char *path, int flags) {
    NEXT(unlinkat); LOOK(UNLINK, path_below(folder, path)) return next(folder, path, flags);
}
DIR *opendir(const char *path) {
    NEXT(opendir); LOOK_OR(NULL, READ, path_below(AT_FDCWD, path)) return next(path);
}
#define STATS(name, type)                                                                                    \
    int name(const char *path, struct type *about) {                                                         \
        NEXT(name); LOOK(READ, path_below(AT_FDCWD, path)) return next(path, about);                         \
    }                                                                                                        \
    int l##name(const char *path, struct type *about) {                                                      \
        NEXT(l##name); LOOK(READ, path_below(AT_FDCWD, path)) return next(path, about);                      \
    }                                                                                                        \
    int f##name(int fd, struct type *about) {                                                                \
        NEXT(f##name); LOOK(READ, fd_below(fd)) return next(fd, about);                                      \
    }
STATS(stat, stat)
STATS(stat64, stat64)
#define STATS_AT(name, type)                                                                                 \
    int name(int folder, const char *path, struct type *about, int flags) {                                  \
        NEXT(name);                                                                                          \
        LOOK(READ, *path ? path_below(folder, path) : fd_below(folder))                                      \
        return next(folder, path, about, flags);                                                             \
    }
STATS_AT(fstatat, stat)
STATS_AT(fstatat64, stat64)

/* A disk that is full says so. */
static int has_no_room(void) {
    int full = 0;
    for (int i = 0; control && control->on && i < 4; i++) full |= control->rules[i].calls & ROOM;
    return full;
}
#define FULL(about)                                                                                          \
    do {                                                                                                     \
        __atomic_add_fetch(&control->struck, 1, __ATOMIC_RELAXED);                                           \
        about->f_bavail = about->f_bfree = 0;                                                                \
    } while (0)
#define ROOMS(name, type)                                                                                    \
    int name(const char *path, struct type *about) {                                                         \
        NEXT(name);                                                                                          \
        int code = next(path, about);                                                                        \
        if (!code && has_no_room() && path_below(AT_FDCWD, path)) FULL(about);                               \
        return code;                                                                                         \
    }                                                                                                        \
    int f##name(int fd, struct type *about) {                                                                \
        NEXT(f##name);                                                                                       \
        int code = next(fd, about);                                                                          \
        if (!code && has_no_room() && fd_below(fd)) FULL(about);                                             \
        return code;                                                                                         \
    }
ROOMS(statvfs, statvfs)
ROOMS(statvfs64, statvfs64)

int clock_gettime(clockid_t which, struct timespec *now) {
    int code = (int)syscall(SYS_clock_gettime, which, now);
    if (!code && control && control->clock_ns && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) {
        int64_t all = now->tv_sec * 1000000000ll + now->tv_nsec + control->clock_ns;
        now->tv_sec = all / 1000000000;
        now->tv_nsec = all % 1000000000;
    }
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec there;
    int code = clock_gettime(CLOCK_REALTIME, &there);
    if (now) *now = (struct timeval){there.tv_sec, there.tv_nsec / 1000};
    return code;
}
time_t time(time_t *there) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (there) *there = now.tv_sec;
    return now.tv_sec;
}
