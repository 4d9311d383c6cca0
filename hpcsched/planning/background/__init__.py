"""Two jobs on one GPU: when the background's work may be launched, and whether it may be there at all.

Pure: time comes in as an argument (microseconds, any zero), nothing is read or started here. The worker
drives it with CUDA events, the simulator with its simulated device.
"""
