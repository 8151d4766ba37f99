"""Which collective moves what, and why: copy engines, few SMs, small payloads; what is exposed of it."""
