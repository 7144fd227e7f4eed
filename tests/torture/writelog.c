/* Logs what a process does to the files below one folder, in the order in which it does it.
 *
 * Loaded with LD_PRELOAD; tests/torture/writelog.py compiles it, reads the log and makes the files
 * as a power cut at any entry may leave them. Active if WRITELOG_FOLDER and WRITELOG_FILE are set.
 * An entry that changes something is written before the call, one that makes it durable after it.
 * The process may also write marks of its own, and order a call to fail.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, WROTE, SYNC, SYNCED, SYNC_FAILED, SIZE, RENAME, UNLINK, MKDIR, RMDIR, MARK };

struct entry {
    uint64_t number;
    uint32_t op;
    uint32_t flags;
    uint64_t offset;
    uint64_t length; /* of the data behind the names; of SIZE: the file's size, no data */
    uint32_t name_length;
    uint32_t other_length;
};

static char folder[PATH_MAX];
static size_t folder_length;
static int log_fd = -1;
static uint64_t number;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static char fail_path[PATH_MAX];
static int fail_countdown, fail_errno, fail_after;

__attribute__((constructor)) static void begin(void) {
    const char *root = getenv("WRITELOG_FOLDER"), *file = getenv("WRITELOG_FILE");
    if (!root || !file || !realpath(root, folder)) return;
    folder_length = strlen(folder);
    log_fd = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void put(const void *data, size_t length) {
    const char *at = data;
    while (length) {
        ssize_t done = syscall(SYS_write, log_fd, at, length);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) abort();
        at += done;
        length -= done;
    }
}

static uint64_t note(int op, uint32_t flags, uint64_t offset, const char *name, const char *other,
                     const struct iovec *parts, int count, uint64_t size) {
    int saved = errno;
    struct entry entry = {0, op, flags, offset, size, strlen(name), other ? strlen(other) : 0};
    for (int at = 0; at < count; at++) entry.length += parts[at].iov_len;
    pthread_mutex_lock(&guard);
    entry.number = ++number;
    put(&entry, sizeof entry);
    put(name, entry.name_length);
    if (other) put(other, entry.other_length);
    for (int at = 0; at < count; at++) put(parts[at].iov_base, parts[at].iov_len);
    pthread_mutex_unlock(&guard);
    errno = saved;
    return entry.number;
}

/* The name relative to the folder; NULL if it is not below it. "" is the folder itself. */
static const char *below(char *path) {
    if (strncmp(path, folder, folder_length)) return NULL;
    if (path[folder_length] == 0) return path + folder_length;
    return path[folder_length] == '/' ? path + folder_length + 1 : NULL;
}

static const char *of_fd(int fd, char *path) {
    char link[64];
    if (log_fd < 0) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length <= 0) return NULL;
    path[length] = 0;
    return below(path);
}

static const char *of_name(int at, const char *name, char *path) {
    if (log_fd < 0 || !name) return NULL;
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return below(path);
    }
    char start[PATH_MAX];
    if (at == AT_FDCWD) {
        if (syscall(SYS_getcwd, start, sizeof start) < 0) return NULL;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, start, sizeof start - 1);
        if (length <= 0) return NULL;
        start[length] = 0;
    }
    if (snprintf(path, PATH_MAX, "%s/%s", start, name) >= PATH_MAX) return NULL;
    return below(path);
}

/* ---------------------------------------------------------------- for the process itself */

uint64_t writelog_mark(const char *text) {
    return log_fd < 0 ? 0 : note(MARK, 0, 0, text, NULL, NULL, 0, 0);
}

/* The nth coming write or sync of the file fails with `code`; after: it was done all the same. */
void writelog_fail(const char *name, int nth, int code, int after) {
    snprintf(fail_path, sizeof fail_path, "%s", name);
    fail_countdown = nth;
    fail_errno = code;
    fail_after = after;
}

static int fails(const char *name) {
    return fail_countdown > 0 && !strcmp(name, fail_path) && --fail_countdown == 0;
}

/* ---------------------------------------------------------------- content */

static uint32_t is_synchronous(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DSYNC) ? 1 : 0;
}

static off_t position(int fd) {
    return fcntl(fd, F_GETFL) & O_APPEND ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
}

#define WRITING(fd, offset, parts, count, call)                                      \
    char path[PATH_MAX];                                                             \
    const char *name = of_fd(fd, path);                                              \
    if (!name) return call;                                                          \
    uint32_t synchronous = is_synchronous(fd);                                       \
    int failing = fails(name);                                                       \
    if (!failing || fail_after) note(WRITE, synchronous, offset, name, NULL, parts, count, 0); \
    if (failing && !fail_after) return errno = fail_errno, -1;                       \
    ssize_t done = call;                                                             \
    if (failing) return errno = fail_errno, -1;                                      \
    if (synchronous && done >= 0) note(WROTE, 0, offset, name, NULL, NULL, 0, 0);    \
    return done;

