"""Every loss against what people use today, in one process on the same arrays.

`cases` lists the losses with their sizes, `torch_forms` how PyTorch's users write them. `measure`
takes time, and `run` writes the table. `cycles` has a TPU's compiler estimate the time, and
`precision` compares the settings of JAX's switch with it.
"""
