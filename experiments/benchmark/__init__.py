"""Every loss against what people use today, in one process on the same arrays.

`cases` lists what is compared, `torch_forms` how PyTorch's users write it. `measure` takes time and
memory, `solvers` does the same for the prototypes and `steps` for whole training steps, with the
networks of `torch_backbones`. `report` and `figure` write the results.
"""
