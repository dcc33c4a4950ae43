/* Does with a hugepage and with a lock what tt-umd does (device/hugepage.cpp and
 * device/utils/robust_mutex.cpp), and keeps it. What it finds goes to the output. Static, for
 * images that have no C library.
 *
 * like_umd page FILE: opens a file in a hugetlbfs, or makes it for everybody, and maps its first
 *     page: "clean page" if nobody has left a mark in it, else "dirty page", then "page is mapped".
 * like_umd lock FILE: opens a file with a robust mutex, or makes it, and locks that: "locked".
 * like_umd trylock FILE: tries to lock that: "taken", or "free".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

static void *mapped(const char *file, int flags)
{
    umask(0);
    int descriptor = open(file, O_RDWR | O_CLOEXEC | flags, 0666);
    struct statfs system;
    if (descriptor < 0 || fstatfs(descriptor, &system) < 0
        || ftruncate(descriptor, system.f_bsize) < 0) {
        perror(file);
        exit(1);
    }

    int populated = MAP_SHARED | MAP_POPULATE;
    void *page = mmap(NULL, system.f_bsize, PROT_READ | PROT_WRITE, populated, descriptor, 0);
    if (page == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return page;
}

static _Noreturn void keep(const char *what)
{
    printf("%s\n", what);
    for (;;)
        pause();
}

static _Noreturn void map_page(const char *file)
{
    char *page = mapped(file, O_CREAT);
    printf("%s\n", page[0] ? "dirty page" : "clean page");
    strcpy(page, "mark");
    keep("page is mapped");
}

static int lock(const char *file)
{
    int is_new = access(file, F_OK) < 0;
    pthread_mutex_t *mutex = mapped(file, O_CREAT);
    pthread_mutexattr_t robust;
    pthread_mutexattr_init(&robust);
    pthread_mutexattr_setpshared(&robust, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
    if (is_new && pthread_mutex_init(mutex, &robust))
        return 1;

    int error = pthread_mutex_lock(mutex);
    if (error == EOWNERDEAD) // the last one was killed while it had the lock
        error = pthread_mutex_consistent(mutex);
    if (error)
        return 1;
    keep("locked");
}

static int try_lock(const char *file)
{
    int error = pthread_mutex_trylock(mapped(file, 0));
    printf("%s\n", error == EBUSY ? "taken" : error == 0 ? "free" : strerror(error));
    return 0;
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);

    const char *command = arguments[1], *file = arguments[2];
    if (!strcmp(command, "page"))
        map_page(file);
    if (!strcmp(command, "lock"))
        return lock(file);
    if (!strcmp(command, "trylock"))
        return try_lock(file);
    return 2;
}
