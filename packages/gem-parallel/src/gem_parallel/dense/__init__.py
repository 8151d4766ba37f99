"""Dense parameters: the mesh, FSDP2 over the units, experts spread over ranks, the optimizer's state by name."""
