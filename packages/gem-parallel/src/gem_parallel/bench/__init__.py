"""`python -m gem_parallel.bench`: what a layout's parts cost on the machine at hand."""
