"""Benchmarks of the kernels: ceilings, peers and ours in one run, correctness before any time. `python -m
gem_kernels.bench --help`.
"""
