"""The ladder: the techniques switched on one at a time, on your card and your data."""
