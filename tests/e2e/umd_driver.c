/* Loaded before tt-umd, this answers for the driver where the device nodes are not its own.
 *
 * tt-umd asks each node below /dev/tenstorrent what card it is: TENSTORRENT_IOCTL_GET_DEVICE_INFO, _IO(0xFA, 0). The
 * answer comes from the environment, CARDS="0=0000:01:00.0 1=0000:02:00.0": PCI addresses by number of the node. The
 * number of a node that is to be reset, TENSTORRENT_IOCTL_RESET_DEVICE, _IO(0xFA, 6), is a line of the file RESETS.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct device_info {
    uint32_t size_wanted;
    uint32_t size;
    uint16_t vendor, device, subsystem_vendor, subsystem;
    uint16_t bus_device_function, dma_buffer_log2, domain;
};

int ioctl(int descriptor, unsigned long request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);

    char link[64], path[256] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int number, found;
    if ((request != 0xFA00 && request != 0xFA06) || readlink(link, path, sizeof path - 1) < 0 || sscanf(path, "/dev/tenstorrent/%d", &number) != 1) {
        int (*next)(int, unsigned long, ...) = dlsym(RTLD_NEXT, "ioctl");
        return next(descriptor, request, argument);
    }
    if (request == 0xFA06) {
        int log = open(getenv("RESETS"), O_WRONLY | O_CREAT | O_APPEND, 0600);
        dprintf(log, "%d\n", number);
        close(log);
        ((uint32_t *)argument)[3] = 0; /* the result, behind two words of input and one of output */
        return 0;
    }
    unsigned domain, bus, device, function;
    for (const char *card = getenv("CARDS"); card; card = (card = strchr(card, ' ')) ? card + 1 : NULL)
        if (sscanf(card, "%d=%x:%x:%x.%x", &found, &domain, &bus, &device, &function) == 5 && found == number) {
            *(struct device_info *)argument = (struct device_info){
                .size = sizeof(struct device_info) - 4, .vendor = 0x1e52, .device = 0x401e, .subsystem_vendor = 0x1e52,
                .bus_device_function = bus << 8 | device << 3 | function, .domain = domain,
            };
            return 0;
        }
    return -1;
}
