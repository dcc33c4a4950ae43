/* Does with a hugepage what tt-umd does (device/hugepage.cpp), and keeps it. Static, for images
 * that have no C library.
 *
 * like_umd page FILE: opens a file in a hugetlbfs, or makes it for everybody, and maps its first
 *     page: "clean page" if nobody has left a mark in it, else "dirty page", then "page is mapped".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    if (count != 3 || strcmp(arguments[1], "page"))
        return 2;

    umask(0);
    int file = open(arguments[2], O_RDWR | O_CLOEXEC | O_CREAT, 0666);
    struct statfs system;
    if (file < 0 || fstatfs(file, &system) < 0 || ftruncate(file, system.f_bsize) < 0) {
        perror(arguments[2]);
        return 1;
    }

    int populated = MAP_SHARED | MAP_POPULATE;
    char *page = mmap(NULL, system.f_bsize, PROT_READ | PROT_WRITE, populated, file, 0);
    if (page == MAP_FAILED) {
        perror("mmap");
        return 1;
    }

    printf("%s\n", page[0] ? "dirty page" : "clean page");
    strcpy(page, "mark");
    printf("page is mapped\n");
    fflush(stdout);
    for (;;)
        pause();
}
