"""Every loss against what people use today, in one process on the same arrays.

`cases` lists the losses, `torch_forms` how PyTorch's users write them. `measure` takes time and
memory, and `run` writes the tables.
"""
