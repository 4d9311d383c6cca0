"""Several trainings as one on a device (pack, section 2.2). The public calls: `hpcsched.worker.packed`."""
