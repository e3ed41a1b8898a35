"""Common ground: checks, batches over devices, products, numerics."""
