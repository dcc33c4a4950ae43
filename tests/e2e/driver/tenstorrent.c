// SPDX-License-Identifier: GPL-2.0
// Stands in for tt-kmd where only its device nodes matter: binds to QEMU's "edu" PCI device and makes, as tt-kmd does,
// the class device tenstorrent!N with the lowest free number N below the PCI function, and so the node tenstorrent/N.
// It has no MODULE_DEVICE_TABLE, so that udev does not load it when it sees the device: somebody has to ask for it.

#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/pci.h>

#define NODES 32

static struct class *class;
static struct cdev nodes;
static dev_t first;
static DEFINE_IDA(numbers);
static const struct file_operations operations = { .owner = THIS_MODULE };

static int probe(struct pci_dev *function, const struct pci_device_id *id)
{
	struct device *device;
	int number = ida_alloc_max(&numbers, NODES - 1, GFP_KERNEL);

	if (number < 0)
		return number;
	device = device_create(class, &function->dev, first + number, NULL, "tenstorrent!%d", number);
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

static const struct pci_device_id functions[] = { { PCI_DEVICE(0x1234, 0x11e8) }, {} };

static struct pci_driver driver = { .name = "tenstorrent", .id_table = functions, .probe = probe, .remove = remove };

static int __init start(void)
{
	int error = alloc_chrdev_region(&first, 0, NODES, "tenstorrent");

	if (error)
		return error;
	cdev_init(&nodes, &operations);
	error = cdev_add(&nodes, first, NODES);
	if (error)
		goto region;
	class = class_create(THIS_MODULE, "tenstorrent");
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
