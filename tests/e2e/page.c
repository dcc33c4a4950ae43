/* Does with a hugepage what tt-umd does (device/hugepage.cpp): opens a file, or makes it for everybody, maps it and
 * keeps it. Whether it was clean, and that it is mapped, go to the output.
 *
 * page FILE: the file, in a hugetlbfs. Its first page gets this process's mark.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

static int failed(const char *what)
{
    perror(what);
    return 1;
}

int main(int count, char **arguments)
{
    const char *file = arguments[count - 1];
    setvbuf(stdout, NULL, _IOLBF, 0);
    umask(0);
    int descriptor = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0)
        return failed("open");
    struct statfs system;
    if (fstatfs(descriptor, &system) < 0 || ftruncate(descriptor, system.f_bsize) < 0)
        return failed("ftruncate");
    char *page = mmap(NULL, system.f_bsize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
    if (page == MAP_FAILED)
        return failed("mmap");
    printf("%s\n", page[0] ? "dirty page" : "clean page");
    strcpy(page, "mark");
    printf("page is mapped\n");
    for (;;)
        pause();
}