ssize_t write(int fd, const void *data, size_t length) {
    struct iovec part = {(void *)data, length};
    WRITING(fd, position(fd), &part, 1, syscall(SYS_write, fd, data, length))
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    WRITING(fd, position(fd), parts, count, syscall(SYS_writev, fd, parts, count))
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) {
    struct iovec part = {(void *)data, length};
    WRITING(fd, offset, &part, 1, syscall(SYS_pwrite64, fd, data, length, offset))
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
    return pwrite(fd, data, length, offset);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    WRITING(fd, offset, parts, count, syscall(SYS_pwritev, fd, parts, count, offset, 0))
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return pwritev(fd, parts, count, offset);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    return flags ? (errno = EOPNOTSUPP, -1) : pwritev(fd, parts, count, offset);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    return flags ? (errno = EOPNOTSUPP, -1) : pwritev(fd, parts, count, offset);
}

static int synced(int fd, long call) {
    char path[PATH_MAX];
    const char *name = of_fd(fd, path);
    if (!name) return syscall(call, fd);
    note(SYNC, 0, 0, name, NULL, NULL, 0, 0);
    int failing = fails(name);
    int result = failing ? (errno = fail_errno, -1) : syscall(call, fd);
    note(result == 0 ? SYNCED : SYNC_FAILED, 0, 0, name, NULL, NULL, 0, 0);
    return result;
}

int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static void sized(int fd, uint64_t size) {
    char path[PATH_MAX];
    const char *name = of_fd(fd, path);
    if (name) note(SIZE, 0, 0, name, NULL, NULL, 0, size);
}

static int allocated(int fd, int mode, off64_t offset, off64_t length) {
    struct stat stat;
    if (mode == 0 && fstat(fd, &stat) == 0 && offset + length > stat.st_size)
        sized(fd, offset + length);
    return syscall(SYS_fallocate, fd, mode, offset, length);
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    return allocated(fd, mode, offset, length);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
    return allocated(fd, mode, offset, length);
}

int posix_fallocate(int fd, off_t offset, off_t length) {
    return allocated(fd, 0, offset, length) == 0 ? 0 : errno;
}

int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    return posix_fallocate(fd, offset, length);
}

int ftruncate(int fd, off_t size) {
    sized(fd, size);
    return syscall(SYS_ftruncate, fd, size);
}

int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

/* ---------------------------------------------------------------- names */

static int opened(int at, const char *given, int flags, mode_t mode) {
    char path[PATH_MAX];
    const char *name = flags & (O_CREAT | O_TRUNC) ? of_name(at, given, path) : NULL;
    int is_new = name && syscall(SYS_faccessat, at, given, F_OK) != 0;
    int fd = syscall(SYS_openat, at, given, flags, mode);
    if (fd >= 0 && is_new) note(CREATE, 0, 0, name, NULL, NULL, 0, 0);
    else if (fd >= 0 && name && flags & O_TRUNC) note(SIZE, 0, 0, name, NULL, NULL, 0, 0);
    return fd;
}

#define MODE(flags) mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); \
        mode = va_arg(more, mode_t); va_end(more); }

int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int openat(int at, const char *name, int flags, ...) { MODE(flags) return opened(at, name, flags, mode); }
int openat64(int at, const char *name, int flags, ...) { MODE(flags) return opened(at, name, flags, mode); }

int rename(const char *from, const char *to) {
    char path[PATH_MAX], other[PATH_MAX];
    const char *name = of_name(AT_FDCWD, from, path), *target = of_name(AT_FDCWD, to, other);
    if (name && target) note(RENAME, 0, 0, name, target, NULL, 0, 0);
    return syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
}

int renameat(int at, const char *from, int to_at, const char *to) {
    char path[PATH_MAX], other[PATH_MAX];
    const char *name = of_name(at, from, path), *target = of_name(to_at, to, other);
    if (name && target) note(RENAME, 0, 0, name, target, NULL, 0, 0);
    return syscall(SYS_renameat, at, from, to_at, to);
}

int unlinkat(int at, const char *given, int flags) {
    char path[PATH_MAX];
    const char *name = of_name(at, given, path);
    int there = name && syscall(SYS_faccessat, at, given, F_OK) == 0;
    if (there) note(flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, 0, name, NULL, NULL, 0, 0);
    return syscall(SYS_unlinkat, at, given, flags);
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int at, const char *given, mode_t mode) {
    char path[PATH_MAX];
    const char *name = of_name(at, given, path);
    int result = syscall(SYS_mkdirat, at, given, mode);
    if (result == 0 && name) note(MKDIR, 0, 0, name, NULL, NULL, 0, 0);
    return result;
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
