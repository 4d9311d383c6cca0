"""The ranks of an attempt together: rendezvous, process group, sums of gradients."""
