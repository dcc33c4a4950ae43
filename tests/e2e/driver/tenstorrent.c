// SPDX-License-Identifier: GPL-2.0
// Stands in for tt-kmd where only its device files matter: binds to QEMU's "edu" PCI device and
// makes, as tt-kmd does, the class device tenstorrent!N with the lowest free number N below the PCI
// function, and so the device file tenstorrent/N.
//
// From its first probe on, sysfs shows the function as an n150 without telemetry.
//
// It has no MODULE_DEVICE_TABLE, so that udev does not load it when it sees the device: modprobe
// must be asked for it.

#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/version.h>

#define NODES 32

static struct class *class;
static struct cdev nodes;
static dev_t first;
static DEFINE_IDA(numbers);

static const struct file_operations operations = {
	.owner = THIS_MODULE,
};

static int probe(struct pci_dev *function, const struct pci_device_id *id)
{
	struct device *device;
	int number = ida_alloc_max(&numbers, NODES - 1, GFP_KERNEL);

	if (number < 0)
		return number;

	// An n150, for everyone who reads sysfs from now on.
	function->vendor = function->subsystem_vendor = 0x1e52;
	function->device = 0x401e;
	function->subsystem_device = 0x18;

	device = device_create(class, &function->dev, first + number, NULL,
			       "tenstorrent!%d", number);
	if (IS_ERR(device)) {
		ida_free(&numbers, number);
		return PTR_ERR(device);
	}

	pci_set_drvdata(function, device);
	return 0;
}

static void remove(struct pci_dev *function)
{
	struct device *device = pci_get_drvdata(function);
	int number = device->devt - first;

	device_unregister(device);
	ida_free(&numbers, number);
}

// As the bus has it before and after the first probe.
static const struct pci_device_id functions[] = {
	{ PCI_DEVICE(0x1234, 0x11e8) },
	{ PCI_DEVICE(0x1e52, 0x401e) },
	{},
};

static struct pci_driver driver = {
	.name = "tenstorrent",
	.id_table = functions,
	.probe = probe,
	.remove = remove,
};

static int __init start(void)
{
	int error = alloc_chrdev_region(&first, 0, NODES, "tenstorrent");

	if (error)
		return error;

	cdev_init(&nodes, &operations);
	error = cdev_add(&nodes, first, NODES);
	if (error)
		goto region;

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
	class = class_create(THIS_MODULE, "tenstorrent");
#else
	class = class_create("tenstorrent");
#endif
	error = PTR_ERR_OR_ZERO(class);
	if (error)
		goto nodes;

	error = pci_register_driver(&driver);
	if (!error)
		return 0;

	class_destroy(class);
nodes:
	cdev_del(&nodes);
region:
	unregister_chrdev_region(first, NODES);
	return error;
}

static void __exit stop(void)
{
	pci_unregister_driver(&driver);
	class_destroy(class);
	cdev_del(&nodes);
	unregister_chrdev_region(first, NODES);
	ida_destroy(&numbers);
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("GPL");
MODULE_VERSION("2.10.0");
