"""Pure arithmetic, without torch: the machine, the model's costs, the choice of a layout, the simulated step."""
