"""Virtual stream workers: many equal workers on few, unequal devices (JABAS, section 4).

A step's global batch is cut into local batches of one size, one for each worker, wherever that is computed:
so what a training learns does not depend on how many devices there are, how fast each is, or what a device
does at once and what after each other.
"""
