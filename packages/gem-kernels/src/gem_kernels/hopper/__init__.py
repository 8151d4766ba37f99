"""Gluon building blocks of the Hopper (sm_90) attention kernels: activations, forward, backward, launch."""
