"""`python -m gem_lowprec.bench`: ceilings, peers and our kernels in one run, results checked before times are taken."""
