// SPDX-License-Identifier: GPL-2.0
// Stands in for tt-kmd where only its device files matter: binds to QEMU's "edu" PCI device and
// makes, as tt-kmd does, the class device tenstorrent!N with the lowest free number N below the PCI
// function, and so the device file tenstorrent/N, and /proc/driver/tenstorrent/N/pids, a line for
// each open descriptor of the file.
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
#include <linux/pid.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/version.h>

#define NODES 32

struct opening {
	struct list_head others;
	struct pid *opener;
};

struct node {
	struct device *device;
	struct proc_dir_entry *directory;
};

static struct class *class;
static struct proc_dir_entry *directories;
static struct cdev nodes;
static dev_t first;
static DEFINE_IDA(numbers);
static DEFINE_MUTEX(lock); // of the openings
static struct list_head openings[NODES];

static int opened(struct inode *inode, struct file *file)
{
	struct opening *opening = kmalloc(sizeof(*opening), GFP_KERNEL);

	if (!opening)
		return -ENOMEM;
	opening->opener = get_pid(task_tgid(current));

	mutex_lock(&lock);
	list_add_tail(&opening->others, &openings[iminor(inode) - MINOR(first)]);
	mutex_unlock(&lock);

	file->private_data = opening;
	return 0;
}

static int closed(struct inode *inode, struct file *file)
{
	struct opening *opening = file->private_data;

	mutex_lock(&lock);
	list_del(&opening->others);
	mutex_unlock(&lock);

	put_pid(opening->opener);
	kfree(opening);
	return 0;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.open = opened,
	.release = closed,
};

static int show_pids(struct seq_file *file, void *unused)
{
	struct list_head *of_node = file->private;
	struct opening *opening;

	mutex_lock(&lock);
	list_for_each_entry(opening, of_node, others)
		seq_printf(file, "%d\n", pid_vnr(opening->opener));
	mutex_unlock(&lock);
	return 0;
}

static int probe(struct pci_dev *function, const struct pci_device_id *id)
{
	struct node *node = kzalloc(sizeof(*node), GFP_KERNEL);
	char name[12];
	int number, error = -ENOMEM;

	if (!node)
		return error;
	number = ida_alloc_max(&numbers, NODES - 1, GFP_KERNEL);
	if (number < 0) {
		kfree(node);
		return number;
	}

	// An n150, for everyone who reads sysfs from now on.
	function->vendor = function->subsystem_vendor = 0x1e52;
	function->device = 0x401e;
	function->subsystem_device = 0x18;

	snprintf(name, sizeof(name), "%d", number);
	node->directory = proc_mkdir(name, directories);
	if (!node->directory)
		goto undo;
	if (!proc_create_single_data("pids", 0444, node->directory, show_pids, &openings[number]))
		goto undo;

	node->device = device_create(class, &function->dev, first + number, NULL,
				     "tenstorrent!%d", number);
	error = PTR_ERR_OR_ZERO(node->device);
	if (error)
		goto undo;

	pci_set_drvdata(function, node);
	return 0;

undo:
	proc_remove(node->directory);
	ida_free(&numbers, number);
	kfree(node);
	return error;
}

static void remove(struct pci_dev *function)
{
	struct node *node = pci_get_drvdata(function);
	int number = node->device->devt - first;

	device_unregister(node->device);
	proc_remove(node->directory);
	ida_free(&numbers, number);
	kfree(node);
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

	for (int number = 0; number < NODES; number++)
		INIT_LIST_HEAD(&openings[number]);

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

	error = -ENOMEM;
	directories = proc_mkdir("driver/tenstorrent", NULL);
	if (!directories)
		goto class;

	error = pci_register_driver(&driver);
	if (!error)
		return 0;

	proc_remove(directories);
class:
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
	proc_remove(directories);
	class_destroy(class);
	cdev_del(&nodes);
	unregister_chrdev_region(first, NODES);
	ida_destroy(&numbers);
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("GPL");
MODULE_VERSION("2.10.0");
