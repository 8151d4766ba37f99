"""How well the machine is used: layers alone, whole steps, and where the difference goes."""
