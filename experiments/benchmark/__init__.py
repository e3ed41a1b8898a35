"""Every loss against what people use today, in one process on the same arrays.

`cases` lists what is compared, `torch_forms` how PyTorch's users write it. `measure` takes time and
memory, `solvers` does the same for the prototypes, and `report` and `figure` write the results.
"""
